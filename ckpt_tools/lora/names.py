"""Names of tensors in a model of PEFT, in a training state and in the file of an adapter.

In a state, a module that has an adapter is ``MODULE.base_layer``, beside ``MODULE.lora_A.ADAPTER.weight``. A module
that is trained whole is ``MODULE.original_module``, beside ``MODULE.modules_to_save.ADAPTER``. An adapter's file has
neither ``ADAPTER`` nor ``modules_to_save`` in its names. ``get_peft_model`` puts ``base_model.model.`` before all names
of both; transformers' ``add_adapter`` does so in files alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

PEFT_PREFIX = "base_model.model."

MATRIX_PARTS = ("lora_A.weight", "lora_B.weight")
EMBEDDING_PARTS = ("lora_embedding_A", "lora_embedding_B")
BIAS_PART = "lora_B.bias"
MAGNITUDE_PART = "lora_magnitude_vector"

_LORA_NAME = re.compile(r"(.+)\.(lora_[A-Za-z_]+)((?:\.[^.]+){0,2})")
_SAVED_NAME = re.compile(r"(.+)\.modules_to_save\.([^.]+)\.(.+)")
_TOKENS_NAME = re.compile(r".*\.(?:token_adapter|trainable_tokens_\w+)(?:\..*)?")


class PeftRole(Enum):
    """Role of a tensor in a model of PEFT."""

    LORA = "lora"
    """A part of an adapter of LoRA; ``ParsedName.part`` says which."""
    SAVED = "saved"
    """A tensor of a module that is trained whole; in a state alone."""
    ORIGINAL = "original"
    """A tensor of such a module as the base model has it."""
    BASE = "base"
    """A tensor of the base model; in an adapter's file one that replaces it."""
    FOREIGN = "foreign"
    """A part of another method."""


@dataclass(frozen=True, slots=True)
class ParsedName:
    """The parts of a name. ``name`` is that of the tensor of the base model; for a part of LoRA it is the module's,
    which ends with ``.base_layer`` where several parameters of a module have an adapter. ``adapter`` is the name of the
    adapter, None in an adapter's file."""

    role: PeftRole
    name: str
    part: str = ""
    adapter: str | None = None

    @property
    def file_name(self) -> str:
        """The name in an adapter's file."""
        return f"{PEFT_PREFIX}{self.name}.{self.part}" if self.role is PeftRole.LORA else f"{PEFT_PREFIX}{self.name}"


def parse_name(name: str) -> ParsedName:
    """The parts of ``name``, which may begin with ``PEFT_PREFIX``."""
    bare_name = name.removeprefix(PEFT_PREFIX)
    if (saved_match := _SAVED_NAME.fullmatch(bare_name)) is not None:
        return ParsedName(PeftRole.SAVED, f"{saved_match[1]}.{saved_match[3]}", adapter=saved_match[2])
    if _TOKENS_NAME.fullmatch(bare_name):
        return ParsedName(PeftRole.FOREIGN, bare_name)
    if (lora_match := _LORA_NAME.fullmatch(bare_name)) is not None:
        return _parse_lora_name(bare_name, lora_match[1], lora_match[2], lora_match[3].split(".")[1:])
    parts = bare_name.split(".")
    role = PeftRole.ORIGINAL if "original_module" in parts else PeftRole.BASE
    return ParsedName(role, ".".join(part for part in parts if part not in ("base_layer", "original_module")))


def _parse_lora_name(bare_name: str, module: str, part: str, rest: list[str]) -> ParsedName:
    """Modules of LoRA have a ``weight`` and perhaps a ``bias``, those of embeddings are parameters."""
    if part in ("lora_A", "lora_B") and rest and rest[-1] in ("weight", "bias"):
        return ParsedName(PeftRole.LORA, module, f"{part}.{rest[-1]}", rest[0] if len(rest) > 1 else None)
    if part in EMBEDDING_PARTS and len(rest) < 2:
        return ParsedName(PeftRole.LORA, module, part, rest[0] if rest else None)
    if part == MAGNITUDE_PART and rest[1:] in ([], ["weight"]):
        return ParsedName(PeftRole.LORA, module, part, rest[0] if rest else None)
    return ParsedName(PeftRole.FOREIGN, bare_name)


def get_base_module(module: str) -> str:
    """The module of the base model that a part of LoRA is for."""
    return ".".join(part for part in module.split(".") if part != "base_layer")
