"""KServe's own clients, unmodified, in an environment of their own: it prints what they get.

``python kserve_client.py URL GRPC PIXELS``, where PIXELS is an ``.npy`` file.
"""

import asyncio
import json
import sys
from typing import Any

import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, InferResponse
from kserve.inference_client import RESTConfig


def request(pixels: Any, *, is_binary: bool) -> InferRequest:
    given = InferInput("image", list(pixels.shape), "UINT8")
    given.set_data_from_numpy(pixels, binary_data=is_binary)
    parameters = {"binary_data_output": True} if is_binary else {}
    return InferRequest("m", [given], request_id="7", parameters=parameters)


def found(response: InferResponse) -> dict[str, Any]:
    outputs = {output.name: output.as_numpy() for output in response.outputs}
    return {
        "id": response.id,
        "label": outputs["label"].tolist(),
        "probabilities": outputs["probabilities"].astype(np.float32).tobytes().hex(),
    }


async def over_http(url: str, pixels: Any) -> dict[str, Any]:
    async with InferenceRESTClient(RESTConfig(protocol="v2", timeout=60)) as client:
        try:
            await client.infer(url, request(pixels[:, :5], is_binary=False), model_name="m")
        except httpx.HTTPStatusError as error:
            wrong = str(error)
        return {
            "ready": [await client.is_server_ready(url), await client.is_server_live(url)],
            "models": [await client.is_model_ready(url, name) for name in ("m", "none")],
            "wrong": wrong,
            "json": found(await client.infer(url, request(pixels, is_binary=False), model_name="m")),
            "binary": found(await client.infer(url, request(pixels, is_binary=True), model_name="m")),
        }


async def over_grpc(address: str, pixels: Any) -> dict[str, Any]:
    async with InferenceGRPCClient(address, timeout=60) as client:
        return {
            "ready": [await client.is_server_ready(), await client.is_server_live()],
            "models": [await client.is_model_ready(name) for name in ("m", "none")],
            "json": found(await client.infer(request(pixels, is_binary=False))),
            "binary": found(await client.infer(request(pixels, is_binary=True))),
        }


async def main() -> None:
    url, address, file = sys.argv[1:]
    pixels = np.load(file)
    print(json.dumps({"http": await over_http(url, pixels), "grpc": await over_grpc(address, pixels)}))


if __name__ == "__main__":
    asyncio.run(main())
