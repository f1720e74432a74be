"""The HTTP application: page, ``POST /predict``, Open Inference Protocol, ``/metrics``, ``/healthz``.

Nothing that is posted is ever written to the disk.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...models.predictor import Prediction, Predictor
from ...models.results import BYTES, ModelInput
from ..metrics import CONTENT_TYPE, write_exposition
from ..protocol import NOT_FINITE
from ..refusals import RequestRefusal, render_refusal
from ..repository import ModelRepository
from ..service import ReplicaMetrics, Service, hold_counted_version, predict_items
from ..settings import MAX_BODY_BYTES, MAX_UPLOAD_BYTES, GrpcSettings, ServiceSettings
from .endpoints import Endpoints, FastPath
from .middleware import TOO_LARGE, ServiceMiddleware
from .openapi import describe_paths

HOW_TO_POST = "post the image as the one file of a multipart form field named image"
HOW_TO_POST_TEXT = "post the text as the one multipart form field named text"
PAGE = Path(__file__).with_name("page.html")

# The page is one file and sends requests to this service only.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

# It warns of each damaged form, so that any client could fill the log.
logging.getLogger("python_multipart").setLevel(logging.ERROR)
if not (find_spec("python_multipart") or find_spec("multipart")):
    # starlette finds this out only when a form comes in.
    raise ModuleNotFoundError("No module named 'python_multipart'", name="python_multipart")

Result = TypeVar("Result")


class Application(FastAPI):
    """FastAPI application with ``http_app`` in front of it for HTTP requests."""

    http_app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.http_app if scope["type"] == "http" else self.call_fastapi)(scope, receive, send)

    async def call_fastapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)


class InMemoryParser(MultiPartParser):
    """starlette's form parser without spooling to disk; body sizes are limited before it."""

    spool_max_size = MAX_BODY_BYTES
    max_file_size = MAX_BODY_BYTES  # its name in older versions of starlette


def create_app(
    repository: ModelRepository,
    settings: ServiceSettings | None = None,
    *,
    background: AbstractContextManager[object] | None = None,
    grpc_settings: GrpcSettings | None = None,
    get_replica_metrics: ReplicaMetrics | None = None,
) -> Application:
    """The application over loaded models, which it closes at its end. ``background`` is entered while it runs, gRPC is
    served with ``grpc_settings``, and ``get_replica_metrics`` gets the metrics of all replicas."""
    chosen_settings = settings or ServiceSettings()
    service = Service(repository, chosen_settings, get_replica_metrics)

    @asynccontextmanager
    async def run_lifespan(_: FastAPI) -> AsyncIterator[None]:
        grpc_server: AbstractAsyncContextManager[None] = nullcontext()
        if grpc_settings is not None:  # imported on use, which keeps start-up fast
            from ..grpc.server import serve_grpc

            grpc_server = serve_grpc(service, grpc_settings)
        with background or nullcontext():
            async with grpc_server:
                yield
        service.close()

    async def predict(request: Request) -> Response:
        form = await read_form(request)
        name = choose_model(repository, request.query_params.get("model"))
        with hold_counted_version(repository, request.scope["state"], name, None) as version:
            item = await read_item(form, version.predictor, service)
            (prediction,) = await predict_items(version, [item], chosen_settings.timeout)
        headers = {"X-Model-Name": version.name, "X-Model-Version": str(version.number)}
        try:
            return JSONResponse(render_prediction(prediction, version.predictor), headers=headers)
        except ValueError as error:
            raise RequestRefusal(400, NOT_FINITE) from error

    endpoints, text = Endpoints(service), PAGE.read_text(encoding="utf-8")
    app = Application(
        title="ckpt-tools inference", lifespan=run_lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.service = service
    app.http_app = ServiceMiddleware(FastPath(app.call_fastapi, endpoints, render_error), service)
    # Not FastAPI's own kind of route: that costs much of the processor time of an answer.
    app.router.routes.append(Route("/predict", predict, methods=["POST"]))
    app.router.routes.extend(endpoints.list_routes())
    describe_paths(app)
    for kind in (RequestRefusal, HTTPException, Exception):
        app.add_exception_handler(kind, render_error)

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers=PAGE_HEADERS)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(write_exposition(await service.collect_metrics()), media_type=CONTENT_TYPE)

    return app


async def render_error(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        error = RequestRefusal(error.status_code, error.detail, error.headers)
    if not isinstance(error, RequestRefusal):
        error = RequestRefusal(500, "the service failed on this request; its log says why")
    return render_refusal(request.url.path, error)


def choose_model(repository: ModelRepository, name: str | None) -> str:
    """The requested model's name, or that of the only one. Raises ``RequestRefusal`` 400."""
    if name is not None:
        return name
    if len(repository.names) > 1:
        raise RequestRefusal(400, f"say which model: ?model=NAME with one of {', '.join(repository.names)}")
    return repository.names[0]


def render_prediction(prediction: Prediction, predictor: Predictor) -> dict[str, object]:
    """Fields of the prediction, and the name of its label if known."""
    fields = prediction.to_plain()
    if predictor.labels and prediction.label is not None:
        fields["name"] = predictor.labels[prediction.label]
    return fields


async def read_form(request: Request) -> FormData:
    """The posted form, in memory. Raises ``RequestRefusal``: 422 for another content type, 400 for a malformed form."""
    if not request.headers.get("Content-Type", "").lower().startswith("multipart/form-data"):
        raise RequestRefusal(422, HOW_TO_POST)
    try:
        parser = InMemoryParser(request.headers, request.stream())
        parser.max_part_size = MAX_BODY_BYTES  # of a text; the initializer sets it to 1 MiB
        return await parser.parse()
    except MultiPartException as error:
        raise RequestRefusal(400, f"the form cannot be read ({error.message}); {HOW_TO_POST}") from error
    except ClientDisconnect as error:
        raise RequestRefusal(400, "the connection was closed before the whole form was there") from error


async def read_item(form: FormData, predictor: Predictor, service: Service) -> ModelInput:
    """The model's input in a form: an image, or a text for a text model. Raises ``RequestRefusal`` 422, 413 or 400."""
    if predictor.inputs[0].datatype == BYTES:
        text = find_field(form, "text", str, HOW_TO_POST_TEXT)
        return await service.decode_item(predictor, text.encode("utf-8", "surrogatepass"), "the posted text")
    image = find_field(form, "image", UploadFile, HOW_TO_POST)
    if (image.size or 0) > MAX_UPLOAD_BYTES:
        raise RequestRefusal(413, TOO_LARGE)
    data = await image.read()
    await image.close()
    return await service.decode_item(predictor, data, image.filename or "the posted file")


def find_field(form: FormData, name: str, kind: type[Result], how: str) -> Result:
    """The one field of a form. Raises ``RequestRefusal`` 422 for other fields, or a value that is not a ``kind``."""
    items = form.multi_items()
    if unknown := sorted({key for key, _ in items if key != name}):
        raise RequestRefusal(422, f"the form has the unknown field {unknown[0][:100]!r}; {how}")
    if len(items) > 1:
        raise RequestRefusal(422, f"the form has {len(items)} fields named {name}; {how}")
    if not items or not isinstance(items[0][1], kind):
        raise RequestRefusal(422, how)
    return items[0][1]
