"""Folders of transformers, ``hf:FOLDER``. Nothing is downloaded, and no code of a folder is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ckpt_tools.errors import FormatError, SourceNotFoundError

from .model_names import HUGGING_FACE
from .options import first_line
from .references import Reference

TOKENIZER = (
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json|(tokenizer|spiece|sentencepiece\.bpe)\.model"
    r"|(vocab|merges)\.txt|chat_template\.jinja"
)
"""Names of the files that ``AutoTokenizer.from_pretrained`` reads."""

COMPANIONS = rf"generation_config\.json|{TOKENIZER}"
"""Names of the files beside ``config.json`` that belong to a model that writes texts."""

_LOCAL = {"local_files_only": True, "trust_remote_code": False}


def folder_of(model: Reference) -> Path | None:
    """FOLDER of ``hf:FOLDER``; None for other models."""
    is_folder = isinstance(model, str) and model.startswith(HUGGING_FACE)
    return Path(str(model).removeprefix(HUGGING_FACE)) if is_folder else None


def read_config(folder: Path) -> Any:
    """The transformers configuration in ``folder``. Raises ``SourceNotFoundError``, ``FormatError``."""
    from transformers import AutoConfig

    if not folder.is_dir():
        raise SourceNotFoundError(f"--model hf:{folder}: there is no folder {folder}")
    try:
        return AutoConfig.from_pretrained(folder, **_LOCAL)
    except (OSError, ValueError, KeyError) as error:
        raise FormatError(f"{folder} has no config.json of a causal language model: {first_line(error)}") from error


def files_in(folder: Path, names: str) -> list[Path]:
    """Files in ``folder`` whose names match."""
    return sorted(path for path in folder.glob("*") if re.fullmatch(names, path.name) and path.is_file())


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in ``folder``. Raises ``FormatError``."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, **_LOCAL)
    except Exception as error:  # the tokenizers library raises no narrower class
        raise FormatError(f"{folder} has a tokenizer that cannot be read: {first_line(error)}") from error
