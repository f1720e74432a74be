"""The descriptor set that the service ships describes the ``.proto`` file that its users have."""

from __future__ import annotations

import re
from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet

from inference.serving.grpc.requests import DESCRIPTORS

KINDS = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}


def test_the_descriptor_set_is_of_the_proto_file():
    (file,) = FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file
    text = re.sub(r"\s*//[^\n]*", "", DESCRIPTORS.with_suffix(".proto").read_text())
    written = [line.strip() for line in text.splitlines() if line.strip()]
    head = [f'syntax = "{file.syntax}";', f"package {file.package};"]
    methods = [f"rpc {m.name}({last(m.input_type)}) returns ({last(m.output_type)});" for m in file.service[0].method]
    blocks = [f"service {file.service[0].name} {{", *methods, "}"]
    enums = {each.name: [f"{v.name} = {v.number};" for v in each.value] for each in file.enum_type}
    parts = {f"enum {name}": lines for name, lines in enums.items()}
    parts |= {f"message {each.name}": list(lines_of(each)) for each in file.message_type}
    order = [line.removesuffix(" {") for line in written if line.startswith(("enum ", "message "))]
    assert sorted(order) == sorted(parts)
    assert written == [*head, *blocks, *(line for name in order for line in (f"{name} {{", *parts[name], "}"))]


def lines_of(message: DescriptorProto) -> Iterator[str]:
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    opened = -1
    for field in message.field:
        place = field.oneof_index if field.HasField("oneof_index") else -1
        if place != opened:
            yield from ["}"] * (opened >= 0)
            yield from [f"oneof {message.oneof_decl[place].name} {{"] * (place >= 0)
            opened = place
        if entry := maps.get(last(field.type_name)):
            yield f"map<{kind(entry.field[0])}, {kind(entry.field[1])}> {field.name} = {field.number};"
        else:
            many = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else ""
            yield f"{many}{kind(field)} {field.name} = {field.number};"
    yield from ["}"] * (opened >= 0)


def kind(field: FieldDescriptorProto) -> str:
    return last(field.type_name) or KINDS[field.type]


def last(name: str) -> str:
    return name.rpartition(".")[2]
