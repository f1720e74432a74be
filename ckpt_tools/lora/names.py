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

PREFIX = "base_model.model."

MATRICES = ("lora_A.weight", "lora_B.weight")
EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
BIAS = "lora_B.bias"
MAGNITUDE = "lora_magnitude_vector"

_LORA = re.compile(r"(.+)\.(lora_[A-Za-z_]+)((?:\.[^.]+){0,2})")
_SAVED = re.compile(r"(.+)\.modules_to_save\.([^.]+)\.(.+)")
_TOKENS = re.compile(r".*\.(?:token_adapter|trainable_tokens_\w+)(?:\..*)?")


class Role(Enum):
    """Role of a tensor in a model of PEFT."""

    LORA = "lora"
    """A part of an adapter of LoRA; ``Named.part`` says which."""
    SAVED = "saved"
    """A tensor of a module that is trained whole; in a state alone."""
    ORIGINAL = "original"
    """A tensor of such a module as the base model has it."""
    BASE = "base"
    """A tensor of the base model; in an adapter's file one that replaces it."""
    FOREIGN = "foreign"
    """A part of another method."""


@dataclass(frozen=True, slots=True)
class Named:
    """A name, read: ``name`` is that of the base model's tensor, of a part of LoRA that of its module, which may end
    with ``.base_layer`` where several parameters of a module have one. ``adapter`` is the name of the adapter, None in
    an adapter's file."""

    role: Role
    name: str
    part: str = ""
    adapter: str | None = None

    @property
    def in_file(self) -> str:
        """The name in an adapter's file."""
        return f"{PREFIX}{self.name}.{self.part}" if self.role is Role.LORA else f"{PREFIX}{self.name}"


def read_name(name: str) -> Named:
    """``name``, with or without the prefix."""
    bare = name.removeprefix(PREFIX)
    if (saved := _SAVED.fullmatch(bare)) is not None:
        return Named(Role.SAVED, f"{saved[1]}.{saved[3]}", adapter=saved[2])
    if _TOKENS.fullmatch(bare):
        return Named(Role.FOREIGN, bare)
    if (found := _LORA.fullmatch(bare)) is not None:
        return _lora(bare, found[1], found[2], found[3].split(".")[1:])
    parts = bare.split(".")
    role = Role.ORIGINAL if "original_module" in parts else Role.BASE
    return Named(role, ".".join(part for part in parts if part not in ("base_layer", "original_module")))


def _lora(bare: str, module: str, part: str, rest: list[str]) -> Named:
    """Modules of LoRA have a ``weight`` and perhaps a ``bias``, those of embeddings are parameters."""
    if part in ("lora_A", "lora_B") and rest and rest[-1] in ("weight", "bias"):
        return Named(Role.LORA, module, f"{part}.{rest[-1]}", rest[0] if len(rest) > 1 else None)
    if part in EMBEDDING and len(rest) < 2:
        return Named(Role.LORA, module, part, rest[0] if rest else None)
    if part == MAGNITUDE and rest[1:] in ([], ["weight"]):
        return Named(Role.LORA, module, part, rest[0] if rest else None)
    return Named(Role.FOREIGN, bare)


def bare_module(module: str) -> str:
    """The module of the base model that a part of LoRA is for."""
    return ".".join(part for part in module.split(".") if part != "base_layer")
