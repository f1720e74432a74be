"""Runs without ZeRO (stage 0): one model file, with torch's optimizer state or that of a 16-bit wrapper in it.

In fp32 ``optimizer`` is what torch's ``state_dict`` gives. In 16 bit a wrapper keeps fp32 masters beside it:
``fp32_groups``, a tensor for each parameter (FP16_UnfusedOptimizer), or ``fp32_groups_flat``, one vector for each param
group (FP16_Optimizer, with fused Adam on a GPU). No file says which parameter is which. Numbers are matched with
parameters by order and shape, as for a file of torch's. Of flat groups the model's weights are views into one storage,
in the order of the vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, NamedTuple

import numpy as np

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.literals import is_number, make_number_table
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.core.values import StoredTensor, Value, describe_kind, format_brief
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import File, ModelStates, checked, model_claims
from ckpt_tools.formats.deepspeed.common.model_file import aliases
from ckpt_tools.formats.deepspeed.common.saved_extras import Extras
from ckpt_tools.formats.deepspeed.names import optim_name, place
from ckpt_tools.formats.deepspeed.zero_reader.locate import TagFiles
from ckpt_tools.formats.foreign import refuse_tensor_object
from ckpt_tools.formats.state_dict.param_numbers import NumberedGroup, match_numbers, note_assumed_order
from ckpt_tools.stores.source import Source

UNFUSED, FUSED = "fp32_groups", "fp32_groups_flat"

_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")

Slots = Mapping[str, Value]


def open_whole(source: Source, files: TagFiles) -> File:
    """The model's file. Raises IncompleteError where it is of ZeRO, whose optimizer's files are missing then."""
    file = File.open(source, files.models(0)[0])
    if "param_shapes" not in file.content or file.content["param_shapes"] is not None:
        raise IncompleteError(
            f"{place(files.prefix.rstrip('/'))} has no *_optim_states.pt, the optimizer's files, which ZeRO writes",
            path=files.prefix + optim_name(0, files.mp_rank),
        )
    return file


class Piece(NamedTuple):
    """Elements ``[start, start + numel)`` of a flat group, which are a parameter."""

    number: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Saved:
    """The entry ``optimizer`` of ``file``: torch's state and groups by number, and a wrapper's masters.

    ``masters`` are by number: of a parameter, or with ``is_flat`` of a group, whose state is flat as well.
    """

    file: File
    states: Mapping[int, Slots] = field(default_factory=dict)
    groups: tuple[Mapping[str, Value], ...] = ()
    masters: Mapping[int, StoredTensor] = field(default_factory=dict)
    is_flat: bool = False
    wrapper: Mapping[str, Value] = field(default_factory=dict)

    @classmethod
    def of(cls, file: File) -> Saved:
        """Raises FormatError where it is neither torch's state nor that of DeepSpeed's two wrappers."""
        found = file.content.get("optimizer")
        if found is None:
            return cls(file)
        if not isinstance(found, dict):
            raise MalformedError(f"its 'optimizer' is a {describe_kind(found)}", path=file.path, key="optimizer")
        if "param_groups" in found:
            return cls(file, _states(found, file.path), _groups(found, file.path))
        if UNFUSED not in found and FUSED not in found:
            raise UnsupportedError(
                f"its optimizer state has the entries {format_brief(list(found))}, which are not those of torch or of "
                "DeepSpeed's 16-bit optimizers; save with ZeRO stage 1",
                path=file.path,
                key="optimizer",
            )
        inner = checked(found, "optimizer_state_dict", dict, file.path)
        groups = _groups(inner, file.path)
        is_flat = FUSED in found
        masters = _masters(found, groups, is_flat, file.path)
        return cls(file, _states(inner, file.path), groups, masters, is_flat, found)

    def named_shapes(self) -> tuple[dict[str, Shape], ...] | None:
        """The parameters of each group by the names that the optimizer itself has for them, with their shapes; None
        where it has numbers alone, masters, or no state of a parameter."""
        shapes = self.shapes()
        groups = [(group["params"], _names(group)) for group in self.groups]
        if self.masters or any(names is None or not shapes.keys() >= {*numbers} for numbers, names in groups):
            return None
        named = [{name: shapes[n] for n, name in zip(numbers, names or (), strict=True)} for numbers, names in groups]
        return tuple(named) or None

    def shapes(self) -> dict[int, Shape]:
        """The one shape that a master, or else all state of a parameter, has."""
        found = {number: tuple(master.shape) for number, master in self.masters.items()}
        for number, slots in self.states.items():
            shapes = {
                tuple(value.shape)
                for slot, value in slots.items()
                if isinstance(value, StoredTensor) and slot != "step"
            }
            if len(shapes) == 1:
                found.setdefault(number, next(iter(shapes)))
        return found


def _groups(found: Mapping[Value, Value], path: str) -> tuple[Mapping[str, Value], ...]:
    groups = checked(found, "param_groups", list, path)
    for group in groups:
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, list) or not all(type(number) is int for number in params):
            raise MalformedError("a param group has no list 'params' of numbers", path=path, key="param_groups")
    numbers = [number for group in groups for number in group["params"]]
    if len(set(numbers)) != len(numbers):
        raise MalformedError("its param groups name a parameter twice", path=path, key="param_groups")
    return tuple(groups)


def _states(found: Mapping[Value, Value], path: str) -> dict[int, Slots]:
    states = checked(found, "state", dict, path)
    for number, slots in states.items():
        if type(number) is not int or not isinstance(slots, dict) or not all(type(slot) is str for slot in slots):
            raise MalformedError("its state is not slots by the number of a parameter", path=path, key="state")
        if not {WEIGHT, MASTER}.isdisjoint(slots):
            raise UnsupportedError("the optimizer has a slot with a reserved name", path=path, key="state")
    return states


def _masters(
    found: Mapping[Value, Value], groups: tuple[Mapping[str, Value], ...], is_flat: bool, path: str
) -> dict[int, StoredTensor]:
    name = FUSED if is_flat else UNFUSED
    lists = checked(found, name, list, path)
    if is_flat:
        lists = [[flat] for flat in lists]
    masters: dict[int, StoredTensor] = {}
    if len(lists) != len(groups):
        raise MalformedError(f"{len(lists)} lists of masters, but {len(groups)} param groups", path=path, key=name)
    for tensors, group in zip(lists, groups, strict=True):
        if not isinstance(tensors, list) or not all(isinstance(tensor, StoredTensor) for tensor in tensors):
            raise MalformedError("its masters are not tensors", path=path, key=name)
        numbers: list[int] = group["params"]
        if len(tensors) != len(numbers):
            raise MalformedError(f"{len(tensors)} masters for {len(numbers)} parameters", path=path, key=name)
        masters |= dict(zip(numbers, tensors, strict=True))
    return masters


@dataclass
class Contents:
    """A checkpoint of stage 0 while it is read. ``part`` sets it apart from others that join it. ``optimizer`` is the
    name under which an optimizer is kept whose numbers are not understood."""

    model: ModelStates
    saved: Saved
    extras: Extras = field(default_factory=Extras)
    literals: dict[str, bytes] = field(default_factory=dict)
    part: str = ""
    optimizer: str = "optimizer"

    left_out: ClassVar[tuple[str, ...]] = ("optimizer",)
    remedy: ClassVar[str] = (
        "resume the run and save it with ZeRO stage 1, or with an optimizer that was made from model.named_parameters()"
    )

    def manifest(self) -> Manifest:
        """Raises FormatError where the files contradict themselves, and UnsupportedError where masters have no
        names."""
        ties = aliases(self.model, lambda alias, one, other: True)
        tensors = dict(self._weights(ties))
        parameters = {key.fqn: entry.shape for key, entry in tensors.items() if entry.kind is Kind.PARAMETER}
        members = self._flat_members(parameters) if self.saved.is_flat else self._members(parameters)
        notes: tuple[Note, ...] = ()
        if members is None:
            found = self.saved.file.content["optimizer"]
            self.extras.values["optimizer"] = self.extras.inert(found, self.optimizer, self.saved.file)
            why = "it numbers its parameters, and their order and shapes do not identify them"
            notes = (Note(Outcome.KEPT, "optimizer", why),)
        elif not self.saved.is_flat:
            notes = note_assumed_order(self._numbered(), self.saved.shapes(), parameters)
        pieces = {name: piece for group in members or () for name, piece in group.items()}
        tensors |= {key: entry for name, piece in pieces.items() for key, entry in self._of(name, piece)}
        self._gather_extras()
        world_size = self.model.file.content.get("dp_world_size")
        return Manifest(
            format="zero0",
            tensors=tensors | self.extras.tensors,
            aliases=ties,
            groups=tuple(self._group(number, names) for number, names in enumerate(members or ())),
            literals=self.literals,
            extra=self.extras.values,
            step=self.model.step,
            step_claims=tuple(model_claims(self.model.file)),
            world_size=world_size if type(world_size) is int else None,
            notes=notes,
            unnamed_optimizer="" if members is not None else f"optimizer: {notes[0].why}; {self.remedy}",
        )

    def _weights(self, ties: Mapping[str, str]) -> Iterator[tuple[StateKey, TensorEntry]]:
        for name, value in self.model.module.items():
            refuse_tensor_object(value, name)
            if not isinstance(value, StoredTensor):
                self.extras.add_module_value(name, value, self.model.home(name))
            elif name not in ties:
                kind = Kind.BUFFER if name in self.model.buffers else Kind.PARAMETER
                table = self.model.home(name).table(value)
                yield StateKey(name), TensorEntry(tuple(value.shape), value.dtype, kind, table)

    # Which parameter is which

    def _members(self, parameters: Mapping[str, Shape]) -> list[dict[str, Piece]] | None:
        """The parameters of each group, or None where that cannot be proven. Raises UnsupportedError for masters."""
        names = self._matched(parameters)
        if names is not None:
            numbers = [group["params"] for group in self.saved.groups]
            return [{names[n]: Piece(n, 0, prod(parameters[names[n]])) for n in group} for group in numbers]
        if self.saved.masters:
            raise UnsupportedError(
                "its fp32 masters lie under numbers, and the order and shapes of the parameters do not prove which "
                f"they are; {self.remedy}",
                path=self.saved.file.path,
                key="optimizer",
            )
        return None

    def _matched(self, parameters: Mapping[str, Shape]) -> dict[int, str] | None:
        return match_numbers(self._numbered(), self.saved.shapes(), parameters)

    def _numbered(self) -> list[NumberedGroup]:
        return [NumberedGroup(tuple(group["params"]), _names(group)) for group in self.saved.groups]

    def _flat_members(self, parameters: Mapping[str, Shape]) -> list[dict[str, Piece]]:
        """The parameters of each flat group: those that are views into the one storage of its length."""
        storages: dict[str, dict[int, str]] = {}
        for name in parameters:
            value = self.model.module[name]
            assert isinstance(value, StoredTensor), "parameters are tensors"
            if value.numel and value.storage is not None:
                storages.setdefault(value.storage.key, {})[value.storage_offset] = name
        layouts = [layout for views in storages.values() if (layout := self._layout(views)) is not None]
        found = []
        for group in self.saved.groups:
            (number,) = group["params"]
            numel = self.saved.masters[number].numel
            fitting = [layout for layout in layouts if sum(layout.values()) == numel]
            if len(fitting) != 1:
                raise UnsupportedError(
                    f"its fp32 masters are flat vectors without names, and {len(fitting)} of the model's storages have "
                    f"the {numel:,} elements of one; save with ZeRO stage 1",
                    path=self.model.file.path,
                    key=FUSED,
                )
            layouts.remove(fitting[0])
            ends = np.cumsum([0, *fitting[0].values()]).tolist()
            spans = zip(fitting[0].items(), ends, strict=False)
            found.append({name: Piece(number, start, size) for (name, size), start in spans})
        return found

    def _layout(self, views: Mapping[int, str]) -> dict[str, int] | None:
        """The sizes of views that fill their storage from its start without gaps; None for any others."""
        found: dict[str, int] = {}
        cursor = 0
        for offset in sorted(views):
            value = self.model.module[views[offset]]
            if offset != cursor or not isinstance(value, StoredTensor) or not value.is_contiguous:
                return None
            found[views[offset]] = value.numel
            cursor += value.numel
        return found

    # The optimizer's tensors

    def _of(self, name: str, piece: Piece) -> Iterator[tuple[StateKey, TensorEntry]]:
        shape = tuple(self.model.module[name].shape)
        state = self.saved.states.get(piece.number, {})
        master = {MASTER: self.saved.masters[piece.number]} if self.saved.masters else {}
        for slot, value in {**master, **state}.items():
            if isinstance(value, StoredTensor):
                yield StateKey(name, slot), self._tensor(name, shape, piece, value)
            elif is_number(value):
                table, files = make_number_table(value, f"{self.part}{piece.number}.{slot}")
                self.literals |= files
                yield StateKey(name, slot), TensorEntry((), table.dtype, Kind.STATE, table)
            elif value is not None:
                kept = self.extras.values.setdefault("deepspeed", {}).setdefault("optimizer_state", {})
                where = f"optimizer_state.{name}.{slot}"
                kept[f"{name}.{slot}"] = self.extras.inert(value, where, self.saved.file)

    def _tensor(self, name: str, shape: Shape, piece: Piece, value: StoredTensor) -> TensorEntry:
        if not self.saved.is_flat or not value.shape:
            return TensorEntry(tuple(value.shape), value.dtype, Kind.STATE, self.saved.file.table(value))
        if tuple(value.shape) != tuple(self.saved.masters[piece.number].shape) or not value.is_contiguous:
            raise UnsupportedError("state of a flat group is not cut like its masters", path=self.saved.file.path)
        start = self.saved.file.start(value) + piece.start * value.dtype.item_bytes
        at = ByteRange(self.saved.file.path, start, start + piece.numel * value.dtype.item_bytes)
        table = ShardTable.whole((piece.numel,), value.dtype, at)
        return TensorEntry(shape, value.dtype, Kind.STATE, table)

    # What is no tensor of the model

    def _group(self, number: int, names: Mapping[str, Piece]) -> ParamGroup:
        options = {
            str(name): value
            for name, value in self.saved.groups[number].items()
            if name not in ("params", "param_names")
        }
        return ParamGroup(tuple(names), self.extras.options(number, options, self.saved.file))

    def _gather_extras(self) -> None:
        self.extras.add_model(self.model.file, without=self.left_out)
        if self.saved.wrapper:
            dynamic = self.saved.wrapper.get("dynamic_loss_scale") is True
            scaler = {name: self.saved.wrapper[name] for name in _SCALER if name in self.saved.wrapper}
            self.extras.values["loss_scaler"] = {"dynamic": dynamic, **scaler}


def _names(group: Mapping[str, Value]) -> tuple[str, ...] | None:
    """The names in an optimizer made of named parameters; None where a wrapper has dropped frozen ones and left their
    names."""
    names = group.get("param_names")
    if not isinstance(names, list) or len(names) != len(group["params"]):
        return None
    return tuple(names) if all(type(name) is str for name in names) else None
