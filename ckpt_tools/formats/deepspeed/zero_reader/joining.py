"""Joins the manifests of tensor-parallel ranks, each a checkpoint by its own files, to that of the whole model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import EqualPair, Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.value_json import value_to_json
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.tensor_parallel import MergeRules, ParameterMerge, drop_partition_entries
from ckpt_tools.messages.wording import join_names
from ckpt_tools.state_tree.param_numbers import PER_RANK_BUFFERS


@dataclass
class ManifestMerger:
    """Joins the manifests of all ranks, one part each. ``part_name`` says in messages which ranks these are; ``merges``
    keeps the merge of each parameter, which all its slots share."""

    parts: Sequence[Manifest]
    rules: MergeRules
    part_name: str = "tensor-parallel rank"
    merges: dict[str, ParameterMerge] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def merge_manifests(self) -> Manifest:
        """The manifest of the whole model. Raises FormatError if the parts do not fit each other or the rules."""
        first = self.parts[0]
        names = [{key for key, entry in part.tensors.items() if entry.kind is not Kind.EXTRA} for part in self.parts]
        check_equal_parts(
            ("tensors", names),
            ("ties", [dict(part.aliases) for part in self.parts]),
            ("parameter groups", [[group.params for group in part.groups] for part in self.parts]),
            ("data-parallel world size", [part.world_size for part in self.parts]),
            part_name=self.part_name,
            path=self.rules.path,
        )
        tensors = {key: self._merge_entry(key, entry) for key, entry in first.tensors.items()}
        notes = note_differences([part.extra for part in self.parts], f"the {self.part_name}s", "ranks")
        return replace(
            first,
            tensors=tensors,
            extra=drop_partition_entries(first.extra),
            world_size=None if first.world_size is None else first.world_size * len(self.parts),
            notes=(*first.notes, *self.notes, *notes),
            must_equal=tuple(self._list_equal_buffers()),
            step_claims=tuple(claim for part in self.parts for claim in part.step_claims),
        )

    def _list_equal_buffers(self) -> Iterator[EqualPair]:
        """Pairs of buffers whose bytes a conversion compares: there is no rule for buffers, and if their shapes are
        equal they may be parts or copies."""
        for key, first in self.parts[0].select_kinds(Kind.BUFFER).items():
            for rank, part in enumerate(self.parts[1:], 1):
                if key.fqn.rpartition(".")[2] not in PER_RANK_BUFFERS:
                    yield EqualPair(f"{key} of {self.part_name}s 0 and {rank}", first, part.tensors[key])

    def _merge_entry(self, key: StateKey, first: TensorEntry) -> TensorEntry:
        if first.kind is Kind.EXTRA or not first.shape:
            return first
        entries = [part.tensors[key] for part in self.parts]
        shapes = [entry.shape for entry in entries]
        if len({(entry.dtype, entry.shards.dtype) for entry in entries}) > 1:
            raise MalformedError("its parts are of different dtypes", path=self.rules.path, key=str(key))
        merge = self._find_merge(key, first, shapes)
        table = merge.build_shard_table([entry.shards for entry in entries], shapes)
        return TensorEntry(merge.shape, first.dtype, first.kind, table)

    def _find_merge(self, key: StateKey, first: TensorEntry, shapes: Sequence[Shape]) -> ParameterMerge:
        """The merge of a tensor. All slots of a parameter are cut alike. A buffer has to be a copy on every rank:
        buffers have no rules."""
        name, path = key.fqn, self.rules.path
        if first.kind is Kind.BUFFER:
            if len(set(shapes)) > 1:
                message = "it is a buffer that the tensor-parallel ranks cut, and there is no rule for that"
                raise UnsupportedError(message, path=path, key=name)
            return self.rules.merge_replicated(name, shapes)
        if shapes != [part.tensors[StateKey(name)].shape for part in self.parts]:
            message = "it is not shaped like its parameter, so that its tensor-parallel parts cannot be joined"
            raise UnsupportedError(message, path=path, key=str(key))
        if name not in self.merges:
            self.merges[name] = merge = self.rules.plan_merge(name, shapes)
            if merge.num_cropped:
                rows = f"{merge.shape[0]:,} to {merge.shape[0] + merge.num_cropped:,}"
                why = "they pad the vocabulary for tensor parallelism (original_vocab_size)"
                self.notes.append(Note(Outcome.DROPPED, f"rows {rows} of {name}", why))
        return self.merges[name]


def check_equal_parts(*values: tuple[str, Sequence[object]], part_name: str, path: str) -> None:
    """Raises MalformedError if parts differ in one of ``values``, each a description and one value a part."""
    for description, (first, *other_values) in values:
        for number, other in enumerate(other_values, 1):
            if other != first:
                raise MalformedError(
                    f"the {description} of {part_name} {number} and of {part_name} 0 differ", path=path
                )


def note_differences(extras: Sequence[Mapping[str, Any]], parts_name: str, owners_name: str) -> list[Note]:
    """A note on the entries in which others of ``extras`` differ from the first, which is kept; empty if none differs.
    ``parts_name`` and ``owners_name`` name the parts in its text."""
    first, *other_entries = [{name: to_comparable_text(value) for name, value in extra.items()} for extra in extras]
    names = [name for name in first if any(other.get(name) != first[name] for other in other_entries)]
    why = f"{parts_name} differ in it, and that of the first is kept"
    return [Note(Outcome.DROPPED, f"{join_names(names)} of the other {owners_name}", why)] if names else []


def to_comparable_text(value: Any) -> str:
    return json.dumps(value_to_json(value), sort_keys=True, default=repr)
