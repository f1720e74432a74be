"""A small HTTP service over one consolidated model file.

``POST /predict`` takes an image as the multipart form field ``image`` and gives the answer that the batch script gives
for the same file. ``GET /healthz`` is 200 once the model is loaded, for a load balancer to ask. What is wrong with
a request comes back as one sentence in ``detail``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import uvicorn
from fastapi import FastAPI, HTTPException, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from torch import Tensor

from ckpt_tools.errors import CkptError, FormatError

from .loading import load_model
from .prediction import decode_image, predict

MAX_UPLOAD_BYTES = 16 * 2**20


class Answer(BaseModel):
    """The most probable class, and the probability of each class in order."""

    label: int
    probabilities: list[float]


def create_app(model_path: Path) -> FastAPI:
    """The application over a model file, which is loaded here: a bad one stops the start, not the first request."""
    model = load_model(model_path)
    app = FastAPI(title="ckpt-tools inference")
    app.add_exception_handler(RequestValidationError, _without_image)

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/predict")
    def predict_image(image: UploadFile) -> Answer:
        [prediction] = predict(model, posted_pixels(image).unsqueeze(0))
        return Answer(label=prediction.label, probabilities=list(prediction.probabilities))

    return app


def posted_pixels(image: UploadFile) -> Tensor:
    """The pixels of a posted file, uint8 [28, 28]; raises ``HTTPException`` 413 or 400 where it is no usable image."""
    data = image.file.read(MAX_UPLOAD_BYTES + 1)
    if len(data) > MAX_UPLOAD_BYTES:
        raise HTTPException(413, f"the image is larger than {MAX_UPLOAD_BYTES // 2**20} MiB")
    try:
        return decode_image(data, image.filename or "the posted file")
    except FormatError as error:
        raise HTTPException(400, str(error)) from error


async def _without_image(_request: Request, _error: Exception) -> JSONResponse:
    return JSONResponse({"detail": "post the image as the file of a multipart form field named image"}, 422)


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", help="The address to listen on.")
@click.option("--port", type=int, default=8000, help="The port to listen on; 0 takes a free one.")
def main(model: Path, host: str, port: int) -> None:
    """Serve MODEL, a .safetensors or .pt file or a folder of safetensors, over HTTP."""
    try:
        app = create_app(model)
    except CkptError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    serve(app, host, port)


def serve(app: FastAPI, host: str, port: int) -> None:
    """Serve until the process is told to stop; the address is printed once it listens, so port 0 is of use."""
    config = uvicorn.Config(app, host=host, port=port, log_level="warning")
    with config.bind_socket() as listening:
        click.echo(f"serving on http://{host}:{listening.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
