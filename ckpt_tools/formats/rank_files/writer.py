"""A manifest as files of ranks, as ``torch.save`` writes them on each rank of an FSDP2 run.

Parameters and their optimizer state are DTensors that are cut along their rows, over a mesh of one dim. All else, such
as buffers and 0-d tensors, is whole in the file of every rank. A source that was files of ranks keeps its names; any
other gets those of verl, whose ``load_checkpoint`` is ``torch.load`` of the rank's own file, and then
``load_state_dict`` of model and optimizer (verl 0.6, utils/checkpoint/fsdp_checkpoint_manager.py). Its optimizer knows
parameters by number, and so they are written, with the names beside the numbers (``param_names``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ckpt_tools.core.boxes import Box, Shape, contiguous_strides
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import FileLayout, FileLayoutCache, FileSpec, Layout, LazyFile, Literal, Payload, Segment
from ckpt_tools.core.limits import check_ranks_by_elements
from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest, StateKey, StateTree, TreePath
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.options import WriteOptions
from ckpt_tools.core.value_refs import replace_tensor_refs
from ckpt_tools.core.values import StorageRef, StoredTensor
from ckpt_tools.errors import IncompleteError
from ckpt_tools.formats.rank_files.geometry import compute_region
from ckpt_tools.formats.rank_files.items import RANK_FIELD, WORLD_FIELD
from ckpt_tools.formats.rank_files.origin import FSDP_DIM, GENERATOR_NAMES, Origin, read_origin
from ckpt_tools.formats.torch.files import Branch, insert_leaf, restore_lists
from ckpt_tools.messages.loading_code import escape_braces, quote_literal
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.serialization.pickle.sharded_tensors import PickledMesh, ShardPlacement, make_dtensor_record
from ckpt_tools.serialization.torch_zip import get_archive_root, make_archive_segments
from ckpt_tools.state_tree.build import Entries, entries_of, is_model_only
from ckpt_tools.state_tree.frozen_or_buffer import classify_untrained, note_guesses
from ckpt_tools.state_tree.param_numbers import BUFFER_NAMES
from ckpt_tools.trainers.accelerate import SCHEDULER
from ckpt_tools.trainers.verl import FSDP_CONFIG_FILE

_VERL_TEMPLATE = f"_world_size_{WORLD_FIELD}_rank_{RANK_FIELD}.pt"
VERL_ORIGIN = Origin(
    {"model": f"model{_VERL_TEMPLATE}", "optim": f"optim{_VERL_TEMPLATE}", "": f"extra_state{_VERL_TEMPLATE}"},
    is_numbered=True,
)
VERL_TREE = StateTree(("model",), ("optim",))
DEFAULT_DEVICE = "cuda"
"""The device of verl's mesh (``create_device_mesh``), for sources without a mesh."""


def layout(manifest: Manifest, options: WriteOptions) -> Layout:
    check_ranks_by_elements(manifest, options.world_size)
    origin = read_origin(manifest) if manifest.format == "sharded" else None
    tree = manifest.tree if origin is not None and manifest.tree is not None else VERL_TREE
    origin = origin or VERL_ORIGIN
    # By number, unless a parameter with state is in no group.
    names = [name for group in manifest.groups for name in group.params]
    can_number = {key.fqn for key in manifest.select_kinds(Kind.STATE)} <= {*names}
    is_numbered = origin.is_numbered and not tree.is_flattened and can_number
    tree = replace(tree, numbers=tuple(range(len(names))) if is_numbered else ())
    entries = entries_of(manifest, tree)
    whole_names, guess_notes = _find_whole_weights(manifest, origin, options.world_size)
    writer = _RankFileWriter(manifest, entries, origin, tree, whole_names, options.world_size)
    specs = [*writer.iter_rank_files(), *writer.iter_companion_files()]
    return Layout(
        specs,
        (*entries.notes, *_note_defaults(manifest, origin, whole_names), *guess_notes, *writer.note_dropped_entries()),
    )


def _find_whole_weights(manifest: Manifest, origin: Origin, world_size: int) -> tuple[frozenset[str], list[Note]]:
    """Weights that every rank has whole: buffers, and what FSDP2 cannot cut; and what was guessed of them.

    Raises:
        IncompleteError: the files are to be verl's, which are not read without the weights of the optimizer.
    """
    group_members = {manifest.aliases.get(name, name) for group in manifest.groups for name in group.params}
    trained_names = {name for name in group_members if StateKey(name) in manifest.tensors}
    if origin is VERL_ORIGIN and trained_names != group_members:
        raise IncompleteError(
            "a parameter group names it, but there is no such weight", key=min(group_members - trained_names)
        )
    whole_names = {
        key.fqn for key, entry in manifest.tensors.items() if key.slot == WEIGHT and not _can_be_cut(entry.shape)
    }
    whole_names |= {key.fqn for key in manifest.select_kinds(Kind.BUFFER)}
    if origin is not VERL_ORIGIN and (
        manifest.world_size != 1 or world_size == 1
    ):  # plain tensors of one rank do not show it
        return frozenset(whole_names | set(origin.whole)), []
    if not trained_names:
        return frozenset(
            whole_names | {name for name, _ in manifest.tensors if name.rpartition(".")[2] in BUFFER_NAMES}
        ), []
    untrained_tensors = classify_untrained(manifest, trained_names)
    return frozenset(whole_names | untrained_tensors.buffers.keys()), note_guesses(
        untrained_tensors.guessed_names, untrained_tensors.frozen, untrained_tensors.buffers
    )


def _can_be_cut(shape: Shape) -> bool:
    return bool(shape) and 0 not in shape


def _note_defaults(manifest: Manifest, origin: Origin, whole_names: frozenset[str]) -> Iterator[Note]:
    is_cut = any(key.fqn not in whole_names for key in manifest.select_kinds(Kind.PARAMETER))
    if is_cut and origin.device_type is None:
        why = f"the source has none; it is one of {DEFAULT_DEVICE} whose dim is called {FSDP_DIM}, as verl's is"
        yield Note(Outcome.DEFAULTED, "the device mesh", why)
    if _parse_verl_config(origin).get("FSDP_version") == 1:
        yield Note(Outcome.DEFAULTED, "FSDP_version of verl", "the source has 1, and DTensors are those of 2")


def _parse_verl_config(origin: Origin) -> dict[str, Any]:
    try:
        config = json.loads(origin.beside.get(FSDP_CONFIG_FILE, b"{}"))
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


@dataclass(slots=True)
class _RankFileWriter:
    """The files, made on demand."""

    _manifest: Manifest
    _entries: Entries
    _origin: Origin
    _tree: StateTree
    _whole_names: frozenset[str]
    _world_size: int
    _generator_names: list[str] = field(init=False)
    _paths: dict[str, TreePath] = field(init=False)
    _templates: Mapping[str, str] = field(init=False)
    _names_by_file: dict[str, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        generators = _find_generator_entries(self._manifest, self._entries)
        self._generator_names = list(dict.fromkeys(generators.values()))
        self._paths = {name: path for name, path in self._entries.paths.items() if name not in generators}
        self._templates = _get_templates(self._origin)
        self._names_by_file = self._group_by_file()

    def _group_by_file(self) -> dict[str, list[str]]:
        """The names of the entries by the file that they go to."""
        names_by_file: dict[str, list[str]] = {}
        for name, path in self._paths.items():
            top = str(path[0])
            label = top if top in self._templates and len(path) > 1 else ""
            names_by_file.setdefault(label, []).append(name)
        if self._templates == _get_templates(VERL_ORIGIN) and not is_model_only(self._manifest):
            names_by_file.setdefault("", [])
        return names_by_file

    def iter_rank_files(self) -> Iterator[FileSpec]:
        for label, template in self._templates.items():
            if label in self._names_by_file:
                cache = FileLayoutCache(partial(self._build_file, label, template))
                for rank in range(self._world_size):
                    first_layout = self._build_file(label, template, rank)
                    yield LazyFile(first_layout.path, first_layout.size_bytes, rank, cache)

    def iter_companion_files(self) -> Iterator[FileSpec]:
        for path, data in self._origin.beside.items():
            if path != FSDP_CONFIG_FILE:
                yield FileLayout(path, (Literal(data),))
        if "lr_scheduler" in self._unplaced_names:
            value = self._manifest.extra["lr_scheduler"]
            yield FileLayout(SCHEDULER, tuple(make_archive_segments(value, {})))
        if FSDP_CONFIG_FILE in self._origin.beside or self._origin is VERL_ORIGIN:
            content = {**_parse_verl_config(self._origin), "FSDP_version": 2, "world_size": self._world_size}
            yield FileLayout(FSDP_CONFIG_FILE, (Literal(json.dumps(content, indent=4).encode()),))

    @property
    def _unplaced_names(self) -> dict[str, None]:
        """The entries at the top for which no file has a place."""
        names = [] if "" in self._templates else self._names_by_file.get("", [])
        return dict.fromkeys(str(self._paths[name][0]) for name in names)

    def note_dropped_entries(self) -> Iterator[Note]:
        """Entries that the files have no place for, and states of random number generators."""
        if self._generator_names:
            why = "each rank restores its own random number generators, and these are of other ranks"
            yield Note(Outcome.DROPPED, join_names(self._generator_names), why, len(self._generator_names))
        why = f"the files ({join_names(list(self._templates.values()))}) have no place for it"
        yield from (Note(Outcome.DROPPED, name, why) for name in self._unplaced_names if name != "lr_scheduler")

    def _build_file(self, label: str, template: str, rank: int) -> FileLayout:
        tensors = _RankTensors(self._manifest, self._whole_names, self._origin, rank, self._world_size)
        root: dict[str | int, Any] = Branch()
        for name in self._names_by_file[label]:
            path = self._paths[name][1:] if label else self._paths[name]
            if name in self._entries.objects:
                value = replace_tensor_refs(self._entries.objects[name], lambda ref: tensors.get_whole(ref.key))
            else:
                value = tensors.get_part(self._entries.tensors[self._entries.aliases.get(name, name)])
            insert_leaf(root, path, value)
        if label == "" and self._templates == _get_templates(VERL_ORIGIN):
            root.setdefault("lr_scheduler", None)
        value = restore_lists(root)
        self._name_parameters(value, label)
        file_name = _format_file_name(template, rank, self._world_size)
        return FileLayout(
            file_name, tuple(make_archive_segments(value, tensors.segments, root=get_archive_root(file_name)))
        )

    def _name_parameters(self, value: Any, label: str) -> None:
        """Add the names of parameters beside their numbers, as torch does if an optimizer is made of named ones."""
        path = self._tree.optim or ()
        for part in path[1:] if label else path:
            value = value.get(part) if isinstance(value, dict) else None
        groups = value.get("param_groups") if isinstance(value, dict) else None
        if self._tree.optim is None or not isinstance(groups, list):
            return
        for written_group, group in zip(groups, self._manifest.groups if self._tree.numbers else (), strict=False):
            written_group["param_names"] = list(group.params)


def loading(path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
    """``torch.load`` of the files of one rank, in a job whose process group is up."""
    origin, world_size = read_origin(manifest) if manifest.format == "sharded" else None, options.world_size
    tree = manifest.tree if origin is not None and manifest.tree is not None else VERL_TREE
    variable_names = {str(tree.model[0]) if tree.model else "": "model_state"} | {
        str(part): "optim_state" for part in (tree.optim or ())[:1]
    }
    written_paths = {file.path for file in layout.files}
    lines = [
        f"import torch, torch.distributed.tensor  # in each of {format_count(world_size, 'rank')}, its process group "
        f"initialized"
    ]
    for label, template in _get_templates(origin or VERL_ORIGIN).items():
        if _format_file_name(template, 0, world_size) in written_paths:
            path_pattern = escape_braces(f"{path}/") + re.sub(
                _BRACED_RANK_PATTERN, r"{\1}", escape_braces(template.replace(WORLD_FIELD, str(world_size)))
            )
            if label in variable_names:
                lines.append(f"{variable_names[label]} = torch.load(f{quote_literal(path_pattern)}, weights_only=True)")
            else:  # objects of classes, which only an executed pickle makes
                lines.append(f"# the other entries: ckpt_tools.open({quote_literal(path)}).extras")
    return "\n".join(lines)


def _find_generator_entries(manifest: Manifest, entries: Entries) -> Mapping[str, str]:
    """The user's entries that the reader would take for states of random number generators: the name at the top, by
    leaf."""
    tensors = {name for name, key in entries.tensors.items() if manifest.tensors[key].kind is Kind.EXTRA}
    paths = entries.paths
    own_names = (name for name in paths if name in entries.objects or name in tensors)
    return {
        name: str(paths[name][0]) for name in own_names if any(part in GENERATOR_NAMES for part in paths[name][:-1])
    }


def _get_templates(origin: Origin) -> Mapping[str, str]:
    """The names of the source's files; verl's where these have no rank."""
    have_ranks = all(re.search(_RANK_PATTERN, name) for name in origin.templates.values())
    return origin.templates if have_ranks else VERL_ORIGIN.templates


_RANK_PATTERN = r"\{rank(?::0(\d+))?\}"
_BRACED_RANK_PATTERN = r"\{\{(rank(?::0\d+)?)\}\}"


def _format_file_name(template: str, rank: int, world_size: int) -> str:
    return re.sub(_RANK_PATTERN, lambda found: str(rank).zfill(int(found[1] or 0)), template).replace(
        WORLD_FIELD, str(world_size)
    )


@dataclass(slots=True)
class _RankTensors:
    """The tensors of one file, and the bytes of their storages, which are numbered in order of use."""

    _manifest: Manifest
    _whole_names: frozenset[str]
    _origin: Origin
    _rank: int
    _world_size: int
    _tensors: dict[StateKey, Any] = field(default_factory=dict)
    _cached_mesh: PickledMesh | None = None
    segments: dict[str, list[Segment]] = field(default_factory=dict)

    def get_part(self, key: StateKey) -> Any:
        """This rank's part of a tensor; the same object for the same key, so that ties share it."""
        entry = self._manifest.tensors[key]
        is_state = entry.kind in (Kind.PARAMETER, Kind.STATE)
        if not is_state or key.fqn in self._whole_names or not _can_be_cut(entry.shape):
            return self.get_whole(key)
        if key not in self._tensors:
            region = compute_region(entry.shape, (self._world_size,), (self._rank,), (ShardPlacement(0),))
            payload = [Payload(key, box, entry.shape, entry.dtype) for box, _ in region.boxes]
            local = self._store_tensor(region.shape, entry.dtype, list(payload))
            self._tensors[key] = make_dtensor_record(entry.shape, entry.dtype, self._get_mesh_record(), local)
        return self._tensors[key]

    def get_whole(self, key: StateKey) -> Any:
        if key not in self._tensors:
            entry = self._manifest.tensors[key]
            payload = Payload(key, Box.whole(entry.shape), entry.shape, entry.dtype)
            self._tensors[key] = self._store_tensor(entry.shape, entry.dtype, [payload])
        return self._tensors[key]

    def _get_mesh_record(self) -> PickledMesh:
        if self._cached_mesh is None:
            data = np.arange(self._world_size, dtype="<i4").tobytes()
            ranks = self._store_tensor((self._world_size,), DType.INT32, [Literal(data)])
            device, dim = self._origin.device_type, self._origin.dim_name
            names = (DEFAULT_DEVICE, FSDP_DIM) if device is None else (device, dim)
            self._cached_mesh = PickledMesh.of(self._rank, self._world_size, *names, ranks)
        return self._cached_mesh

    def _store_tensor(self, shape: Shape, dtype: DType, segments: list[Segment]) -> StoredTensor:
        number, numel = str(len(self.segments)), Box.whole(shape).numel
        self.segments[number] = segments
        return StoredTensor(StorageRef.of_elements(number, dtype, numel), dtype, 0, shape, contiguous_strides(shape))
