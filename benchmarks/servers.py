"""The model of `make demo` behind other servers, as their documentation says: `python -m benchmarks.servers WHO MODEL
PORT THREADS`.

Both take `{"image": [784 numbers]}` and answer `{"label": ..., "probabilities": [...]}`. LitServe makes batches of up
to as many images as our service does. The FastAPI endpoint is the usual one: it predicts each image alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

BATCH, WAIT_SECONDS, SIDE = 30, 0.01, 28


class ImageRequest(BaseModel):
    image: list[int]


class FastApiPrediction(BaseModel):
    label: int
    probabilities: list[float]


def make_predictor(model: str, threads: int) -> Callable[[Sequence[Any]], list[dict[str, Any]]]:
    """Function that predicts images, each of 784 numbers, in one forward pass."""
    import torch
    from safetensors.torch import load_file

    from training.data.datasets import to_input
    from training.models.image_models import build_model

    torch.set_num_threads(threads)
    module = build_model()
    module.load_state_dict(load_file(model))
    module.eval()

    @torch.inference_mode()
    def predict(images: Sequence[Any]) -> list[dict[str, Any]]:
        pixels = torch.tensor(images, dtype=torch.uint8).view(-1, SIDE, SIDE)
        rows = torch.softmax(module(to_input(pixels)), 1)
        labels = zip(rows.argmax(1).tolist(), rows.tolist(), strict=True)
        return [{"label": label, "probabilities": row} for label, row in labels]

    return predict


def serve_by_fastapi(model: str, port: int, threads: int) -> None:
    import uvicorn
    from fastapi import FastAPI

    predict, app = make_predictor(model, threads), FastAPI()

    @app.post("/predict")
    def predict_image(request: ImageRequest) -> FastApiPrediction:
        return FastApiPrediction(**predict([request.image])[0])

    uvicorn.run(app, port=port, log_level="warning")


def serve_by_litserve(model: str, port: int, threads: int) -> None:
    from litserve import LitServer

    from benchmarks.lit import DemoApi

    server = LitServer(DemoApi(model, threads), accelerator="cpu")
    server.run(host="127.0.0.1", port=port, log_level="warning", generate_client_file=False)


SERVERS = {"FastAPI": serve_by_fastapi, "LitServe": serve_by_litserve}


if __name__ == "__main__":
    who, model, port, threads = sys.argv[1:]
    SERVERS[who](str(Path(model).resolve()), int(port), int(threads))
