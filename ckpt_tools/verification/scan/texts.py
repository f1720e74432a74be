"""Proofs of text, JSON and YAML: the whole file is one text, and no tag of YAML makes an object."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ckpt_tools.errors import MalformedError
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.source import checked_name
from ckpt_tools.verification.scan.findings import CouldRunError, NotLookedIntoError
from ckpt_tools.verification.scan.kinds import LATEST, Kind
from ckpt_tools.verification.scan.piece import Piece

MAX_TEXT_BYTES = 1 << 26
"""Text and JSON; a tokenizer takes 20 MB."""

MAX_DEPTH = 100
"""Collections of YAML within one another; the time of libyaml grows with the square of the depth."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")


def prove_text(piece: Piece, kind: Kind) -> Iterator[Any]:
    """Check a file of text, and give each document of JSON or YAML in it.

    Raises:
        FormatError: it is not of ``kind``, or it may be read in two ways. UnsafeError: it makes an object, or names a
        file outside.
    """
    text = _decoded(piece)
    if kind is Kind.JSON:
        document = _parsed_json(piece.whole(), piece.file)
        _check_index(document)
        yield document
    elif kind is Kind.JSON_LINES:
        yield from (_parsed_json(line, piece.file) for line in piece.whole().splitlines())
    elif kind is Kind.YAML:
        yield from _documents(text)
    elif LATEST.search(piece.file):
        checked_name(text.strip())
    else:
        _check_plain(text)


def _decoded(piece: Piece) -> str:
    if piece.size > MAX_TEXT_BYTES:
        raise NotLookedIntoError(f"a text of more than {MAX_TEXT_BYTES >> 20} MiB")
    try:
        text = piece.whole().decode()
    except UnicodeDecodeError as error:
        raise MalformedError("it is not a text of UTF-8") from error
    if _CONTROLS.search(text):
        raise MalformedError("it is not a text: it holds control characters")
    return text


def _parsed_json(data: bytes, path: str) -> Any:
    return parse_json(re.sub(rb"(?<=[:\[,\s])-?(?:Infinity|NaN)(?=[,\]}\s])", b"null", data), path)


def _check_index(document: Any) -> None:
    """The index of shards names files inside of the checkpoint."""
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    for name in weight_map.values() if isinstance(weight_map, dict) else ():
        if type(name) is not str:
            raise MalformedError("its weight_map names no files")
        checked_name(name)


# Text that is not YAML by its name: loaders of YAML read it too.


_HYPER = ("new", "apply", "name", "module")
"""Tags of hyperpyyaml, which SpeechBrain reads."""


def _encoded(word: str) -> str:
    """A pattern for ``word`` with any of its characters percent-encoded, as tags of YAML may be."""
    return "".join(f"(?:{character}|%{ord(character):02x})" for character in word)


_TAGS = ("!!" + _encoded("python"), "!<" + _encoded("tag:"), *(f"!{_encoded(word)}:" for word in _HYPER))
_OBJECT = re.compile("|".join(_TAGS), re.I)
_TAG_DIRECTIVE = re.compile(r"%TAG\s+!")
_LOGGING = re.compile(r"^[ \t]*\[[ \t]*(handlers|formatters|loggers)[ \t]*\]", re.M)
_LOGGING_CALL = re.compile(r"^[ \t]*(args|class|kwargs)[ \t]*[=:]", re.M | re.I)


def _check_plain(text: str) -> None:
    if _OBJECT.search(text) or _TAG_DIRECTIVE.search(text):
        raise CouldRunError("it holds a tag of YAML that makes objects of Python")
    lines = text.replace("\r", "\n")
    if _LOGGING.search(lines) and _LOGGING_CALL.search(lines):
        raise CouldRunError("it is a configuration of logging, whose classes and arguments logging.config evaluates")


# YAML

_CORE_TAG = re.compile(r"!|tag:yaml\.org,2002:(str|int|float|bool|null|map|seq|binary|timestamp|set|omap|pairs)")
"""Tags of YAML 1.1 that make data."""


def _documents(text: str) -> Iterator[Any]:
    """The documents of YAML as dicts, lists and strings, from the events of PyYAML's parser, which makes no object."""
    import yaml

    if _TAG_DIRECTIVE.search(text):
        raise CouldRunError("it declares tags of its own, which may make objects")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        events = iter(yaml.parse(text, Loader=loader))
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                yield _Tree(events).node(next(events), 0)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "unreadable"
        raise MalformedError(f"it is not YAML: {problem}") from error


class _Tree:
    """Builds one document."""

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        self._anchors: dict[str, Any] = {}

    def node(self, event: Any, depth: int) -> Any:
        import yaml

        if depth > MAX_DEPTH:
            raise MalformedError("it is YAML with values nested too deep")
        if isinstance(event, yaml.AliasEvent):
            return self._anchors.get(event.anchor)
        if event.tag is not None and not _CORE_TAG.fullmatch(event.tag):
            raise CouldRunError(f"its tag {event.tag} may make an object")
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = event.value
        else:
            value = [] if isinstance(event, yaml.SequenceStartEvent) else {}
        if event.anchor is not None:
            self._anchors[event.anchor] = value
        if isinstance(value, list):
            while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
                value.append(self.node(event, depth + 1))
        elif isinstance(value, dict):
            while not isinstance(event := next(self._events), yaml.MappingEndEvent):
                key = self.node(event, depth + 1)
                if type(key) is not str or (key in value and key != "<<"):
                    raise MalformedError("it is YAML with a key twice, or with one that is not a text")
                value[key] = self.node(next(self._events), depth + 1)
        return value
