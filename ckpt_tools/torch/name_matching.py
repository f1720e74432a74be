"""Matches names of a job's state dict with entries of a checkpoint, whatever its tree. Pure.

A job asks for ``state.model.w`` where the checkpoint has ``app.model.w``, or for ``w`` alone. What stands before a
weight's own name is found out by matching: the longest ending that the checkpoint knows is the weight, the rest is the
prefix. One name alone could match by accident, so all the names of a plan have to agree on the prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_tools.core.manifest import Manifest, StateTree, TreePath, join_path
from ckpt_tools.core.names import strip_wrapper_parts
from ckpt_tools.errors import UsageError
from ckpt_tools.state_tree.build import Entries

MODEL, OPTIM, EXTRA = "model", "optimizer", "entry"


class EntryMatch(NamedTuple):
    """An entry, its part of the state, and the job's prefix of its name."""

    entry: str
    part: str
    prefix: str


@dataclass(frozen=True, slots=True)
class JobNameMatcher:
    """Finds entries by a job's names. A prefix that is not None is the only one of its part."""

    entries: Mapping[str, Mapping[str, str]]
    prefixes: Mapping[str, str | None]

    @classmethod
    def of(
        cls, manifest: Manifest, entries: Entries, tree: StateTree, *, model_key: str | None, optim_key: str | None
    ) -> JobNameMatcher:
        entries_by_part: dict[str, dict[str, str]] = {MODEL: {}, OPTIM: {}, EXTRA: {}}
        for name, path in entries.paths.items():
            part, own_name = _split_part_and_name(path, tree)
            entries_by_part[part][own_name] = name
        entries_by_part[OPTIM].update(_iter_options_by_parameter(manifest, entries_by_part[OPTIM]))
        keys_by_part = {MODEL: model_key, OPTIM: optim_key}
        return cls(entries_by_part, {part: key and f"{key}." for part, key in keys_by_part.items()})

    def find_match(self, name: str) -> EntryMatch | None:
        """The entry that a job means by ``name``, in which wrappers of the model may have left their marks."""
        # "state.model.layers.0.w" is tried as a whole, then as "model.layers.0.w" with the prefix "state.", and so on:
        # the longest ending that the checkpoint has is the entry.
        for prefix, own_name in _iter_splits(strip_wrapper_parts(name)):
            for part in (OPTIM, MODEL, EXTRA):
                entry = self.entries[part].get(own_name)
                if entry is not None and self.prefixes.get(part) in (None, prefix):
                    return EntryMatch(entry, part, prefix)
        return None

    def check_prefixes(self, names: Iterable[str]) -> None:
        """Raises UsageError where ``names`` do not agree on where model and optimizer are."""
        names_by_prefix: dict[str, dict[str, str]] = {MODEL: {}, OPTIM: {}, EXTRA: {}}
        for name in names:
            match = self.find_match(name)
            if match is not None:
                names_by_prefix[match.part].setdefault(match.prefix, name)
        for part in (MODEL, OPTIM):
            if len(names_by_prefix[part]) > 1:
                first, second, *_ = names_by_prefix[part].values()
                raise UsageError(
                    f"{first!r} and {second!r} could both be the {part} of the job; choose one with job_{part[:5]}_key"
                )
        self._check_extras(names_by_prefix)

    def _check_extras(self, prefixes: Mapping[str, Mapping[str, str]]) -> None:
        """The user's own entries are beside the model."""
        for prefix, name in prefixes[EXTRA].items():
            for model in prefixes[MODEL]:
                parent = model[: model.rstrip(".").rfind(".") + 1]
                if prefix not in ("", parent):
                    raise UsageError(f"the checkpoint has no entry {name!r}; remove it from the state dict")


def _split_part_and_name(path: TreePath, tree: StateTree) -> tuple[str, str]:
    """The part of the state that an entry belongs to, and its name in that part."""
    for part, prefix in ((OPTIM, tree.optim), (MODEL, tree.model)):
        # A model without a prefix owns the paths of one name alone.
        owns_path = part == OPTIM or bool(tree.model) or len(path) == 1
        if prefix is not None and owns_path and len(path) > len(prefix) and path[: len(prefix)] == prefix:
            return part, join_path(path[len(prefix) :])
    model_parent = tree.model[:-1]
    return EXTRA, join_path(path[len(model_parent) :] if path[: len(model_parent)] == model_parent else path)


def _iter_options_by_parameter(manifest: Manifest, optim: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The names of a flattened optimizer for options that are kept by group."""
    for number, group in enumerate(manifest.groups):
        for option in group.options:
            entry = optim.get(f"param_groups.{number}.{option}")
            if entry is not None:
                yield from ((f"param_groups.{fqn}.{option}", entry) for fqn in group.params)


def _iter_splits(name: str) -> Iterator[tuple[str, str]]:
    """Splits of ``name`` into prefix and rest, the longest rest first."""
    yield "", name
    dot_position = name.find(".")
    while dot_position >= 0:
        yield name[: dot_position + 1], name[dot_position + 1 :]
        dot_position = name.find(".", dot_position + 1)
