"""Proofs of text and JSON: the whole file is one text, and no tag of YAML in it makes an object."""

from __future__ import annotations

import re
from typing import Any

from ckpt_tools.errors import MalformedError
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.source import check_file_name
from ckpt_tools.verification.scan.configuration import (
    UNREAD_SETTINGS_REASON,
    check_makes_no_objects,
    explain_unproved_names,
)
from ckpt_tools.verification.scan.kinds import LATEST_NAME, FileKind
from ckpt_tools.verification.scan.piece import FileView

_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")


def prove_text(view: FileView, kind: FileKind) -> str | None:
    """Check a file of text, and give the reason why it is configuration that is not proved to name no code, or None.

    Raises:
        FormatError: it is not of ``kind``, or it may be read in two ways. UnsafeError: it makes an object, or names a
        file outside.
    """
    text = _decode_text(view)
    if kind is FileKind.JSON:
        document = _parse_lenient_json(view.read_all(), view.file)
        _check_weight_map(document)
        return explain_unproved_names(view.file, document)
    if kind is FileKind.JSON_LINES:
        lines = view.read_all().splitlines()
        reasons = (explain_unproved_names(view.file, _parse_lenient_json(line, view.file)) for line in lines)
        return next(filter(None, reasons), None)
    if LATEST_NAME.search(view.file):
        check_file_name(text.strip())
        return None
    check_makes_no_objects(text)
    return UNREAD_SETTINGS_REASON if kind is FileKind.CONFIGURATION and text.strip() else None


def _decode_text(view: FileView) -> str:
    try:
        text = view.read_all().decode()
    except UnicodeDecodeError as error:
        raise MalformedError("it is not a text of UTF-8") from error
    if _CONTROL_CHARACTER.search(text):
        raise MalformedError("it is not a text: it holds control characters")
    return text


def _parse_lenient_json(data: bytes, path: str) -> Any:
    return parse_json(re.sub(rb"(?<=[:\[,\s])-?(?:Infinity|NaN)(?=[,\]}\s])", b"null", data), path)


def _check_weight_map(document: Any) -> None:
    """Raises UnsafeError if an index of shards names a file outside of the checkpoint."""
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    for name in weight_map.values() if isinstance(weight_map, dict) else ():
        if type(name) is not str:
            raise MalformedError("its weight_map names no files")
        check_file_name(name)
