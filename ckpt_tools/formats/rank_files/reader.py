"""Files of ranks to a manifest: the trees of all items as one, each tensor with the shards of all ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import WEIGHT, EqualPair, Kind, Manifest, ParamGroup, StateKey, TreePath, join_path
from ckpt_tools.core.notes import Note, Outcome, note_unrelated_files
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.shards import Shard, ShardTable
from ckpt_tools.core.step_claims import StepClaim, make_rank_claims
from ckpt_tools.core.value_refs import iter_tensor_refs, replace_tensor_refs
from ckpt_tools.errors import CkptError, MalformedError
from ckpt_tools.formats.rank_files.items import (
    RANK_FIELD,
    ShardedCheckpoint,
    ShardedItem,
    generalize_world_size,
    read_checkpoint_files,
)
from ckpt_tools.formats.rank_files.origin import FSDP_DIM, GENERATOR_NAMES, Origin, read_origin
from ckpt_tools.formats.rank_files.rank_file import RankFile, RankShard
from ckpt_tools.messages.wording import format_count, format_ranks, join_names
from ckpt_tools.serialization.pickle.dump import dumps
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.state_tree.incomplete_state import FLAT_PARAMETERS, refuse_non_weights
from ckpt_tools.state_tree.leaf import TensorLeaf, find_ties
from ckpt_tools.state_tree.param_numbers import PER_RANK_BUFFERS
from ckpt_tools.state_tree.parse import TreeLeaves, build_manifest
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.accelerate import refuse_several_rank_models
from ckpt_tools.trainers.names import is_companion_file
from ckpt_tools.trainers.saved import get_parent_folder
from ckpt_tools.trainers.verl import FSDP_CONFIG_FILE, HUGGING_FACE_FOLDER

MAX_COMPARED_BYTES = 1 << 20
"""Tensors without a checksum that are read to see whether the ranks agree."""

MAX_COMPANION_BYTES = 64 << 20
"""Most bytes of a small file that is kept; a tokenizer has up to 20 MB."""

_ShardsByBox = dict[tuple[Shape, Shape], tuple[Shard, int | None]]
"""Shards by the box that each holds, with their checksums."""

_WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".gguf")


def read(source: Source, options: ReadOptions) -> Manifest:
    """The one checkpoint of ``source``. Raises FormatError."""
    checkpoint = read_checkpoint_files(source)
    _check_verl_config(source, checkpoint)
    # The flat parameters of FSDP1, before their pieces are found not to fit.
    paths = (path for item in checkpoint.items for file in item.files.values() for path in file.tensors)
    refuse_non_weights(join_path(path) for path in paths if str(path[-1]).rpartition(".")[2] in FLAT_PARAMETERS)
    labels = [item.label for item in checkpoint.items]
    refuse_several_rank_models(labels, model_key=options.model_key, optim_key=options.optim_key)
    builder = _TreeBuilder(source, checkpoint)
    for item in checkpoint.items:
        builder.add_item(item)
    ties = find_ties(builder.tensors)
    tensors = {name: tensor for name, tensor in builder.tensors.items() if name not in ties}
    manifest = build_manifest(
        TreeLeaves(
            builder.paths,
            tensors,
            builder.objects,
            builder.inner,
            own_names=frozenset(builder.own_names),
            unread=builder.unread,
        ),
        format_name="sharded",
        model_key=options.model_key,
        optim_key=options.optim_key,
        world_size=len(checkpoint.ranks),
        ties=ties,
        param_order=options.param_order,
        buffers=builder.find_buffers(),
        include=options.include,
        exclude=options.exclude,
        state=options.state,
    )
    _refuse_missing_weights(checkpoint, manifest)
    manifest = replace(manifest, groups=tuple(map(_drop_param_names, manifest.groups)))
    origin = builder.build_origin(manifest)
    notes = (*manifest.notes, *builder.notes, *_note_unread_weights(source, checkpoint))
    literals = {**manifest.literals, **origin.to_literals()}
    return replace(
        manifest, notes=notes, literals=literals, must_equal=tuple(builder.must_equal), step_claims=tuple(builder.steps)
    )


def own_files(source: Source, manifest: Manifest) -> frozenset[str]:
    origin = read_origin(manifest)
    if origin is None:
        return frozenset()
    files = manifest.files & source.files.keys()
    folder = get_parent_folder(min(files, default=""))
    names = "|".join(re.escape(each).replace(re.escape(RANK_FIELD), r"\d+") for each in origin.names)
    folder_files = (path for path in source.files if get_parent_folder(path) == folder)
    named = [path for path in folder_files if re.fullmatch(names, path.rpartition("/")[2])]
    return files | {*named} | _find_companion_files(source, folder).keys()


def _check_verl_config(source: Source, checkpoint: ShardedCheckpoint) -> None:
    """Raises MalformedError where verl's configuration is of another number of ranks."""
    path = f"{checkpoint.folder}/{FSDP_CONFIG_FILE}" if checkpoint.folder else FSDP_CONFIG_FILE
    if path not in source.files:
        return
    config = parse_json(source.read_all(path, limit_bytes=MAX_COMPANION_BYTES), path)
    world = config.get("world_size") if isinstance(config, dict) else None
    if world != len(checkpoint.ranks):
        raise MalformedError(
            f"it says world_size {world}, but the files are of {format_count(len(checkpoint.ranks), 'rank')}", path=path
        )


def _drop_param_names(group: ParamGroup) -> ParamGroup:
    """A group without the names beside its numbers, which are now its members."""
    if group.options.get("param_names") != list(group.params):
        return group
    return ParamGroup(group.params, {name: v for name, v in group.options.items() if name != "param_names"})


def _refuse_missing_weights(checkpoint: ShardedCheckpoint, manifest: Manifest) -> None:
    """Raises MalformedError if another file has the name of the model's: it has no weight, or it has the small state
    that verl writes beside a model."""
    models = [item for item in checkpoint.items if not item.is_optimizer and item.label.startswith("model")]
    top_names = {path[0] for item in models for file in item.files.values() for path in (*file.tensors, *file.objects)}
    is_extra_state = bool(_EXTRA_STATE_NAMES & top_names) and any(
        item.label.startswith("extra_state") for item in checkpoint.items
    )
    if not is_extra_state and any(key.slot == WEIGHT for key in manifest.tensors):
        return
    names = sorted(file.path for item in models or checkpoint.items for file in item.files.values())
    raise MalformedError(f"no weights of a model are in {join_names(names)}; is another file there under its name?")


_EXTRA_STATE_NAMES = frozenset(("rng", "lr_scheduler"))


def _note_unread_weights(source: Source, checkpoint: ShardedCheckpoint) -> Iterable[Note]:
    """Files that could hold weights and are not those of the ranks; a trainer's own are noted elsewhere."""
    weight_files = [path for path in source.files if path.endswith(_WEIGHT_SUFFIXES) and path not in checkpoint.files]
    weight_files = [path for path in weight_files if not is_companion_file(path.rpartition("/")[2])]
    if weight_files:
        from ckpt_tools.trainers.run_folders import list_other_checkpoint_files

        other_checkpoint_files = list_other_checkpoint_files(source, checkpoint.files)
        yield from (note_unrelated_files(path) for path in weight_files if path not in other_checkpoint_files)


def _find_companion_files(source: Source, folder: str) -> dict[str, str]:
    """verl's configuration, and its folder ``huggingface`` without weights, by their names below the folder."""
    prefix = f"{folder}/" if folder else ""
    names = {path: path.removeprefix(prefix) for path in source.files if path.startswith(prefix)}
    companion_names = {
        path: name
        for path, name in names.items()
        if name == FSDP_CONFIG_FILE or name.startswith(f"{HUGGING_FACE_FOLDER}/")
    }
    is_small = {
        path: not path.endswith(_WEIGHT_SUFFIXES) and source.size(path) <= MAX_COMPANION_BYTES
        for path in companion_names
    }
    return {path: name for path, name in companion_names.items() if name == FSDP_CONFIG_FILE or is_small[path]}


def _is_step_counter(path: TreePath) -> bool:
    """Whether an entry counts steps of the run: other counters may be a rank's own, such as those of its data."""
    of_scheduler = path[-1] == "last_epoch" and any("scheduler" in str(part) for part in path)
    return of_scheduler or (len(path) == 1 and path[0] in ("global_step", "global_steps", "iteration"))


@dataclass(slots=True)
class _TreeBuilder:
    """The tree of all items. A single item is the tree; of several each is an entry at its top."""

    source: Source
    checkpoint: ShardedCheckpoint
    paths: dict[str, TreePath] = field(default_factory=dict)
    tensors: dict[str, TensorLeaf] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    inner: dict[StateKey, TensorLeaf] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    own_names: set[str] = field(default_factory=set)
    unread: dict[str, str] = field(default_factory=dict)
    must_equal: list[EqualPair] = field(default_factory=list)
    steps: list[StepClaim] = field(default_factory=list)
    _whole_names: set[str] = field(default_factory=set)
    _template_by_entry: dict[str, str] = field(default_factory=dict)

    def add_item(self, item: ShardedItem) -> None:
        first = next(iter(item.files.values()))
        for file in item.files.values():
            counts = {join_path(path): value for path, value in file.objects.items() if _is_step_counter(path)}
            self.steps += make_rank_claims(file.path, counts, counts)
        if self._is_extra_item(item):
            self._template_by_entry[""] = item.template
            self._add_extra_item(item, first)
            return
        prefix: TreePath = () if len(self.checkpoint.items) == 1 else (item.label,)
        self._template_by_entry["" if not prefix else item.label] = item.template
        differing_names: list[str] = []
        mismatch_reasons: dict[TreePath, str] = {}
        names = dict.fromkeys(path for file in item.files.values() for path in file.tensors)
        leaf_by_path = {path: self._join_ranks(path, item, differing_names, mismatch_reasons) for path in names}
        # FSDP1's optimizer.state_dict(): state of each rank's own, whose class is not that of a shard.
        state_is_cut = [is_cut for path, (leaf, is_cut) in leaf_by_path.items() if path[0] == "state" and leaf.shape]
        if item.is_optimizer and mismatch_reasons and state_is_cut and not any(state_is_cut):
            why = (
                "each rank has its own part of FSDP1's flat parameters, without the names and shapes of what they are; "
                "save FSDP.optim_state_dict(model, optimizer) instead of optimizer.state_dict()"
            )
            self.notes.append(Note(Outcome.DROPPED, f"optimizer state ({item.label})", why))
            return
        for path, (leaf, is_cut) in leaf_by_path.items():
            name = self._add_path((*prefix, *path))
            if path in mismatch_reasons:
                self.unread[name] = mismatch_reasons[path]
                continue
            self.tensors[name] = leaf
            if not is_cut:
                self._whole_names.add(name)
        for rank, file in item.files.items():
            for path, value in file.objects.items():
                tree_path = (*prefix, *path)
                if join_path(tree_path) not in self.paths:
                    self._add_object(tree_path, value, file)
                elif rank and not _is_equal_object(value, item, path):
                    differing_names.append(join_path(path))
        why = "the ranks differ, and those of rank 0 are taken"
        self.notes += [Note(Outcome.DROPPED, f"other values of {name}", why) for name in differing_names]

    def _is_extra_item(self, item: ShardedItem) -> bool:
        """Whether it is neither model nor optimizer: it holds no part of a tensor, and no optimizer's state."""
        if item.has_parts or item.is_optimizer:
            return False
        if any(each.has_parts for each in self.checkpoint.items):
            return True
        return not item.label.startswith(("model", "pytorch_model")) and len(self.checkpoint.items) > 1

    def _join_ranks(
        self, path: TreePath, item: ShardedItem, differing_names: list[str], mismatch_reasons: dict[TreePath, str]
    ) -> tuple[TensorLeaf, bool]:
        """The tensor of all ranks. Ranks are replicas where the mesh of a tensor says so: a mesh of other ranks, or a
        plain tensor, may be another tensor of the same name, such as other experts."""
        # Shards by ``members``, the ranks whose parts make one tensor:
        #   one group {0..7}           shards of one tensor; equal boxes are replicas, of which the first is read
        #   groups {0..3} and {4..7}   meshes of other ranks; a plain tensor is a group of its rank alone
        # The first group is read. Another one is a copy if its checksums, or its few bytes, are the same; if that is
        # not known, it is compared before anything is written (must_equal). If it differs, the tensor is unread: they
        # may be two tensors of one name, such as other experts.
        shard_by_rank = {rank: file.tensors[path] for rank, file in item.files.items() if path in file.tensors}
        _check_same_tensor(path, shard_by_rank, item)
        shards_by_members: defaultdict[frozenset[int], dict[int, RankShard]] = defaultdict(dict)
        for rank, rank_shard in shard_by_rank.items():
            shards_by_members[rank_shard.members if rank_shard.is_cut else frozenset([rank])][rank] = rank_shard
        first, *others = shards_by_members
        boxes_by_members = {
            members: self._collect_shards(path, ranks, differing_names) for members, ranks in shards_by_members.items()
        }
        rank_shard = next(iter(shard_by_rank.values()))
        leaves = [
            _make_leaf(path, rank_shard, (shard for shard, _ in cut.values())) for cut in boxes_by_members.values()
        ]
        for other, leaf in zip(others, leaves[1:], strict=True):
            is_same = self._have_same_bytes(boxes_by_members[first], boxes_by_members[other])
            if is_same is None:
                compared_names = f"{join_path(path)} of {format_ranks(first)} and of {format_ranks(other)}"
                one, two = (each.make_entry(Kind.PARAMETER) for each in (leaves[0], leaf))
                self.must_equal.append(EqualPair(compared_names, one, two))
            elif not is_same and join_path(path).rpartition(".")[2] in PER_RANK_BUFFERS:
                differing_names.append(join_path(path))
            elif not is_same:
                mismatch_reasons[path] = (
                    f"{format_ranks(first)} and {format_ranks(other)} hold different values of it, and no placement "
                    "says how these make one tensor; save it as a DTensor on one mesh of all of them"
                )
        return leaves[0], rank_shard.is_cut

    def _collect_shards(
        self, path: TreePath, shard_by_rank: Mapping[int, RankShard], differing_names: list[str]
    ) -> _ShardsByBox:
        """The shards of ranks, of replicas one."""
        shards_by_box: _ShardsByBox = {}
        for each in shard_by_rank.values():
            for shard, checksum in zip(each.shards, each.checksums, strict=True):
                kept_shard = shards_by_box.setdefault((shard.box.start, shard.box.stop), (shard, checksum))
                if None not in (kept_shard[1], checksum) and kept_shard[1] != checksum:
                    differing_names.append(join_path(path))
        return shards_by_box

    def _have_same_bytes(self, cut: _ShardsByBox, other: _ShardsByBox) -> bool | None:
        """Whether two copies of a tensor have the same bytes, by checksums, or if they are small; None if only reading
        them tells."""
        if cut.keys() != other.keys():
            return None
        answers = {self._is_same_shard(*cut[box], *other[box]) for box in cut}
        return False if False in answers else None if None in answers else True

    def _is_same_shard(
        self, shard: Shard, checksum: int | None, other: Shard, other_checksum: int | None
    ) -> bool | None:
        if None not in (checksum, other_checksum):
            return checksum == other_checksum
        a, b = shard.at, other.at
        if shard.strides != other.strides or a.stop - a.start > MAX_COMPARED_BYTES:
            return None
        return self.source.read(a.file, a.start, a.stop) == self.source.read(b.file, b.start, b.stop)

    def _add_extra_item(self, item: ShardedItem, first_file: RankFile) -> None:
        """Entries that the ranks agree on; each rank's own are noted."""
        dropped_reasons: defaultdict[str, list[str]] = defaultdict(list)
        for path in (*first_file.tensors, *first_file.objects):
            top = str(path[0])
            if any(str(part) in GENERATOR_NAMES for part in path[:-1]):
                dropped_reasons[top].append("generators of random numbers")
            elif not self._is_same_on_all_ranks(path, item):
                dropped_reasons[top].append("values that differ between the ranks")
        for path in (*first_file.tensors, *first_file.objects):
            tree_path = path if join_path(path) not in self.paths else (item.label, *path)
            is_empty = path == ("lr_scheduler",) and first_file.objects.get(path, "") is None
            if is_empty or str(path[0]) in dropped_reasons:
                continue
            if rank_shard := first_file.tensors.get(path):
                self.tensors[self._add_path(tree_path)] = _make_leaf(path, rank_shard, rank_shard.shards)
                self._whole_names.add(join_path(tree_path))
            else:
                self._add_object(tree_path, first_file.objects[path], first_file)
            self.own_names.add(join_path(tree_path))
        for top, what in dropped_reasons.items():
            why = f"each rank has its own {what[0]}, which cannot be given to other ranks"
            self.notes.append(Note(Outcome.DROPPED, f"{top} of {item.label}", why))

    def _is_same_on_all_ranks(self, path: TreePath, item: ShardedItem) -> bool:
        rank_shards = [file.tensors[path] for file in item.files.values() if path in file.tensors]
        if rank_shards:
            is_alike = all(
                each.shape == rank_shards[0].shape and each.dtype is rank_shards[0].dtype for each in rank_shards
            )
            if not is_alike or len(rank_shards) != len(item.files):
                return False
            cut, *others = (self._collect_shards(path, {0: each}, []) for each in rank_shards)
            return all(self._have_same_bytes(cut, each) for each in others)
        return all(
            path in file.objects and _is_equal_object(file.objects[path], item, path) for file in item.files.values()
        )

    def _add_object(self, path: TreePath, value: Any, file: RankFile) -> None:
        self.objects[self._add_path(path)] = value
        self.inner |= {ref.key: file.inner[ref.key] for ref in iter_tensor_refs(value)}

    def _add_path(self, path: TreePath) -> str:
        """Add a path, whose name in the tree it returns."""
        name = join_path(path)
        if name in self.paths:
            raise MalformedError("two entries of the tree have this name", key=name)
        self.paths[name] = path
        return name

    def find_buffers(self) -> frozenset[str]:
        """Leaves that every rank has whole, where an optimizer's state shows that its parameters are not."""
        cut_names = [name for name in self.tensors if name not in self._whole_names]
        state_names = [name for name in self._whole_names if self._is_state(name) and self.paths[name][-1] != "step"]
        return frozenset() if not cut_names or state_names else frozenset(self._whole_names)

    def _is_state(self, name: str) -> bool:
        return "state" in self.paths[name][:-1]

    def build_origin(self, manifest: Manifest) -> Origin:
        """The values that the writer needs to write such files again."""
        files = [file for item in self.checkpoint.items for file in item.files.values()]
        templates = {
            label: self._pad_rank_field(generalize_world_size(name, len(self.checkpoint.ranks)))
            for label, name in self._template_by_entry.items()
        }
        objects = (item for file in files for item in file.objects.items())
        param_lists = [value for path, value in objects if path[-1] == "params" and "param_groups" in path]
        is_numbered = any(isinstance(value, list) and any(type(each) is int for each in value) for value in param_lists)
        mesh = next((file.mesh for file in files if file.mesh is not None), None)
        companion_files = _find_companion_files(self.source, self.checkpoint.folder)
        depth = 0 if manifest.tree is None else len(manifest.tree.model)
        dim_name: str | None = FSDP_DIM  # verl's name in the place of several
        if mesh is not None and len(mesh.shape) <= 1:
            dim_name = mesh.dim_names[0] if mesh.dim_names else None
        return Origin(
            templates,
            tuple(item.template for item in self.checkpoint.items),
            is_numbered,
            mesh.device_type if mesh is not None else None,
            dim_name,
            tuple(
                sorted(join_path(self.paths[name][depth:]) for name in self._whole_names if not self._is_state(name))
            ),
            {
                name: self.source.read_all(path, limit_bytes=MAX_COMPANION_BYTES)
                for path, name in companion_files.items()
            },
        )

    def _pad_rank_field(self, template: str) -> str:
        """A template with the number of digits of the rank, if it is written with leading zeros."""
        before, _, after = template.partition(RANK_FIELD)
        for path in self.checkpoint.files:
            digits = path.rpartition("/")[2].removeprefix(before).removesuffix(after)
            if len(digits) > 1 and digits.isdecimal() and digits.startswith("0"):
                return f"{before}{{rank:0{len(digits)}}}{after}"
        return template


def _check_same_tensor(path: TreePath, shard_by_rank: Mapping[int, RankShard], item: ShardedItem) -> None:
    """Raises MalformedError where the ranks are at odds about what a tensor is."""
    (first, one), *others = shard_by_rank.items()
    for rank, other in others:
        if (other.shape, other.dtype, other.is_cut) != (one.shape, one.dtype, one.is_cut):
            message = f"rank {first} has it as {_describe_shard(one)}, and rank {rank} as {_describe_shard(other)}"
            raise MalformedError(message, path=item.files[rank].path, key=join_path(path))


def _describe_shard(rank_shard: RankShard) -> str:
    whole = "a part of a tensor" if rank_shard.is_cut else "a whole tensor"
    return f"{whole} of shape {list(rank_shard.shape)} and type {rank_shard.dtype.value}"


def _make_leaf(path: TreePath, rank_shard: RankShard, shards: Iterable[Shard]) -> TensorLeaf:
    try:
        return TensorLeaf(
            rank_shard.shape, rank_shard.dtype, ShardTable.build(rank_shard.shape, rank_shard.dtype, list(shards))
        )
    except CkptError as error:
        raise type(error)(error.message, path=error.path, key=join_path(path)) from error


def _is_equal_object(value: Any, item: ShardedItem, path: TreePath) -> bool:
    """Whether an object is that of the first rank; tensors inside it count as equal if they have the same place."""
    first_value = next(file.objects[path] for file in item.files.values() if path in file.objects)
    if value is first_value:
        return True
    mine, other = (dumps(replace_tensor_refs(each, lambda ref: str(ref.key.slot))) for each in (value, first_value))
    return mine == other
