# The service over one or several checkpoints, as docs/inference.md describes it:
# docker build -f docker/service.Dockerfile -t ckpt-tools-serve .
FROM python:3.12-slim AS build
WORKDIR /src
COPY . .
RUN python -m venv /venv \
 && /venv/bin/pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints/users.txt \
    '.[serve,s3]'

FROM python:3.12-slim
RUN useradd --create-home --uid 10001 serve
COPY --from=build /venv /venv
USER serve
WORKDIR /home/serve
EXPOSE 8000
STOPSIGNAL SIGTERM
# Ready, and not only alive: Kubernetes has probes of its own, /v2/health/live and /v2/health/ready.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
  CMD ["/venv/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=2)"]
ENTRYPOINT ["/venv/bin/ckpt-tools", "serve", "--host", "0.0.0.0", "--port", "8000", "--drain", "5"]
