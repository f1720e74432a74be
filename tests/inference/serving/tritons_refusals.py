"""Requests of Triton's clients that are refused; ``library`` is ``tritonclient.http`` or ``tritonclient.grpc``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

UNSUPPORTED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"sequence_id": 7}, "sequence_id"),
    ({"sequence_id": "seven"}, "sequence_id"),
    ({"priority": 1}, "priority"),
    ({"parameters": {"top_k": 3}}, "top_k"),
)
"""Options of a request, and the parameter that is refused."""


def _image(library: Any) -> Any:
    given = library.InferInput("image", [1, 28, 28], "UINT8")
    given.set_data_from_numpy(np.zeros((1, 28, 28), np.uint8))
    return given


def check_option(library: Any, client: Any, options: dict[str, Any], name: str) -> None:
    with pytest.raises(Exception, match=f"the parameter '{name}' of the request is not supported"):
        client.infer("m", [_image(library)], **options)


def check_classes_and_shared_memory(library: Any, client: Any, no_such_method: str) -> None:
    shared = library.InferInput("image", [1, 28, 28], "UINT8")
    shared.set_shared_memory("region", 784)
    with pytest.raises(Exception, match="the parameter 'shared_memory_byte_size' of the input image is not supported"):
        client.infer("m", [shared])
    to_memory = library.InferRequestedOutput("label")
    to_memory.set_shared_memory("region", 8)
    with pytest.raises(Exception, match="the parameter 'shared_memory_byte_size' of the output label is not supported"):
        client.infer("m", [_image(library)], outputs=[to_memory])
    classes = library.InferRequestedOutput("probabilities", class_count=3)
    with pytest.raises(Exception, match="the parameter 'classification' of the output probabilities is not supported"):
        client.infer("m", [_image(library)], outputs=[classes])
    with pytest.raises(Exception, match=no_such_method):
        client.get_system_shared_memory_status()
