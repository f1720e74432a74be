"""A reference model: the names, shapes, dtypes and files that an output is to have, and the content of its
``config.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.matching import is_selected


class ReferenceTensor(NamedTuple):
    """A tensor of a reference."""

    shape: Shape
    dtype: DType


@dataclass(frozen=True, slots=True)
class Reference:
    """A model at ``location``. ``tensors`` are its weights by name, in its order, none if it is only a ``config.json``;
    ``aliases`` are further names that it gives to some of them. ``config`` is the content of ``config.json``; empty if
    there is none. ``files`` maps names to the files of a folder of safetensors; it is empty for any other format.
    ``excluded`` are names of tensors that the user leaves out."""

    location: str
    tensors: Mapping[str, ReferenceTensor] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()

    def exclude_tensors(self, globs: Sequence[str]) -> Reference:
        """The reference without the tensors whose names match; these are ``excluded``."""
        names = [*self.tensors, *self.aliases]
        excluded = frozenset(name for name in names if globs and not is_selected(name, (), globs))
        tensors = {name: wanted for name, wanted in self.tensors.items() if name not in excluded}
        aliases = {alias: owner for alias, owner in self.aliases.items() if not {alias, owner} & excluded}
        return replace(self, tensors=tensors, aliases=aliases, excluded=excluded)

    @property
    def vocabulary_sizes(self) -> frozenset[int]:
        """Numbers of tokens: one, except in a few models of several parts."""
        return frozenset(found for found in self._iter_config_values("vocab_size") if type(found) is int and found > 0)

    @property
    def is_tied(self) -> bool | None:
        """True if the configuration says that head and embeddings are one tensor; None if it does not say."""
        return next((flag for flag in self._iter_config_values("tie_word_embeddings") if isinstance(flag, bool)), None)

    def _iter_config_values(self, key: str) -> Iterator[Any]:
        """Values of ``key`` in ``config.json``: the one at the top, then those of the parts of a model."""
        levels: list[Mapping[str, Any]] = [self.config]
        for level in levels:
            if key in level:
                yield level[key]
            levels += [value for value in level.values() if isinstance(value, dict)]
