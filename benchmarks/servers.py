"""The model of `make demo` behind other servers, as their documentation says: `python -m benchmarks.servers WHO MODEL
PORT THREADS`.

Both take `{"image": [784 numbers]}` and answer `{"label": ..., "probabilities": [...]}`. LitServe makes batches of up
to as many images as our service does. The FastAPI endpoint is the usual one: it predicts each image alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.demo_model import Answer, predicting


def fastapi(model: str, port: int, threads: int) -> None:
    import uvicorn
    from fastapi import FastAPI
    from pydantic import create_model

    predict, app = predicting(model, threads), FastAPI()
    asked: Any = create_model("Asked", image=(list[int], ...))

    def endpoint(given: Any) -> Answer:
        return predict([given.image])[0]

    endpoint.__annotations__ = {"given": asked, "return": Answer}
    app.post("/predict")(endpoint)
    uvicorn.run(app, port=port, log_level="warning")


def litserve(model: str, port: int, threads: int) -> None:
    from litserve import LitServer

    from benchmarks.lit import Api

    server = LitServer(Api(model, threads), accelerator="cpu")
    server.run(host="127.0.0.1", port=port, log_level="warning", generate_client_file=False)


SERVERS = {"FastAPI": fastapi, "LitServe": litserve}


if __name__ == "__main__":
    who, model, port, threads = sys.argv[1:]
    SERVERS[who](str(Path(model).resolve()), int(port), int(threads))
