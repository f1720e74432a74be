"""Message classes of the Open Inference Protocol over gRPC, from the descriptor set of ``open_inference.proto``.

``protoc --descriptor_set_out=open_inference.desc open_inference.proto`` writes the descriptor set. The classes are in a
descriptor pool of their own, because a client of the same protocol may register the same names in this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

DESCRIPTORS = Path(__file__).with_name("open_inference.desc")


@dataclass(frozen=True, slots=True)
class Method:
    """The request and response classes of one method."""

    request: Any
    response: Any


(_FILE,) = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_FILE)
_CLASSES = message_factory.GetMessageClassesForFiles([_FILE.name], _POOL)

SERVICE = f"{_FILE.package}.{_FILE.service[0].name}"

MESSAGES: Mapping[str, Any] = {each.name: _CLASSES[f"{_FILE.package}.{each.name}"] for each in _FILE.message_type}

METHODS: Mapping[str, Method] = {
    each.name: Method(_CLASSES[each.input_type.lstrip(".")], _CLASSES[each.output_type.lstrip(".")])
    for each in _FILE.service[0].method
}
