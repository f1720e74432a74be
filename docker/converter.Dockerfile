# The converter alone, without torch: docker build -f docker/converter.Dockerfile -t ckpt-tools .
# Other extras than none: --build-arg EXTRAS=s3,hub
FROM python:3.13-slim AS build
ARG EXTRAS=""
WORKDIR /src
COPY . .
RUN python -m venv --without-pip /venv \
 && pip --python /venv/bin/python install --no-cache-dir --no-compile -c constraints/users.txt ".${EXTRAS:+[$EXTRAS]}" \
 && find /venv -type d -name tests -prune -exec rm -r {} + \
 && find /venv -name '*.pyi' -delete \
 && rm -r /venv/lib/python*/site-packages/numpy/f2py /venv/lib/python*/site-packages/numpy/_core/include \
 && /venv/bin/ckpt-tools formats

FROM python:3.13-slim
RUN useradd --create-home --uid 10001 ckpt
COPY --from=build /venv /venv
USER ckpt
WORKDIR /work
ENTRYPOINT ["/venv/bin/ckpt-tools"]
