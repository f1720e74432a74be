"""nanotron's files to a manifest.

Each tensor of the model has files of its own, one for each rank that holds a part, and the path is the name. Of the
optimizer each rank has a file, in which parameters have numbers and, under ``names``, their names. With ZeRO-1 each
data-parallel rank has an interval of the flattened part of its tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckpt_tools.core.dtypes import DType, decode_number
from ckpt_tools.core.manifest import MASTER, Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, note_unrelated_files
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable, check_exact_cover
from ckpt_tools.core.step_claims import StepClaim
from ckpt_tools.core.values import StoredTensor
from ckpt_tools.core.wording import join_names, join_newest
from ckpt_tools.errors import (
    CkptError,
    IncompleteError,
    MalformedError,
    SeveralCheckpointsError,
    SourceNotFoundError,
    UnsupportedError,
)
from ckpt_tools.formats.nanotron.geometry import Part, interval
from ckpt_tools.formats.nanotron.names import (
    LATEST,
    METADATA,
    OPTIMIZER_CONFIG,
    VERSIONS,
    OptimizerFile,
    WeightFile,
    optimizer_file,
    weight_file,
)
from ckpt_tools.formats.safetensors.files import read_header
from ckpt_tools.formats.state_dict.leaf import TensorLeaf
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.serialization.torch_zip import open_archive
from ckpt_tools.stores.source import Source

MAX_JSON_BYTES = 100_000_000
"""``optimizer_config.json`` has a line for each parameter."""


def read(source: Source) -> Manifest:
    return _Contents(source, _folder(source)).manifest()


def own_files(source: Source) -> frozenset[str]:
    prefix = _folder(source)
    return frozenset() if prefix else frozenset(path for path in source.files if _is_own(path))


def _is_own(path: str) -> bool:
    return path in (METADATA, OPTIMIZER_CONFIG) or weight_file(path) is not None or optimizer_file(path) is not None


def _folder(source: Source) -> str:
    """The folder of the one checkpoint, as a prefix. Raises SourceNotFoundError, SeveralCheckpointsError."""
    found = [path.removesuffix(METADATA) for path in source.files if path.rpartition("/")[2] == METADATA]
    if LATEST in source.files:
        text = source.read_all(LATEST, limit_bytes=64).decode("ascii", "replace").strip()
        if f"{text}/" not in found:
            raise IncompleteError(f"it names {text!r:.80}, which does not hold a checkpoint of nanotron", path=LATEST)
        return f"{text}/"
    if not found:
        raise SourceNotFoundError(f"there is no {METADATA} in {source.store.url}")
    if len(found) > 1:
        names = join_newest([prefix.rstrip("/") or "the folder itself" for prefix in found])
        raise SeveralCheckpointsError(f"there are several checkpoints here ({names}); name the folder of one")
    return found[0]


@dataclass
class _Pieces:
    """The shards of one tensor so far."""

    dtype: DType
    shape: tuple[int, ...]
    shards: list[Shard] = field(default_factory=list)


@dataclass
class _Contents:
    source: Source
    prefix: str
    parts: dict[WeightFile, Part] = field(default_factory=dict)
    pieces: dict[StateKey, _Pieces] = field(default_factory=dict)
    steps: dict[StateKey, TensorEntry] = field(default_factory=dict)
    claims: dict[str, StepClaim] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    members: list[dict[str, None]] = field(default_factory=list)
    _seen: set[tuple[StateKey, int | None, int | None, int | None]] = field(default_factory=set)

    def manifest(self) -> Manifest:
        about = self._json(METADATA)
        _check_version(about.get("version"), self.prefix + METADATA)
        self._read_weights()
        world_size = self._read_optimizer()
        weights = {key: self._entry(key, Kind.PARAMETER) for key in self.pieces if key == StateKey(key.fqn)}
        state = {key: self._entry(key, Kind.STATE) for key in self.pieces if key not in weights}
        order = dict.fromkeys(key.fqn for key in weights)
        metas = about.get("metas")
        step = metas.get("last_train_step") if isinstance(metas, dict) else None
        step = step if type(step) is int else None
        return Manifest(
            "nanotron",
            {**weights, **state, **self.steps},
            groups=tuple(
                ParamGroup(tuple(name for name in order if name in mine), options)
                for mine, options in zip(self.members, self.groups, strict=True)
            ),
            extra={} if step is None else {"global_step": step},
            step=step,
            world_size=world_size,
            notes=tuple(self._notes()),
            step_claims=tuple(self.claims.values()),
        )

    def _files(self) -> Iterator[str]:
        """Paths in the checkpoint's folder, relative to it, in order."""
        return (path[len(self.prefix) :] for path in sorted(self.source.files) if path.startswith(self.prefix))

    def _json(self, name: str) -> dict[str, Any]:
        path = self.prefix + name
        found = parse_json(self.source.read_all(path, limit_bytes=MAX_JSON_BYTES), path)
        if not isinstance(found, dict):
            raise MalformedError("it is not a JSON object", path=path)
        return found

    def _notes(self) -> list[Note]:
        others: dict[str, int] = {}
        for path in self._files():
            if not _is_own(path):
                top = self.prefix + path.partition("/")[0]
                others[top] = others.get(top, 0) + 1
        return [note_unrelated_files(top, number) for top, number in others.items()]

    def _read_weights(self) -> None:
        for path in self._files():
            about = weight_file(path)
            if about is not None:
                try:
                    self._read_weight(self.prefix + path, about)
                except CkptError as error:
                    raise type(error)(
                        error.message, path=error.path or self.prefix + path, key=error.key or about.name
                    ) from error
        self._check_order()
        if not self.parts:
            raise IncompleteError("there are no files of tensors below it", path=f"{self.prefix}model")

    def _check_order(self) -> None:
        """The parts of a tensor follow its ranks: the optimizer's files name the rank alone. Raises MalformedError."""
        before: dict[tuple[str, int | None], tuple[int, ...]] = {}
        for about in sorted((each for each in self.parts if each.tp is not None), key=lambda each: each.tp or 0):
            start = self.parts[about].pairs[0][1].start
            if start <= before.get((about.name, about.exp), (-1,)):
                raise MalformedError("its parts are not in the order of the ranks in the files' names", key=about.name)
            before[about.name, about.exp] = start

    def _read_weight(self, path: str, about: WeightFile) -> None:
        header = read_header(self.source, path)
        if set(header.tensors) != {"data"}:
            raise UnsupportedError(f"it holds {join_names(header.tensors) or 'nothing'}, and not one tensor 'data'")
        dtype, local, at = header.tensors["data"]
        part = Part.whole(local)
        if about.tp is not None:
            part = _part(header.metadata, local, path)
        if self.parts.setdefault(about, part) is not part:
            raise MalformedError("two pipeline stages have this part of the tensor")
        self._add(StateKey(about.name), dtype, part, 0, prod(local), at)

    def _add(self, key: StateKey, dtype: DType, part: Part, start: int, stop: int, at: ByteRange) -> None:
        pieces = self.pieces.setdefault(key, _Pieces(dtype, part.shape))
        if (pieces.dtype, pieces.shape) != (dtype, part.shape):
            raise MalformedError(f"its parts in the ranks' files differ in dtype or shape, here {list(part.shape)}")
        pieces.shards += part.shards(start, stop, at, dtype.item_bytes)

    def _entry(self, key: StateKey, kind: Kind) -> TensorEntry:
        pieces = self.pieces[key]
        try:
            table = ShardTable.build(pieces.shape, pieces.dtype, pieces.shards)
            check_exact_cover(table)
        except CkptError as error:
            raise type(error)(error.message, path=error.path, key=str(key)) from error
        return TensorEntry(pieces.shape, pieces.dtype, kind, table)

    def _read_optimizer(self) -> int | None:
        """The number of ranks, if there is an optimizer."""
        files = {path: found for path in self._files() if (found := optimizer_file(path)) is not None}
        if not files:
            return None
        if self.prefix + OPTIMIZER_CONFIG not in self.source.files:
            raise IncompleteError("this file of the optimizer is missing", path=self.prefix + OPTIMIZER_CONFIG)
        sizes = {found.sizes for found in files.values()}
        (pp, tp, exp, dp), *others = sizes
        if others:
            raise MalformedError(
                "its files are of two saves, by different numbers of ranks", path=f"{self.prefix}optimizer"
            )
        wanted = pp * tp * exp * (dp or 1)
        if len(files) != wanted:
            why = f"it has {len(files):,} of the {wanted:,} files of the optimizer's ranks"
            raise IncompleteError(why, path=f"{self.prefix}optimizer")
        offsets = self._offsets() if dp is not None else {}
        for path, ranks in files.items():
            self._read_rank(self.prefix + path, ranks, offsets)
        return wanted

    def _offsets(self) -> Mapping[str, Any]:
        """Intervals of ZeRO-1 that rank 0 states: those of the first pipeline stage."""
        configs = self._json(OPTIMIZER_CONFIG).get("configs")
        found = configs.get("param_name_to_dp_rank_offsets") if isinstance(configs, dict) else None
        if not isinstance(found, dict):
            why = "it does not state param_name_to_dp_rank_offsets, though the optimizer's files are those of ZeRO-1"
            raise MalformedError(why, path=self.prefix + OPTIMIZER_CONFIG)
        return found

    def _read_rank(self, path: str, ranks: OptimizerFile, offsets: Mapping[str, Any]) -> None:
        source = self.source
        archive = open_archive(lambda start, stop: source.read(path, start, stop), source.size(path), path)
        archive.check_rank()
        found = archive.value
        if not isinstance(found, dict) or not all(
            isinstance(found.get(each), kind)
            for each, kind in (("state", dict), ("names", dict), ("param_groups", list))
        ):
            raise MalformedError("it does not hold the state of an optimizer with names", path=path)
        more = sorted(map(str, found.keys() - {"state", "names", "param_groups", "gradient_accumulator"}))
        if more:
            raise UnsupportedError(f"it holds {join_names(more)} beside the state of an optimizer", path=path)
        names = found["names"]
        for number, slots in found["state"].items():
            if not isinstance(names.get(number), str) or not isinstance(slots, dict):
                raise MalformedError(f"the state of parameter {number!r:.40} has no name", path=path)
            for slot, value in slots.items():
                self._read_state(_State(path, archive, ranks, offsets, StateKey(names[number], str(slot)), value))
        masters = found.get("gradient_accumulator", {})
        for name, value in masters.items() if isinstance(masters, dict) else ():
            self._read_state(_State(path, archive, ranks, offsets, StateKey(str(name), MASTER), value))
        self._read_groups(path, found["param_groups"], names)

    def _read_state(self, state: _State) -> None:
        """A tensor of the state, or of the fp32 weights, of one parameter on one rank."""
        try:
            self._place(state)
        except CkptError as error:
            raise type(error)(error.message, path=error.path or state.path, key=error.key or str(state.key)) from error

    def _place(self, state: _State) -> None:
        value, key, ranks = state.value, state.key, state.ranks
        if not isinstance(value, StoredTensor) or value.storage is None or not value.is_contiguous:
            raise UnsupportedError("state that is not a tensor with its elements in order is not supported")
        about, part = self._part_of(key.fqn, ranks)
        leaf = TensorLeaf.of(value, state.path, state.archive.storage_range(value.storage.key)[0])
        if key.slot == "step":
            if leaf.shape != ():
                raise UnsupportedError(f"a step of shape {list(leaf.shape)} is not supported")
            self.steps.setdefault(key, TensorEntry((), leaf.dtype, Kind.STATE, leaf.shards))
            if state.path not in self.claims:
                at = leaf.shards.get_byte_range(0)
                number = decode_number(self.source.read(at.file, at.start, at.stop), leaf.dtype)
                self.claims[state.path] = StepClaim(f"step of {key.fqn}", number, state.path, of_rank=True)
            return
        seen = (key, about.tp, about.exp, ranks.dp)
        if seen in self._seen:
            return  # Ranks that hold the whole parameter have the same state.
        self._seen.add(seen)
        start, stop = self._interval(state, part)
        is_flat = ranks.dp is not None
        if value.numel != stop - start or (not is_flat and value.shape != part.local):
            wanted = [stop - start] if is_flat else list(part.local)
            raise MalformedError(f"it has the shape {list(value.shape)}, and the part of the parameter {wanted}")
        self._add(key, leaf.dtype, part, start, stop, leaf.shards.get_byte_range(0))

    def _part_of(self, name: str, ranks: OptimizerFile) -> tuple[WeightFile, Part]:
        for tp, exp in ((ranks.tp, ranks.exp), (ranks.tp, None), (None, None)):
            about = WeightFile(name, tp, exp)
            if about in self.parts:
                return about, self.parts[about]
        raise MalformedError("there is no file of this parameter's weight for this rank")

    def _interval(self, state: _State, part: Part) -> tuple[int, int]:
        numel, dp, dps = prod(part.local), state.ranks.dp, state.ranks.sizes[3]
        if dp is None or dps is None:
            return 0, numel
        found = interval(numel, dp, dps)
        stated = state.offsets.get(state.key.fqn)
        mine = stated.get(str(dp)) if isinstance(stated, dict) else None
        if mine is not None and state.ranks[:3] == (0, 0, 0) and mine != [str(each) for each in found]:
            why = f"its interval in {OPTIMIZER_CONFIG} is {mine!r:.80}, and by nanotron's rule {list(found)}"
            raise UnsupportedError(why)
        return found

    def _read_groups(self, path: str, groups: list[Any], names: Mapping[Any, Any]) -> None:
        if not self.groups:
            self.groups = [{} for _ in groups]
            self.members = [{} for _ in groups]
        if len(groups) != len(self.groups) or not all(isinstance(group, dict) for group in groups):
            raise MalformedError("the ranks have different parameter groups", path=path)
        for group, options, members in zip(groups, self.groups, self.members, strict=True):
            numbers = group.get("params")
            if not isinstance(numbers, list):
                raise MalformedError("a parameter group has no list of parameters", path=path)
            members.update(dict.fromkeys(names[number] for number in numbers if number in names))
            if not options:
                options.update({str(name): value for name, value in group.items() if name != "params"})


@dataclass(frozen=True, slots=True)
class _State:
    """A value of a rank's file, with what says where it belongs."""

    path: str
    archive: Any
    ranks: OptimizerFile
    offsets: Mapping[str, Any]
    key: StateKey
    value: Any


def _part(metadata: Mapping[str, str], local: tuple[int, ...], path: str) -> Part:
    """The part that the metadata of a file describes. Raises UnsupportedError for an unknown version."""
    _check_version(metadata.get("version"), path)
    pairs, shape = (metadata.get(each) for each in ("local_global_slices_pairs", "unsharded_shape"))
    if pairs is None or shape is None:
        raise MalformedError("its metadata does not state local_global_slices_pairs and unsharded_shape")
    sizes = [each.strip() for each in shape.strip("()").split(",") if each.strip()]
    # numpy writes its own integers so.
    plain = [each.partition("(")[2].rstrip(")") if each.startswith("np.int") else each for each in sizes]
    if not all(each.isascii() and each.isdecimal() and len(each) < 19 for each in plain):
        raise MalformedError(f"its unsharded_shape is {shape!r:.80}")
    return Part.read(pairs, tuple(map(int, plain)), local)


def _check_version(found: Any, path: str) -> None:
    if found not in VERSIONS:
        known = f"{VERSIONS[0]} to {VERSIONS[-1]}"
        raise UnsupportedError(f"it has version {found!r:.40} of nanotron's format; {known} are read", path=path)
