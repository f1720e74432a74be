"""Signatures of checkpoints by OpenSSF model-signing, which the extra ``sign`` installs.

A signature is over every file of a folder but itself, hidden ones too, or over one file; it is a Sigstore bundle in the
form that ``model_signing verify key`` checks as well. It lies in the folder as ``model.sig``, that tool's own name, or
beside the file as ``<file>.sig``. A list of digests is such a file, and its signature then speaks of the tensors in
every format that holds them.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import (
    CkptError,
    DestinationExistsError,
    DifferenceError,
    SourceNotFoundError,
    StoreError,
    UsageError,
)
from ckpt_tools.messages.showing import DisplayableResult
from ckpt_tools.stores.output_names import SIGNATURE_NAME
from ckpt_tools.stores.urls import local_path

SIGNATURE_SUFFIX = ".sig"


@dataclass(frozen=True, slots=True, repr=False)
class SignReport(DisplayableResult):
    """The file of a signature that was made."""

    signature: str


def sign_with_key(
    src: str | Path, *, private_key: str | Path, signature: str | Path | None, overwrite: bool
) -> SignReport:
    """Sign the files at ``src`` with the elliptic-curve key in a PEM file. ``signature`` defaults to the usual place.

    Raises:
        UsageError: model-signing is not installed, or the key is not valid. DestinationExistsError: it is signed.
        SourceNotFoundError: there is nothing to sign.
    """
    signing, _, hashing = _import_model_signing()
    path, signature_path = _resolve_existing(src), _choose_signature_path(src, signature)
    if path.is_dir() and not any(path.iterdir()):
        raise SourceNotFoundError(f"{path} is an empty folder")
    if os.path.lexists(signature_path):
        _check_replaceable(signature_path, overwrite=overwrite)
    key = _resolve_existing(private_key)
    create_signer = signing.Config().use_elliptic_key_signer
    signer = _call_library("the private key cannot be used", UsageError, lambda: create_signer(private_key=key))
    resolved_source, resolved_signature = path.resolve(), signature_path.resolve()
    ignored_paths = (
        [resolved_signature.relative_to(resolved_source)] if resolved_signature.is_relative_to(resolved_source) else []
    )
    signer.set_hashing_config(hashing.Config().set_ignored_paths(paths=ignored_paths))
    _call_library("signing failed", StoreError, lambda: signer.sign(path, signature_path))
    return SignReport(str(signature_path))


def _check_replaceable(target: Path, *, overwrite: bool) -> None:
    """Raises DestinationExistsError if a signature may not be replaced, or something else is in its place."""
    if not overwrite:
        raise DestinationExistsError(
            f"{target} exists; choose another {format_option('signature')}, or replace it with "
            f"{format_option('overwrite', True)}"
        )
    is_ours = False
    with suppress(OSError):
        is_ours = not target.is_symlink() and target.is_file() and is_signature(target.read_bytes())
    if not is_ours:
        raise DestinationExistsError(
            f"{target} is not a signature, so it is not replaced; remove it yourself, or choose another "
            f"{format_option('signature')}"
        )


def is_signature(data: bytes) -> bool:
    """True if ``data`` is a Sigstore bundle, by its media type."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "sigstore" in str(content.get("mediaType"))


def check_signature(src: str | Path, *, public_key: str | Path, signature: str | Path | None) -> str:
    """Check that the signature of ``src`` was made with the private key to ``public_key``, and that every file is
    unchanged since then, with none added or removed. Returns where the signature is.

    Raises:
        DifferenceError: the check fails. SourceNotFoundError: no signature. UsageError: as for ``sign_with_key``.
    """
    _, verifying, _ = _import_model_signing()
    path = _resolve_existing(src)
    signature_path = _resolve_existing(_choose_signature_path(src, signature))
    key = _resolve_existing(public_key)
    create_verifier = verifying.Config().use_elliptic_key_verifier
    verifier = _call_library("the public key cannot be used", UsageError, lambda: create_verifier(public_key=key))
    _call_library(
        f"{signature_path} is not the signature of {path}",
        DifferenceError,
        lambda: verifier.verify(path, signature_path),
    )
    return str(signature_path)


def _import_model_signing() -> tuple[Any, Any, Any]:
    """The modules of model-signing for signing, verifying and hashing. Raises UsageError."""
    try:
        from model_signing import hashing, signing, verifying
    except ImportError as error:
        raise UsageError(f"signatures need model-signing: pip install 'ckpt-tools[sign]' ({error})") from error
    return signing, verifying, hashing


def _resolve_existing(url: str | Path) -> Path:
    path = local_path(url)
    if not path.exists():
        raise SourceNotFoundError(f"there is no file or folder {path}")
    return path


def _choose_signature_path(src: str | Path, signature: str | Path | None) -> Path:
    path = local_path(src)
    if signature is not None:
        return local_path(signature)
    return path / SIGNATURE_NAME if path.is_dir() else path.with_name(path.name + SIGNATURE_SUFFIX)


def _call_library(failure: str, error_class: type[CkptError], action: Callable[[], Any]) -> Any:
    """The result of ``action``. The library's errors are of many classes, and each means failure."""
    try:
        return action()
    except Exception as error:
        raise error_class(f"{failure}: {_format_library_error(error)}") from error


_DIGEST_REPR = re.compile(r"""Digest\(algorithm='\w+', digest_value=(b'(?:\\.|[^'\\])*'|b"(?:\\.|[^"\\])*")\)""")


def _format_library_error(error: Exception) -> str:
    """The library's message, with its lists as text, its digests in hexadecimal and no advice to read a web page."""
    text = str(error)
    head, _, quoted_list = text.partition(": [")
    with suppress(ValueError, SyntaxError):
        text = f"{head}: {'; '.join(ast.literal_eval(f'[{quoted_list}'))}"
    text = _DIGEST_REPR.sub(lambda found: str(ast.literal_eval(found[1]).hex()), text)
    return " ".join(re.sub(r"See https\S+ for more details\.", "", text).split()) or type(error).__name__
