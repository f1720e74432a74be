"""Models of ``--model``: what is needed before torch is imported, and folders of transformers, ``hf:FOLDER``, without
downloading anything or running their code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from ckpt_tools.errors import FormatError, SourceNotFoundError

from .references import Reference, first_line, is_function

Task = Literal["images", "text", "own"]
IMAGE_SIZE, NUM_CLASSES = 28, 10  # height and width of each image, and outputs of each model of images
CONTEXT, VOCABULARY = 64, 256  # bytes of each piece of text, and values of a byte
HUGGING_FACE = "hf:"  # prefix of the folder of a transformers configuration


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Task of a model, and numbers of attention heads and hidden units that tensor parallelism can split, of layers
    that a pipeline can split, and of experts of a layer; 0 if the model cannot be split so."""

    task: Task = "images"
    heads: int = 0
    hidden: int = 0
    layers: int = 0
    experts: int = 0


MODELS: Mapping[str, ModelFacts] = {
    "vit": ModelFacts(),
    "cnn": ModelFacts(),
    "resnet18": ModelFacts(),
    "lm": ModelFacts("text", heads=4, hidden=256, layers=4),
    "lm-moe": ModelFacts("text", experts=4),
}


def facts_of(model: Reference, sizes: Mapping[str, Any]) -> ModelFacts | None:
    """Facts of a model of these sizes; None for an unknown name. A function of the user's may have any task."""
    if is_function(model):
        return ModelFacts("own")
    assert isinstance(model, str)
    if model.startswith(HUGGING_FACE):
        return ModelFacts("text") if model != HUGGING_FACE else None
    facts = MODELS.get(model)
    if facts is None:
        return None
    counts = {each.name for each in fields(facts) if getattr(facts, each.name) and each.name != "task"}
    changed: dict[str, Any] = {name: value for name, value in sizes.items() if name in counts and type(value) is int}
    return replace(facts, **changed)


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
