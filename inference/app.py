"""The HTTP application: ``POST /predict``, ``GET /healthz``. Nothing that is posted is ever written to the disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec

from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor, nn, stack

from ckpt_tools.errors import FormatError

from .batching import Batcher, QueueFullError
from .prediction import decode_image, predict
from .results import Prediction
from .training_package import evaluation

MAX_UPLOAD_BYTES = 16 * 2**20

# What a multipart form takes around one file: its boundaries, headers and the file's name.
MAX_BODY_BYTES = MAX_UPLOAD_BYTES + 2**16

MAX_WAITING = 256
"""Images that may wait for the model: about nine forward passes. A client that meets a full queue gets 503 at once."""

RETRY_AFTER = {"Retry-After": "1"}

TOO_LARGE = f"the image is larger than {MAX_UPLOAD_BYTES // 2**20} MiB"
HOW_TO_POST = "post the image as the one file of a multipart form field named image"
CLOSE = {"Connection": "close"}

FORM = {
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["image"],
                "properties": {"image": {"type": "string", "format": "binary"}},
            }
        }
    },
    "required": True,
}

if not (find_spec("python_multipart") or find_spec("multipart")):
    # starlette finds this out only when a form comes in.
    raise ModuleNotFoundError("No module named 'python_multipart'", name="python_multipart")


class Answer(BaseModel):
    """The most probable class, and the probability of each class in order."""

    label: int
    probabilities: list[float]


class BodyLimit:
    """Refuses a body over ``MAX_BODY_BYTES`` before it is read: by its declared length, else by counting what arrives.

    It also answers a request that is still incomplete when the service ends, which is cancelled then.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif _declared_bytes(scope) > MAX_BODY_BYTES:
            await JSONResponse({"detail": TOO_LARGE}, 413, CLOSE)(scope, receive, send)
        else:
            await self._pass_on(scope, _counting(receive), send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def watch(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except asyncio.CancelledError:
            if not has_started:
                await JSONResponse({"detail": "the service is stopping"}, 503, CLOSE)(scope, receive, send)


def _declared_bytes(scope: Scope) -> int:
    return max((int(value) for name, value in scope["headers"] if name == b"content-length"), default=0)


def _counting(receive: Receive) -> Receive:
    """``receive`` that raises ``HTTPException`` 413 as soon as the body is larger than it may be."""
    num_bytes = 0

    async def count() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, TOO_LARGE, CLOSE)
        return message

    return count


class InMemoryParser(MultiPartParser):
    """starlette's parser of forms, which moves no file to the disk: bodies are bounded before it sees them."""

    spool_max_size = MAX_BODY_BYTES
    max_file_size = MAX_BODY_BYTES  # its name in older versions of starlette


def create_app(model: nn.Module) -> FastAPI:
    """The application over a loaded model."""

    def predict_together(images: Sequence[Tensor]) -> list[Prediction]:
        return predict(model, stack(list(images)))

    batcher = Batcher(predict_together, max_batch=evaluation.CHUNK, max_waiting=MAX_WAITING)

    @asynccontextmanager
    async def run_batcher(_: FastAPI) -> AsyncIterator[None]:
        with batcher:
            yield

    app = FastAPI(title="ckpt-tools inference", lifespan=run_batcher)
    app.add_middleware(BodyLimit)

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/predict", openapi_extra={"requestBody": FORM})
    async def predict_image(request: Request) -> Answer:
        image = the_image(await read_form(request))
        pixels = await run_in_threadpool(read_pixels, image)
        prediction = await predicted(batcher, pixels)
        assert prediction.label is not None
        assert prediction.probabilities is not None
        return Answer(label=prediction.label, probabilities=list(prediction.probabilities))

    return app


async def read_form(request: Request) -> FormData:
    """The posted form, in memory. Raises ``HTTPException`` 422 for another kind of body, 400 for a broken one."""
    if not request.headers.get("Content-Type", "").lower().startswith("multipart/form-data"):
        raise HTTPException(422, HOW_TO_POST)
    try:
        return await InMemoryParser(request.headers, request.stream()).parse()
    except MultiPartException as error:
        raise HTTPException(400, f"the form cannot be read ({error.message}); {HOW_TO_POST}") from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the connection was closed before the whole form was there") from error


def the_image(form: FormData) -> UploadFile:
    """The one file of a form; raises ``HTTPException`` 422 that says what else is in it, 413 for too large a file."""
    items = form.multi_items()
    if unknown := sorted({name for name, _ in items if name != "image"}):
        raise HTTPException(422, f"the form has the unknown field {unknown[0][:100]!r}; {HOW_TO_POST}")
    if len(items) > 1:
        raise HTTPException(422, f"the form has {len(items)} fields named image; {HOW_TO_POST}")
    if not items or not isinstance(items[0][1], UploadFile):
        raise HTTPException(422, HOW_TO_POST)
    if (items[0][1].size or 0) > MAX_UPLOAD_BYTES:
        raise HTTPException(413, TOO_LARGE)
    return items[0][1]


def read_pixels(image: UploadFile) -> Tensor:
    """The pixels of one file, uint8 [28, 28]; raises ``HTTPException`` 400 if it is not a usable image."""
    try:
        return decode_image(image.file, image.filename or "the posted file")
    except FormatError as error:
        raise HTTPException(400, str(error)) from error


async def predicted(batcher: Batcher[Tensor, Prediction], pixels: Tensor) -> Prediction:
    """The answer for one image; raises ``HTTPException`` 503 if too many wait already."""
    try:
        return await batcher.submit(pixels)
    except QueueFullError as error:
        detail = f"{batcher.max_waiting} images wait to be predicted, which is the limit; try again in a second"
        raise HTTPException(503, detail, RETRY_AFTER) from error
