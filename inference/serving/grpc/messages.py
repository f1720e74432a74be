"""The message classes of the protocol over gRPC, made of ``open_inference.proto`` when this module is imported.

They are in a pool of their own, so that a client of the same protocol can live in the same process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PROTO = Path(__file__).with_name("open_inference.proto")

FIELD = re.compile(r"(?P<repeated>repeated )?(?P<type>\w+) (?P<name>\w+) = (?P<number>\d+);")
MAP = re.compile(r"map<string, (?P<type>\w+)> (?P<name>\w+) = (?P<number>\d+);")
VALUE = re.compile(r"(?P<name>\w+) = (?P<number>\d+);")
METHOD = re.compile(r"rpc (?P<name>\w+)\((?P<request>\w+)\) returns \((?P<response>\w+)\);")
BLOCK = re.compile(r"(?P<kind>service|message|enum|oneof) (?P<name>\w+) \{")

Field = descriptor_pb2.FieldDescriptorProto

SCALARS: Mapping[str, int] = {
    name: getattr(Field, f"TYPE_{name.upper()}")
    for name in ("bool", "int32", "int64", "uint32", "uint64", "float", "double", "string", "bytes")
}


@dataclass(frozen=True, slots=True)
class Method:
    """One call of the service: the classes of what is asked and of what is answered."""

    request: Any
    response: Any


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if (stripped := line.partition("//")[0].strip()) and not stripped.startswith(("syntax ", "package ")):
            yield stripped


class _Reader:
    """Reads as much of the language of ``.proto`` files as the one file needs; anything else is an assertion."""

    def __init__(self, text: str) -> None:
        self.file = descriptor_pb2.FileDescriptorProto(
            name="open_inference.proto", package="inference", syntax="proto3"
        )
        self.enums = set(re.findall(r"enum (\w+) ", text))
        self.methods: dict[str, tuple[str, str]] = {}
        self.service = ""
        lines = _lines(text)
        for line in lines:
            block = BLOCK.fullmatch(line)
            assert block, line
            getattr(self, f"_{block['kind']}")(block["name"], lines)

    def _service(self, name: str, lines: Iterator[str]) -> None:
        self.service = f"inference.{name}"
        for match in _until_end(lines, METHOD):
            self.methods[match["name"]] = (match["request"], match["response"])

    def _enum(self, name: str, lines: Iterator[str]) -> None:
        enum = self.file.enum_type.add(name=name)
        for match in _until_end(lines, VALUE):
            enum.value.add(name=match["name"], number=int(match["number"]))

    def _message(self, name: str, lines: Iterator[str]) -> None:
        message = self.file.message_type.add(name=name)
        for line in lines:
            if line == "}":
                return
            if block := BLOCK.fullmatch(line):
                message.oneof_decl.add(name=block["name"])
                for match in _until_end(lines, FIELD):
                    self._field(message, match).oneof_index = len(message.oneof_decl) - 1
            elif entry := MAP.fullmatch(line):
                self._map(message, entry)
            else:
                found = FIELD.fullmatch(line)
                assert found, line
                self._field(message, found)

    def _field(self, message: Any, match: re.Match[str]) -> Any:
        label = Field.LABEL_REPEATED if match["repeated"] else Field.LABEL_OPTIONAL
        field = message.field.add(name=match["name"], number=int(match["number"]), label=label)
        return self._typed(field, match["type"])

    def _typed(self, field: Any, kind: str) -> Any:
        if kind in SCALARS:
            field.type = SCALARS[kind]
        else:
            field.type = Field.TYPE_ENUM if kind in self.enums else Field.TYPE_MESSAGE
            field.type_name = f".inference.{kind}"
        return field

    def _map(self, message: Any, match: re.Match[str]) -> None:
        """A map is a repeated message of a key and a value."""
        entry = message.nested_type.add(name=f"{match['name'].title().replace('_', '')}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=Field.TYPE_STRING, label=Field.LABEL_OPTIONAL)
        self._typed(entry.field.add(name="value", number=2, label=Field.LABEL_OPTIONAL), match["type"])
        message.field.add(
            name=match["name"],
            number=int(match["number"]),
            label=Field.LABEL_REPEATED,
            type=Field.TYPE_MESSAGE,
            type_name=f".inference.{message.name}.{entry.name}",
        )


def _until_end(lines: Iterator[str], pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    for line in lines:
        if line == "}":
            return
        match = pattern.fullmatch(line)
        assert match, line
        yield match


_READ = _Reader(PROTO.read_text(encoding="utf-8"))
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_READ.file)

SERVICE: str = _READ.service

MESSAGES: Mapping[str, Any] = {
    message.name: message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"inference.{message.name}"))
    for message in _READ.file.message_type
}

METHODS: Mapping[str, Method] = {
    name: Method(MESSAGES[request], MESSAGES[response]) for name, (request, response) in _READ.methods.items()
}
