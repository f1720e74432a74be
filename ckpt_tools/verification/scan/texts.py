"""Proofs of text and JSON: the whole file is one text, and no tag of YAML in it makes an object."""

from __future__ import annotations

import re
from typing import Any

from ckpt_tools.errors import MalformedError
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.source import checked_name
from ckpt_tools.verification.scan.configuration import CONFIGURATION, unproved_names
from ckpt_tools.verification.scan.findings import CouldRunError
from ckpt_tools.verification.scan.kinds import LATEST, Kind
from ckpt_tools.verification.scan.piece import Piece

_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")


def prove_text(piece: Piece, kind: Kind) -> str | None:
    """Check a file of text, and give the reason why it is configuration that is not proved to name no code, or None.

    Raises:
        FormatError: it is not of ``kind``, or it may be read in two ways. UnsafeError: it makes an object, or names a
        file outside.
    """
    text = _decoded(piece)
    if kind is Kind.JSON:
        document = _parsed_json(piece.whole(), piece.file)
        _check_index(document)
        return unproved_names(piece.file, document)
    if kind is Kind.JSON_LINES:
        reasons = (unproved_names(piece.file, _parsed_json(line, piece.file)) for line in piece.whole().splitlines())
        return next(filter(None, reasons), None)
    if LATEST.search(piece.file):
        checked_name(text.strip())
        return None
    _check_plain(text)
    return CONFIGURATION if kind is Kind.CONFIGURATION and text.strip() else None


def _decoded(piece: Piece) -> str:
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
    """Loaders of YAML, and of a configuration of logging, read any text, whatever its name is."""
    if _OBJECT.search(text) or _TAG_DIRECTIVE.search(text):
        raise CouldRunError("it holds a tag of YAML that makes objects of Python")
    lines = text.replace("\r", "\n")
    if _LOGGING.search(lines) and _LOGGING_CALL.search(lines):
        raise CouldRunError("it is a configuration of logging, whose classes and arguments logging.config evaluates")
