"""The model of `make demo`, as every server of the comparison calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

BATCH, WAIT_SECONDS, SIDE = 30, 0.01, 28

Answer = dict[str, Any]


def predicting(model: str, threads: int) -> Callable[[Sequence[Any]], list[Answer]]:
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
    def predict(images: Sequence[Any]) -> list[Answer]:
        pixels = torch.tensor(images, dtype=torch.uint8).view(-1, SIDE, SIDE)
        rows = torch.softmax(module(to_input(pixels)), 1)
        found = zip(rows.argmax(1).tolist(), rows.tolist(), strict=True)
        return [{"label": label, "probabilities": row} for label, row in found]

    return predict
