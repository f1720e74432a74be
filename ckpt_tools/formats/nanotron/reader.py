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
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable, check_exact_cover
from ckpt_tools.core.step_claims import StepClaim
from ckpt_tools.core.values import StoredTensor
from ckpt_tools.errors import (
    CkptError,
    IncompleteError,
    MalformedError,
    SeveralCheckpointsError,
    SourceNotFoundError,
    UnsupportedError,
)
from ckpt_tools.formats.nanotron.geometry import NanotronTensorPart, compute_zero1_interval
from ckpt_tools.formats.nanotron.names import (
    LATEST_FILE,
    METADATA_FILE,
    OPTIMIZER_CONFIG,
    SUPPORTED_VERSIONS,
    OptimizerFile,
    WeightFile,
    parse_optimizer_path,
    parse_weight_path,
)
from ckpt_tools.formats.safetensors.files import SafetensorsHeader, read_safetensors_header
from ckpt_tools.messages.wording import join_names, join_newest
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.serialization.torch_archive import TorchArchive
from ckpt_tools.serialization.torch_zip import open_torch_file
from ckpt_tools.state_tree.leaf import TensorLeaf
from ckpt_tools.stores.source import Source

MAX_JSON_BYTES = 100_000_000
"""``optimizer_config.json`` has a line for each parameter."""


def read(source: Source, options: ReadOptions) -> Manifest:
    return _NanotronManifestBuilder(source, _find_folder(source)).build_manifest()


def own_files(source: Source, manifest: Manifest) -> frozenset[str]:
    prefix = _find_folder(source)
    return frozenset() if prefix else frozenset(path for path in source.files if _is_nanotron_file(path))


def _is_nanotron_file(path: str) -> bool:
    return (
        path in (METADATA_FILE, OPTIMIZER_CONFIG)
        or parse_weight_path(path) is not None
        or parse_optimizer_path(path) is not None
    )


def _find_folder(source: Source) -> str:
    """The folder of the one checkpoint, as a prefix. Raises SourceNotFoundError, SeveralCheckpointsError."""
    prefixes = [path.removesuffix(METADATA_FILE) for path in source.files if path.rpartition("/")[2] == METADATA_FILE]
    if LATEST_FILE in source.files:
        text = source.read_all(LATEST_FILE, limit_bytes=64).decode("ascii", "replace").strip()
        if f"{text}/" not in prefixes:
            raise IncompleteError(
                f"it names {text!r:.80}, which does not hold a checkpoint of nanotron", path=LATEST_FILE
            )
        return f"{text}/"
    if not prefixes:
        raise SourceNotFoundError(f"there is no {METADATA_FILE} in {source.store.url}")
    if len(prefixes) > 1:
        names = join_newest([prefix.rstrip("/") or "the folder itself" for prefix in prefixes])
        raise SeveralCheckpointsError.of(names)
    return prefixes[0]


@dataclass
class _TensorShards:
    """The shards of one tensor so far."""

    dtype: DType
    shape: tuple[int, ...]
    shards: list[Shard] = field(default_factory=list)


@dataclass
class _NanotronManifestBuilder:
    source: Source
    prefix: str
    weight_parts: dict[WeightFile, NanotronTensorPart] = field(default_factory=dict)
    shards_by_key: dict[StateKey, _TensorShards] = field(default_factory=dict)
    steps: dict[StateKey, TensorEntry] = field(default_factory=dict)
    step_claims: dict[str, StepClaim] = field(default_factory=dict)
    group_options: list[dict[str, Any]] = field(default_factory=list)
    group_members: list[dict[str, None]] = field(default_factory=list)
    _seen_state: set[tuple[StateKey, int | None, int | None, int | None]] = field(default_factory=set)

    def build_manifest(self) -> Manifest:
        metadata = self._read_json_object(METADATA_FILE)
        _check_version(metadata.get("version"), self.prefix + METADATA_FILE)
        self._read_weights()
        world_size = self._read_optimizer()
        weights = {key: self._make_entry(key, Kind.PARAMETER) for key in self.shards_by_key if key == StateKey(key.fqn)}
        state = {key: self._make_entry(key, Kind.STATE) for key in self.shards_by_key if key not in weights}
        order = dict.fromkeys(key.fqn for key in weights)
        metas = metadata.get("metas")
        step = metas.get("last_train_step") if isinstance(metas, dict) else None
        step = step if type(step) is int else None
        return Manifest(
            "nanotron",
            {**weights, **state, **self.steps},
            groups=tuple(
                ParamGroup(tuple(name for name in order if name in mine), options)
                for mine, options in zip(self.group_members, self.group_options, strict=True)
            ),
            extra={} if step is None else {"global_step": step},
            step=step,
            world_size=world_size,
            notes=tuple(self._note_unread_files()),
            step_claims=tuple(self.step_claims.values()),
        )

    def _list_files(self) -> Iterator[str]:
        """Paths in the checkpoint's folder, relative to it, in order."""
        return (path[len(self.prefix) :] for path in sorted(self.source.files) if path.startswith(self.prefix))

    def _read_json_object(self, name: str) -> dict[str, Any]:
        path = self.prefix + name
        parsed = parse_json(self.source.read_all(path, limit_bytes=MAX_JSON_BYTES), path)
        if not isinstance(parsed, dict):
            raise MalformedError("it is not a JSON object", path=path)
        return parsed

    def _note_unread_files(self) -> list[Note]:
        unread_counts: dict[str, int] = {}
        for path in self._list_files():
            if not _is_nanotron_file(path):
                top = self.prefix + path.partition("/")[0]
                unread_counts[top] = unread_counts.get(top, 0) + 1
        return [note_unrelated_files(top, number) for top, number in unread_counts.items()]

    def _read_weights(self) -> None:
        parsed_paths = ((self.prefix + path, parse_weight_path(path)) for path in self._list_files())
        weight_files = {path: weight_file for path, weight_file in parsed_paths if weight_file is not None}
        headers = self.source.map_files(read_safetensors_header, weight_files)
        for path, weight_file in weight_files.items():
            try:
                self._read_weight(path, weight_file, next(headers))
            except CkptError as error:
                raise type(error)(error.message, path=error.path or path, key=error.key or weight_file.name) from error
        self._check_rank_order()
        if not self.weight_parts:
            raise IncompleteError("there are no files of tensors below it", path=f"{self.prefix}model")

    def _check_rank_order(self) -> None:
        """The parts of a tensor follow its ranks: the optimizer's files name the rank alone. Raises MalformedError."""
        last_start: dict[tuple[str, int | None], tuple[int, ...]] = {}
        for weight_file in sorted(
            (each for each in self.weight_parts if each.tp is not None), key=lambda each: each.tp or 0
        ):
            start = self.weight_parts[weight_file].box_pairs[0][1].start
            if start <= last_start.get((weight_file.name, weight_file.exp), (-1,)):
                raise MalformedError(
                    "its parts are not in the order of the ranks in the files' names", key=weight_file.name
                )
            last_start[weight_file.name, weight_file.exp] = start

    def _read_weight(self, path: str, weight_file: WeightFile, header: SafetensorsHeader) -> None:
        if set(header.tensors) != {"data"}:
            raise UnsupportedError(f"it holds {join_names(header.tensors) or 'nothing'}, and not one tensor 'data'")
        table = header.tensors["data"]
        dtype, local, at = table.dtype, table.shape, table.get_byte_range(0)
        part = NanotronTensorPart.whole(local)
        if weight_file.tp is not None:
            part = _parse_part(header.metadata, local, path)
        if self.weight_parts.setdefault(weight_file, part) is not part:
            raise MalformedError("two pipeline stages have this part of the tensor")
        self._add_shards(StateKey(weight_file.name), dtype, part, 0, prod(local), at)

    def _add_shards(
        self, key: StateKey, dtype: DType, part: NanotronTensorPart, start: int, stop: int, byte_range: ByteRange
    ) -> None:
        tensor_shards = self.shards_by_key.setdefault(key, _TensorShards(dtype, part.shape))
        if (tensor_shards.dtype, tensor_shards.shape) != (dtype, part.shape):
            raise MalformedError(f"its parts in the ranks' files differ in dtype or shape, here {list(part.shape)}")
        tensor_shards.shards += part.iter_shards(start, stop, byte_range, dtype.item_bytes)

    def _make_entry(self, key: StateKey, kind: Kind) -> TensorEntry:
        tensor_shards = self.shards_by_key[key]
        try:
            table = ShardTable.build(tensor_shards.shape, tensor_shards.dtype, tensor_shards.shards)
            check_exact_cover(table)
        except CkptError as error:
            raise type(error)(error.message, path=error.path, key=str(key)) from error
        return TensorEntry(tensor_shards.shape, tensor_shards.dtype, kind, table)

    def _read_optimizer(self) -> int | None:
        """The number of ranks, if there is an optimizer."""
        files = {path: found for path in self._list_files() if (found := parse_optimizer_path(path)) is not None}
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
        num_ranks = pp * tp * exp * (dp or 1)
        if len(files) != num_ranks:
            why = f"it has {len(files):,} of the {num_ranks:,} files of the optimizer's ranks"
            raise IncompleteError(why, path=f"{self.prefix}optimizer")
        offsets = self._read_zero1_offsets() if dp is not None else {}
        archives = self.source.map_files(open_torch_file, [self.prefix + path for path in files])
        for ranks, archive in zip(files.values(), archives, strict=True):
            self._read_optimizer_file(archive.path, archive, ranks, offsets)
        return num_ranks

    def _read_zero1_offsets(self) -> Mapping[str, Any]:
        """Intervals of ZeRO-1 that rank 0 states: those of the first pipeline stage."""
        configs = self._read_json_object(OPTIMIZER_CONFIG).get("configs")
        offsets = configs.get("param_name_to_dp_rank_offsets") if isinstance(configs, dict) else None
        if not isinstance(offsets, dict):
            why = "it does not state param_name_to_dp_rank_offsets, though the optimizer's files are those of ZeRO-1"
            raise MalformedError(why, path=self.prefix + OPTIMIZER_CONFIG)
        return offsets

    def _read_optimizer_file(
        self, path: str, archive: TorchArchive, ranks: OptimizerFile, offsets: Mapping[str, Any]
    ) -> None:
        archive.check_rank()
        state_dict = archive.value
        if not isinstance(state_dict, dict) or not all(
            isinstance(state_dict.get(each), kind)
            for each, kind in (("state", dict), ("names", dict), ("param_groups", list))
        ):
            raise MalformedError("it does not hold the state of an optimizer with names", path=path)
        unknown_keys = sorted(map(str, state_dict.keys() - {"state", "names", "param_groups", "gradient_accumulator"}))
        if unknown_keys:
            raise UnsupportedError(f"it holds {join_names(unknown_keys)} beside the state of an optimizer", path=path)
        names = state_dict["names"]
        for number, slots in state_dict["state"].items():
            if not isinstance(names.get(number), str) or not isinstance(slots, dict):
                raise MalformedError(f"the state of parameter {number!r:.40} has no name", path=path)
            for slot, value in slots.items():
                self._read_state(_RankState(path, archive, ranks, offsets, StateKey(names[number], str(slot)), value))
        masters = state_dict.get("gradient_accumulator", {})
        for name, value in masters.items() if isinstance(masters, dict) else ():
            self._read_state(_RankState(path, archive, ranks, offsets, StateKey(str(name), MASTER), value))
        self._read_groups(path, state_dict["param_groups"], names)

    def _read_state(self, state: _RankState) -> None:
        """A tensor of the state, or of the fp32 weights, of one parameter on one rank."""
        try:
            self._add_state(state)
        except CkptError as error:
            raise type(error)(error.message, path=error.path or state.path, key=error.key or str(state.key)) from error

    def _add_state(self, state: _RankState) -> None:
        value, key, ranks = state.value, state.key, state.ranks
        if not isinstance(value, StoredTensor) or value.storage is None or not value.is_contiguous:
            raise UnsupportedError("state that is not a tensor with its elements in order is not supported")
        weight_file, part = self._find_part(key.fqn, ranks)
        leaf = TensorLeaf.of(value, state.path, state.archive.locate_storage(value.storage.key)[0])
        if key.slot == "step":
            if leaf.shape != ():
                raise UnsupportedError(f"a step of shape {list(leaf.shape)} is not supported")
            self.steps.setdefault(key, TensorEntry((), leaf.dtype, Kind.STATE, leaf.shards))
            if state.path not in self.step_claims:
                byte_range = leaf.shards.get_byte_range(0)
                number = decode_number(self.source.read(byte_range.file, byte_range.start, byte_range.stop), leaf.dtype)
                self.step_claims[state.path] = StepClaim(f"step of {key.fqn}", number, state.path, of_rank=True)
            return
        # Ranks with the same part of a parameter store the same state: the first file is read. With ZeRO-1 (``dp`` is a
        # number) a file holds an interval of the part, without it the whole part.
        state_id = (key, weight_file.tp, weight_file.exp, ranks.dp)
        if state_id in self._seen_state:
            return
        self._seen_state.add(state_id)
        start, stop = self._find_interval(state, part)
        is_flat = ranks.dp is not None
        if value.numel != stop - start or (not is_flat and value.shape != part.local_shape):
            expected_shape = [stop - start] if is_flat else list(part.local_shape)
            raise MalformedError(
                f"it has the shape {list(value.shape)}, and the part of the parameter {expected_shape}"
            )
        self._add_shards(key, leaf.dtype, part, start, stop, leaf.shards.get_byte_range(0))

    def _find_part(self, name: str, ranks: OptimizerFile) -> tuple[WeightFile, NanotronTensorPart]:
        for tp, exp in ((ranks.tp, ranks.exp), (ranks.tp, None), (None, None)):
            weight_file = WeightFile(name, tp, exp)
            if weight_file in self.weight_parts:
                return weight_file, self.weight_parts[weight_file]
        raise MalformedError("there is no file of this parameter's weight for this rank")

    def _find_interval(self, state: _RankState, part: NanotronTensorPart) -> tuple[int, int]:
        numel, dp, dps = prod(part.local_shape), state.ranks.dp, state.ranks.sizes[3]
        if dp is None or dps is None:
            return 0, numel
        computed = compute_zero1_interval(numel, dp, dps)
        offsets_by_rank = state.offsets.get(state.key.fqn)
        rank_offsets = offsets_by_rank.get(str(dp)) if isinstance(offsets_by_rank, dict) else None
        if (
            rank_offsets is not None
            and state.ranks[:3] == (0, 0, 0)
            and rank_offsets != [str(each) for each in computed]
        ):
            why = f"its interval in {OPTIMIZER_CONFIG} is {rank_offsets!r:.80}, and by nanotron's rule {list(computed)}"
            raise UnsupportedError(why)
        return computed

    def _read_groups(self, path: str, groups: list[Any], names: Mapping[Any, Any]) -> None:
        if not self.group_options:
            self.group_options = [{} for _ in groups]
            self.group_members = [{} for _ in groups]
        if len(groups) != len(self.group_options) or not all(isinstance(group, dict) for group in groups):
            raise MalformedError("the ranks have different parameter groups", path=path)
        for group, options, members in zip(groups, self.group_options, self.group_members, strict=True):
            numbers = group.get("params")
            if not isinstance(numbers, list):
                raise MalformedError("a parameter group has no list of parameters", path=path)
            members.update(dict.fromkeys(names[number] for number in numbers if number in names))
            if not options:
                options.update({str(name): value for name, value in group.items() if name != "params"})


@dataclass(frozen=True, slots=True)
class _RankState:
    """A value of a rank's file, with the key, ranks and offsets that tell its place."""

    path: str
    archive: Any
    ranks: OptimizerFile
    offsets: Mapping[str, Any]
    key: StateKey
    value: Any


def _parse_part(metadata: Mapping[str, str], local: tuple[int, ...], path: str) -> NanotronTensorPart:
    """The part that the metadata of a file describes. Raises UnsupportedError for an unknown version."""
    _check_version(metadata.get("version"), path)
    pairs, shape = (metadata.get(each) for each in ("local_global_slices_pairs", "unsharded_shape"))
    if pairs is None or shape is None:
        raise MalformedError("its metadata does not state local_global_slices_pairs and unsharded_shape")
    sizes = [each.strip() for each in shape.strip("()").split(",") if each.strip()]
    # numpy writes its own integers so.
    plain_sizes = [each.partition("(")[2].rstrip(")") if each.startswith("np.int") else each for each in sizes]
    if not all(each.isascii() and each.isdecimal() and len(each) < 19 for each in plain_sizes):
        raise MalformedError(f"its unsharded_shape is {shape!r:.80}")
    return NanotronTensorPart.parse(pairs, tuple(map(int, plain_sizes)), local)


def _check_version(version: Any, path: str) -> None:
    if version not in SUPPORTED_VERSIONS:
        known = f"{SUPPORTED_VERSIONS[0]} to {SUPPORTED_VERSIONS[-1]}"
        raise UnsupportedError(f"it has version {version!r:.40} of nanotron's format; {known} are read", path=path)
