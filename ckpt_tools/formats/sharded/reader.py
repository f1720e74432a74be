"""Files of ranks to a manifest: the trees of all items as one, each tensor with the shards of all ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import (
    WEIGHT,
    EqualPair,
    Kind,
    Manifest,
    ParamGroup,
    StateKey,
    TensorEntry,
    TreePath,
    join_path,
)
from ckpt_tools.core.notes import Note, Outcome, note_unrelated_files
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.shards import Shard, ShardTable
from ckpt_tools.core.step_claims import StepClaim, make_rank_claims
from ckpt_tools.core.value_refs import iter_tensor_refs, replace_tensor_refs
from ckpt_tools.core.wording import format_count, format_ranks, join_names
from ckpt_tools.errors import CkptError, MalformedError
from ckpt_tools.formats.foreign import FLAT_PARAMETERS, refuse_weights
from ckpt_tools.formats.sharded.items import RANK, Checkpoint, Item, read_checkpoint_files, without_world
from ckpt_tools.formats.sharded.origin import Origin, origin_of
from ckpt_tools.formats.sharded.rank_file import Held, RankFile
from ckpt_tools.formats.state_dict.leaf import TensorLeaf, ties_among
from ckpt_tools.formats.state_dict.param_numbers import PER_RANK
from ckpt_tools.formats.state_dict.parse import Leaves, manifest_of
from ckpt_tools.serialization.pickle.dump import dumps
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.accelerate import refuse_several_rank_models
from ckpt_tools.trainers.names import is_companion_file
from ckpt_tools.trainers.run_folders import get_parent_folder
from ckpt_tools.trainers.verl import FSDP_CONFIG_FILE, HUGGING_FACE_FOLDER

MAX_COMPARED_BYTES = 1 << 20
"""Tensors without a checksum that are read to see whether the ranks agree."""

MAX_BESIDE_BYTES = 64 << 20
"""Most bytes of a small file that is kept; a tokenizer has up to 20 MB."""

FSDP = "fsdp"
"""The dim of verl's mesh."""

GENERATORS = ("rng", "rng_state", "rng_states", "cpu_rng_state", "cuda_rng_state")
"""Entries with the states of a rank's random number generators. They are neither read nor written: ranks of another
run cannot use them, and verl's loader restores its own from ``rng``."""

_Cut = dict[tuple[Shape, Shape], tuple[Shard, int | None]]
"""Shards by the box that each holds, with their checksums."""

_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".gguf")


def read(source: Source, options: ReadOptions) -> Manifest:
    """The one checkpoint of ``source``. Raises FormatError."""
    found = read_checkpoint_files(source)
    _check_config(source, found)
    # The flat parameters of FSDP1, before their pieces are found not to fit.
    paths = (path for item in found.items for file in item.files.values() for path in file.tensors)
    refuse_weights(join_path(path) for path in paths if str(path[-1]).rpartition(".")[2] in FLAT_PARAMETERS)
    labels = [item.label for item in found.items]
    refuse_several_rank_models(labels, model_key=options.model_key, optim_key=options.optim_key)
    tree = _Tree(source, found)
    for item in found.items:
        tree.add(item)
    ties = ties_among(tree.tensors)
    tensors = {name: tensor for name, tensor in tree.tensors.items() if name not in ties}
    manifest = manifest_of(
        Leaves(tree.paths, tensors, tree.objects, tree.inner, own=frozenset(tree.own), unread=tree.unread),
        format_name="sharded",
        model_key=options.model_key,
        optim_key=options.optim_key,
        world_size=len(found.ranks),
        ties=ties,
        param_order=options.param_order,
        buffers=tree.buffers(),
        include=options.include,
        exclude=options.exclude,
        state=options.state,
    )
    _refuse_others_in_place(found, manifest)
    manifest = replace(manifest, groups=tuple(map(_without_names, manifest.groups)))
    origin = tree.origin(manifest)
    notes = (*manifest.notes, *tree.notes, *_notes_of_others(source, found))
    literals = {**manifest.literals, **origin.literals()}
    return replace(
        manifest,
        notes=notes,
        literals=literals,
        must_equal=tuple(tree.must_equal),
        step_claims=tuple(tree.steps),
    )


def own_files(source: Source, manifest: Manifest) -> frozenset[str]:
    origin = origin_of(manifest)
    if origin is None:
        return frozenset()
    files = manifest.files & source.files.keys()
    folder = get_parent_folder(min(files, default=""))
    names = "|".join(re.escape(each).replace(re.escape(RANK), r"\d+") for each in origin.names)
    here = (path for path in source.files if get_parent_folder(path) == folder)
    named = [path for path in here if re.fullmatch(names, path.rpartition("/")[2])]
    return files | {*named} | _small_files(source, folder).keys()


def _check_config(source: Source, found: Checkpoint) -> None:
    """Raises MalformedError where verl's configuration is of another number of ranks."""
    path = f"{found.folder}/{FSDP_CONFIG_FILE}" if found.folder else FSDP_CONFIG_FILE
    if path not in source.files:
        return
    config = parse_json(source.read_all(path, limit_bytes=MAX_BESIDE_BYTES), path)
    world = config.get("world_size") if isinstance(config, dict) else None
    if world != len(found.ranks):
        raise MalformedError(
            f"it says world_size {world}, but the files are of {format_count(len(found.ranks), 'rank')}", path=path
        )


def _without_names(group: ParamGroup) -> ParamGroup:
    """A group without the names beside its numbers, which are now its members."""
    if group.options.get("param_names") != list(group.params):
        return group
    return ParamGroup(group.params, {name: v for name, v in group.options.items() if name != "param_names"})


def _refuse_others_in_place(found: Checkpoint, manifest: Manifest) -> None:
    """Raises MalformedError if another file has the name of the model's: it has no weight, or it has the small state
    that verl writes beside a model."""
    models = [item for item in found.items if not item.is_optimizer and item.label.startswith("model")]
    held = {path[0] for item in models for file in item.files.values() for path in (*file.tensors, *file.objects)}
    is_small = bool(_SMALL & held) and any(item.label.startswith("extra_state") for item in found.items)
    if not is_small and any(key.slot == WEIGHT for key in manifest.tensors):
        return
    names = sorted(file.path for item in models or found.items for file in item.files.values())
    raise MalformedError(f"no weights of a model are in {join_names(names)}; is another file there under its name?")


_SMALL = frozenset(("rng", "lr_scheduler"))


def _notes_of_others(source: Source, found: Checkpoint) -> Iterable[Note]:
    """Files that could hold weights and are not those of the ranks; a trainer's own are noted elsewhere."""
    others = [path for path in source.files if path.endswith(_WEIGHTS) and path not in found.files]
    others = [path for path in others if not is_companion_file(path.rpartition("/")[2])]
    if others:
        from ckpt_tools.trainers.run_folders import list_other_checkpoint_files

        elsewhere = list_other_checkpoint_files(source.files, found.files)
        yield from (note_unrelated_files(path) for path in others if path not in elsewhere)


def _small_files(source: Source, folder: str) -> dict[str, str]:
    """verl's configuration, and its folder ``huggingface`` without weights, by their names below the folder."""
    prefix = f"{folder}/" if folder else ""
    names = {path: path.removeprefix(prefix) for path in source.files if path.startswith(prefix)}
    own = {
        path: name
        for path, name in names.items()
        if name == FSDP_CONFIG_FILE or name.startswith(f"{HUGGING_FACE_FOLDER}/")
    }
    is_small = {path: not path.endswith(_WEIGHTS) and source.size(path) <= MAX_BESIDE_BYTES for path in own}
    return {path: name for path, name in own.items() if name == FSDP_CONFIG_FILE or is_small[path]}


def _counts_steps(path: TreePath) -> bool:
    """Whether an entry counts steps of the run: other counters may be a rank's own, such as those of its data."""
    of_scheduler = path[-1] == "last_epoch" and any("scheduler" in str(part) for part in path)
    return of_scheduler or (len(path) == 1 and path[0] in ("global_step", "global_steps", "iteration"))


@dataclass(slots=True)
class _Tree:
    """The tree of all items. A single item is the tree; of several each is an entry at its top."""

    source: Source
    found: Checkpoint
    paths: dict[str, TreePath] = field(default_factory=dict)
    tensors: dict[str, TensorLeaf] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    inner: dict[StateKey, TensorLeaf] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    own: set[str] = field(default_factory=set)
    unread: dict[str, str] = field(default_factory=dict)
    must_equal: list[EqualPair] = field(default_factory=list)
    steps: list[StepClaim] = field(default_factory=list)
    _whole: set[str] = field(default_factory=set)
    _homes: dict[str, str] = field(default_factory=dict)

    def add(self, item: Item) -> None:
        first = next(iter(item.files.values()))
        for file in item.files.values():
            counts = {join_path(path): value for path, value in file.objects.items() if _counts_steps(path)}
            self.steps += make_rank_claims(file.path, counts, counts)
        if self._is_extra(item):
            self._homes[""] = item.template
            self._add_extra(item, first)
            return
        prefix: TreePath = () if len(self.found.items) == 1 else (item.label,)
        self._homes["" if not prefix else item.label] = item.template
        differing: list[str] = []
        unlike: dict[TreePath, str] = {}
        names = dict.fromkeys(path for file in item.files.values() for path in file.tensors)
        joined = {path: self._joined(path, item, differing, unlike) for path in names}
        # FSDP1's optimizer.state_dict(): state of each rank's own that is no part of a tensor by its class.
        state = [is_cut for path, (leaf, is_cut) in joined.items() if path[0] == "state" and leaf.shape]
        if item.is_optimizer and unlike and state and not any(state):
            why = (
                "each rank has its own part of FSDP1's flat parameters, without the names and shapes of what they are; "
                "save FSDP.optim_state_dict(model, optimizer) instead of optimizer.state_dict()"
            )
            self.notes.append(Note(Outcome.DROPPED, f"optimizer state ({item.label})", why))
            return
        for path, (leaf, is_cut) in joined.items():
            name = self._put((*prefix, *path))
            if path in unlike:
                self.unread[name] = unlike[path]
                continue
            self.tensors[name] = leaf
            if not is_cut:
                self._whole.add(name)
        for rank, file in item.files.items():
            for path, value in file.objects.items():
                where = (*prefix, *path)
                if join_path(where) not in self.paths:
                    self._put_object(where, value, file)
                elif rank and not _equal(value, item, path):
                    differing.append(join_path(path))
        why = "the ranks differ, and those of rank 0 are taken"
        self.notes += [Note(Outcome.DROPPED, f"other values of {name}", why) for name in differing]

    def _is_extra(self, item: Item) -> bool:
        """Whether it is neither model nor optimizer: it holds no part of a tensor, and no optimizer's state."""
        if item.has_parts or item.is_optimizer:
            return False
        if any(each.has_parts for each in self.found.items):
            return True
        return not item.label.startswith(("model", "pytorch_model")) and len(self.found.items) > 1

    def _joined(
        self, path: TreePath, item: Item, differing: list[str], unlike: dict[TreePath, str]
    ) -> tuple[TensorLeaf, bool]:
        """The tensor of all ranks. Ranks are replicas where the mesh of a tensor says so: a mesh of other ranks, or a
        plain tensor, may be another tensor of the same name, such as other experts."""
        held = {rank: file.tensors[path] for rank, file in item.files.items() if path in file.tensors}
        _check_same(path, held, item)
        copies: defaultdict[frozenset[int], dict[int, Held]] = defaultdict(dict)
        for rank, part in held.items():
            copies[part.members if part.is_cut else frozenset([rank])][rank] = part
        first, *others = copies
        cuts = {members: self._cut(path, ranks, differing) for members, ranks in copies.items()}
        part = next(iter(held.values()))
        leaves = [_leaf(path, part, (shard for shard, _ in cut.values())) for cut in cuts.values()]
        for other, leaf in zip(others, leaves[1:], strict=True):
            is_same = self._are_same(cuts[first], cuts[other])
            if is_same is None:
                what = f"{join_path(path)} of {format_ranks(first)} and of {format_ranks(other)}"
                one, two = (
                    TensorEntry(each.shape, each.dtype, Kind.PARAMETER, each.shards) for each in (leaves[0], leaf)
                )
                self.must_equal.append(EqualPair(what, one, two))
            elif not is_same and join_path(path).rpartition(".")[2] in PER_RANK:
                differing.append(join_path(path))
            elif not is_same:
                unlike[path] = (
                    f"{format_ranks(first)} and {format_ranks(other)} hold different values of it, and no placement "
                    f"says how "
                    "these make one tensor; save it as a DTensor on one mesh of all of them"
                )
        return leaves[0], part.is_cut

    def _cut(self, path: TreePath, held: Mapping[int, Held], differing: list[str]) -> _Cut:
        """The shards of ranks, of replicas one."""
        taken: _Cut = {}
        for each in held.values():
            for shard, checksum in zip(each.shards, each.checksums, strict=True):
                known = taken.setdefault((shard.box.start, shard.box.stop), (shard, checksum))
                if None not in (known[1], checksum) and known[1] != checksum:
                    differing.append(join_path(path))
        return taken

    def _are_same(self, cut: _Cut, other: _Cut) -> bool | None:
        """Whether two copies of a tensor have the same bytes, by checksums, or if they are small; None if only reading
        them tells."""
        if cut.keys() != other.keys():
            return None
        answers = {self._is_same(*cut[box], *other[box]) for box in cut}
        return False if False in answers else None if None in answers else True

    def _is_same(self, shard: Shard, checksum: int | None, other: Shard, other_checksum: int | None) -> bool | None:
        if None not in (checksum, other_checksum):
            return checksum == other_checksum
        a, b = shard.at, other.at
        if shard.strides != other.strides or a.stop - a.start > MAX_COMPARED_BYTES:
            return None
        return self.source.read(a.file, a.start, a.stop) == self.source.read(b.file, b.start, b.stop)

    def _add_extra(self, item: Item, first: RankFile) -> None:
        """Entries that the ranks agree on; each rank's own are noted."""
        own: defaultdict[str, list[str]] = defaultdict(list)
        for path in (*first.tensors, *first.objects):
            top = str(path[0])
            if any(str(part) in GENERATORS for part in path[:-1]):
                own[top].append("generators of random numbers")
            elif not self._is_agreed(path, item):
                own[top].append("values that differ between the ranks")
        for path in (*first.tensors, *first.objects):
            where = path if join_path(path) not in self.paths else (item.label, *path)
            if str(path[0]) in own or (path == ("lr_scheduler",) and first.objects.get(path, "") is None):
                continue
            if held := first.tensors.get(path):
                self.tensors[self._put(where)] = _leaf(path, held, held.shards)
                self._whole.add(join_path(where))
            else:
                self._put_object(where, first.objects[path], first)
            self.own.add(join_path(where))
        for top, what in own.items():
            why = f"each rank has its own {what[0]}, which cannot be given to other ranks"
            self.notes.append(Note(Outcome.DROPPED, f"{top} of {item.label}", why))

    def _is_agreed(self, path: TreePath, item: Item) -> bool:
        held = [file.tensors[path] for file in item.files.values() if path in file.tensors]
        if held:
            is_alike = all(each.shape == held[0].shape and each.dtype is held[0].dtype for each in held)
            cut, *others = (self._cut(path, {0: each}, []) for each in held)
            return len(held) == len(item.files) and is_alike and all(self._are_same(cut, each) for each in others)
        return all(path in file.objects and _equal(file.objects[path], item, path) for file in item.files.values())

    def _put_object(self, path: TreePath, value: Any, file: RankFile) -> None:
        self.objects[self._put(path)] = value
        self.inner |= {ref.key: file.inner[ref.key] for ref in iter_tensor_refs(value)}

    def _put(self, path: TreePath) -> str:
        """Add a path, whose name in the tree it returns."""
        name = join_path(path)
        if name in self.paths:
            raise MalformedError("two entries of the tree have this name", key=name)
        self.paths[name] = path
        return name

    def buffers(self) -> frozenset[str]:
        """Leaves that every rank has whole, where an optimizer's state shows that its parameters are not."""
        cut = [name for name in self.tensors if name not in self._whole]
        state = [name for name in self._whole if self._is_state(name) and self.paths[name][-1] != "step"]
        return frozenset() if not cut or state else frozenset(self._whole)

    def _is_state(self, name: str) -> bool:
        return "state" in self.paths[name][:-1]

    def origin(self, manifest: Manifest) -> Origin:
        world, files = len(self.found.ranks), [file for item in self.found.items for file in item.files.values()]
        templates = {label: self._padded(without_world(name, world)) for label, name in self._homes.items()}
        mesh = next((file.mesh for file in files if file.mesh is not None), None)
        small = _small_files(self.source, self.found.folder)
        depth = 0 if manifest.tree is None else len(manifest.tree.model)
        dim_name: str | None = FSDP  # verl's name in the place of several
        if mesh is not None and len(mesh.shape) <= 1:
            dim_name = mesh.dim_names[0] if mesh.dim_names else None
        return Origin(
            templates,
            tuple(item.template for item in self.found.items),
            any(map(_is_numbered, files)),
            mesh.device_type if mesh is not None else None,
            dim_name,
            tuple(sorted(join_path(self.paths[name][depth:]) for name in self._whole if not self._is_state(name))),
            {name: self.source.read_all(path, limit_bytes=MAX_BESIDE_BYTES) for path, name in small.items()},
        )

    def _padded(self, template: str) -> str:
        """A template with the number of digits of the rank, if it is written with leading zeros."""
        before, _, after = template.partition(RANK)
        for path in self.found.files:
            digits = path.rpartition("/")[2].removeprefix(before).removesuffix(after)
            if len(digits) > 1 and digits.isdecimal() and digits.startswith("0"):
                return f"{before}{{rank:0{len(digits)}}}{after}"
        return template


def _is_numbered(file: RankFile) -> bool:
    params = [value for path, value in file.objects.items() if path[-1] == "params" and "param_groups" in path]
    return any(isinstance(value, list) and any(type(each) is int for each in value) for value in params)


def _check_same(path: TreePath, held: Mapping[int, Held], item: Item) -> None:
    """Raises MalformedError where the ranks are at odds about what a tensor is."""
    (first, one), *others = held.items()
    for rank, other in others:
        if (other.shape, other.dtype, other.is_cut) != (one.shape, one.dtype, one.is_cut):
            message = f"rank {first} has it as {_described(one)}, and rank {rank} as {_described(other)}"
            raise MalformedError(message, path=item.files[rank].path, key=join_path(path))


def _described(held: Held) -> str:
    whole = "a part of a tensor" if held.is_cut else "a whole tensor"
    return f"{whole} of shape {list(held.shape)} and type {held.dtype.value}"


def _leaf(path: TreePath, held: Held, shards: Iterable[Shard]) -> TensorLeaf:
    try:
        return TensorLeaf(held.shape, held.dtype, ShardTable.build(held.shape, held.dtype, list(shards)))
    except CkptError as error:
        raise type(error)(error.message, path=error.path, key=join_path(path)) from error


def _equal(value: Any, item: Item, path: TreePath) -> bool:
    """Whether an object is that of the first rank; tensors inside it count as equal if they have the same place."""
    first = next(file.objects[path] for file in item.files.values() if path in file.objects)
    if value is first:
        return True
    mine, other = (dumps(replace_tensor_refs(each, lambda ref: str(ref.key.slot))) for each in (value, first))
    return mine == other
