"""The items of one checkpoint, each with a file of every rank; they are told apart by the names of the files.

The index of torch_checkpointing, ``metadata.pkl`` (torch_checkpointing 0.1.1, metadata_manager.py), is a pickle of
plain dicts. It names the files of the items that can be resharded, if any, and describes their tensors. With torch's
own serialization the files have the same descriptions, which are used; safetensors hold local shapes alone, and are
refused.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.core.wording import join_names
from ckpt_tools.errors import (
    IncompleteError,
    MalformedError,
    SeveralCheckpointsError,
    UnsupportedError,
)
from ckpt_tools.formats.sharded.detection import folders_of_ranks, holds_parts, samples
from ckpt_tools.formats.sharded.rank_file import RankFile, read_rank_file
from ckpt_tools.serialization.pickle.load import loads
from ckpt_tools.stores.source import Source, check_file_name
from ckpt_tools.trainers.names import find_world_sizes, is_rank_file_candidate, match_rank_file
from ckpt_tools.trainers.run_folders import get_parent_folder
from ckpt_tools.trainers.torch_checkpointing import INDEX, has_index

RANK, WORLD = "{rank}", "{world}"

_NUMBER = re.compile(r"\d{1,9}")
_OF_THE_RANK = re.compile(
    r"[-_.]*(?:world_size[-_.]*\{world\}[-_.]*)?(?:(?:dp|fsdp|mp|global)?[-_.]*rank)?[-_.]*\{rank\}"
)


def by_template(ranks: Mapping[str, int]) -> dict[str, list[str]]:
    """Files, whose ranks are known, by their names with the rank left out. A number that equals the rank may be another
    thing: what most files agree on is taken, the last one if that does not decide."""
    options = {path: _templates(path.rpartition("/")[2], {rank}) for path, rank in ranks.items()}
    counts = Counter(template for found in options.values() for template, _ in found)
    items: defaultdict[str, list[str]] = defaultdict(list)
    for path, found in options.items():
        template = max(reversed(found), key=lambda each: counts[each[0]])[0] if found else ""
        items[template].append(path)
    return dict(items)


def numbered(paths: Collection[str], ranks: Collection[int]) -> dict[str, dict[int, str]]:
    """Files whose ranks are not known by their content, by template and by the number in its place: those templates
    that have a file for some rank of ``ranks``. If two fit a file, the one that has more files is taken."""
    found: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for path in paths:
        for template, number in _templates(path.rpartition("/")[2], ranks):
            found[template][number] = path
    taken: set[str] = set()
    chosen = {}
    for template in sorted(found, key=lambda each: (-len(found[each]), -each.find(RANK))):
        files = {number: path for number, path in found[template].items() if path not in taken}
        if files:
            chosen[template] = files
            taken |= set(files.values())
    return chosen


def _templates(name: str, ranks: Collection[int]) -> list[tuple[str, int]]:
    """Every way to see one of ``ranks`` in a name."""
    known = match_rank_file(name)
    spans = [known.span("rank")] if known else [match.span() for match in _NUMBER.finditer(name)]
    return [(name[:a] + RANK + name[b:], int(name[a:b])) for a, b in spans if int(name[a:b]) in ranks]


def without_world(template: str, world: int) -> str:
    """A template without its world size, if it has one."""
    return template.replace(f"world_size_{world}_rank_{RANK}", f"world_size_{WORLD}_rank_{RANK}")


def label(template: str) -> str:
    """Label of an item: the template without the rank and the ending."""
    known = match_rank_file(template.replace(RANK, "0"))
    if known is not None and known.groupdict().get("index", "") in (None, "0"):
        return "model" if known["item"] == "pytorch_model_fsdp" else "optimizer"
    stem = template.rpartition(".")[0] or template
    return _OF_THE_RANK.sub("", re.sub(r"world_size_\d+", f"world_size_{WORLD}", stem), count=1).strip("-_.") or "state"


@dataclass(frozen=True, slots=True)
class Item:
    """The files of one item, such as the model, by rank. ``template`` is their name, with the rank and the world size
    left out."""

    label: str
    template: str
    files: Mapping[int, RankFile]

    @property
    def has_parts(self) -> bool:
        return any(file.kind is not None for file in self.files.values())

    @property
    def is_optimizer(self) -> bool:
        return any(file.is_optimizer for file in self.files.values())


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The items of a folder. ``ranks`` are those that saved it."""

    folder: str
    items: tuple[Item, ...]
    ranks: tuple[int, ...]

    @property
    def files(self) -> frozenset[str]:
        return frozenset(file.path for item in self.items for file in item.files.values())


def read_checkpoint_files(source: Source) -> Checkpoint:
    """The one checkpoint of files of ranks in ``source``. Raises FormatError if a file is missing, is there twice, or
    is of another run, or if there are several checkpoints."""
    folder = _folder(source)
    here = [path for path in source.files if get_parent_folder(path) == folder]
    world = check_index(source, folder, here)
    files = [path for path in here if is_rank_file_candidate(path)]
    if len(sizes := sorted(find_world_sizes(files))) > 1:  # verl's, of a run that was started again with other ranks
        raise MalformedError(
            f"there are files of several world sizes here ({join_names(list(map(str, sizes)))}); "
            "move those of one into a folder of their own"
        )
    read = {path: read_rank_file(source, path) for path in files if match_rank_file(path) or holds_parts(source, path)}
    parts = {path: file for path, file in read.items() if file.kind is not None}
    if not parts:
        return _plain(folder, read)
    ranks = _ranks(parts)
    unknown = next((rank for rank in range(max(sizes, default=0)) if rank not in ranks), None)
    if unknown is not None:  # a mesh of its own for some ranks does not know the others
        raise IncompleteError(f"by their names these are files of {sizes[0]} ranks, and that of {unknown} is missing")
    if world not in (None, len(ranks)):
        raise MalformedError(f"the index states {world} ranks, but the files are of {len(ranks)}", path=INDEX)
    if len(files) == 1 and len(ranks) > 1:
        (only,) = parts.values()
        raise UnsupportedError(
            f"this is rank {only.rank} of {len(ranks)} of a sharded state ({only.kind}s); name the folder that holds "
            "the files of all ranks",
            path=only.path,
        )
    templates = by_template({path: file.rank for path, file in parts.items() if file.rank is not None})
    if "" in templates and len(templates) > 1:
        path = templates[""][0]
        raise MalformedError(f"it is of rank {parts[path].rank} by its content, but its name has another", path=path)
    items = [_item(template, [parts[path] for path in paths], ranks) for template, paths in templates.items()]
    plain = numbered([path for path in files if path not in parts], ranks)
    beside = (_plain_item(source, template, by_rank, ranks, read) for template, by_rank in plain.items())
    items += [item for item in beside if item is not None]
    return _checkpoint(folder, items, ranks)


def _folder(source: Source) -> str:
    """The folder of the files of ranks: the top, or the only folder below that has some."""
    found = folders_of_ranks(source)
    below = [folder for folder in found if folder]
    here = [path for path in source.files if "/" not in path and is_rank_file_candidate(path)]
    at_top = "" in found or any(holds_parts(source, path) for path in samples(here))
    if at_top or not below:
        return ""
    if len(below) > 1:
        message = f"there are several checkpoints here ({join_names(below)}); name the folder of one"
        raise SeveralCheckpointsError(message)
    return below[0]


def _ranks(parts: Mapping[str, RankFile]) -> tuple[int, ...]:
    """All ranks that the meshes name. Raises MalformedError where they are of several world sizes."""
    sizes: dict[int, str] = {}
    for path, file in parts.items():
        sizes.setdefault(len(file.ranks), path)
    if len(sizes) > 1:
        told = ", ".join(f"{path} of {size}" for size, path in sorted(sizes.items()))
        raise MalformedError(f"there are files of several world sizes here ({told})")
    return tuple(sorted(frozenset[int]().union(*(file.ranks for file in parts.values()))))


def _item(template: str, files: list[RankFile], ranks: tuple[int, ...]) -> Item:
    by_rank: dict[int, RankFile] = {}
    for file in files:
        assert file.rank is not None, "files with parts know their rank"
        if file.rank in by_rank:
            raise MalformedError(
                f"two files are of rank {file.rank} ({by_rank[file.rank].path} and {file.path}); leave one of them"
            )
        by_rank[file.rank] = file
    _check_ranks(template, by_rank, ranks)
    return Item(label(template), template, dict(sorted(by_rank.items())))


def _check_ranks(template: str, found: Mapping[int, object], ranks: tuple[int, ...]) -> None:
    missing = [rank for rank in ranks if rank not in found]
    if missing:
        name = template.replace(RANK, str(missing[0])) or "its name is not known"
        raise IncompleteError(f"the file of rank {missing[0]} of {len(ranks)} is missing ({name})")


def _plain_item(
    source: Source, template: str, files: Mapping[int, str], ranks: tuple[int, ...], read: Mapping[str, RankFile]
) -> Item | None:
    """Files without a part of a tensor, such as the generators of each rank; None where they are those of no ranks."""
    if files.keys() != set(ranks):
        if any(map(match_rank_file, files.values())):
            _check_ranks(template, files, ranks)
        return None
    by_rank = {rank: read.get(path) or read_rank_file(source, path) for rank, path in sorted(files.items())}
    return Item(label(template), template, by_rank)


def _plain(folder: str, read: Mapping[str, RankFile]) -> Checkpoint:
    """Files without a part of a tensor, as verl writes on one GPU. Raises UnsupportedError where they are of several
    ranks."""
    if not read:
        raise UnsupportedError("there are no files of ranks here, which are torch files by their names")
    ranks = {path: int(match["rank"]) if (match := match_rank_file(path)) else 0 for path in read}
    world = max(max(find_world_sizes(read), default=1), max(ranks.values(), default=0) + 1)
    if world > 1:
        raise UnsupportedError(
            f"by their names these are files of {world} ranks ({join_names(list(read))}), but they hold plain "
            f"tensors, and "
            "do not say which part of the model each one is; save with torch.distributed.checkpoint.save"
        )
    templates = by_template(ranks)
    items = [Item(label(template), template, {0: read[paths[0]]}) for template, paths in templates.items()]
    return _checkpoint(folder, items, (0,))


def _checkpoint(folder: str, items: list[Item], ranks: tuple[int, ...]) -> Checkpoint:
    """Items of different names: two of one name get the names of their files. Raises IncompleteError where verl or
    accelerate would have written a model beside an optimizer."""
    labels = [item.label for item in items]
    alone = [file.path for item in items if item.is_optimizer for file in item.files.values()]
    is_half = all(item.is_optimizer or item.label == "extra_state" for item in items)
    if is_half and any(map(match_rank_file, alone)):
        raise IncompleteError("this is an optimizer's state, and the files of its model are missing", path=alone[0])
    unique = (replace(item, label=item.label if labels.count(item.label) == 1 else item.template) for item in items)
    return Checkpoint(folder, tuple(unique), ranks)


MAX_BYTES = 1 << 30
MAX_RANKS = 1 << 20

_TORCH = "TorchSerialization"


def check_index(source: Source, folder: str, here: Collection[str]) -> int | None:
    """The number of ranks in the index of a folder; None where it has no index. Raises FormatError if the index breaks
    a rule, or a file is stored in another way than by ``torch.save``, or is missing."""
    path = f"{folder}/{INDEX}" if folder else INDEX
    if not has_index(source, folder):
        return None
    found = loads(source.read_all(path, limit_bytes=MAX_BYTES), path=path)
    world, items = (found.get(name) if isinstance(found, dict) else None for name in ("world_size", "metadata"))
    if type(world) is not int or not 0 < world <= MAX_RANKS or not isinstance(items, dict):
        raise MalformedError("it does not contain the metadata of torch_checkpointing", path=path)
    for name, item in items.items():
        for file, kind in _files(str(name), item, path):
            _check(source, f"{folder}/{file}" if folder else file, str(name), kind)
    for file in here:
        if file.endswith(".safetensors"):
            _check(source, file, file.rpartition("/")[2].rpartition("_")[0], "SafetensorsSerialization")
    return world


def _check(source: Source, file: str, item: str, kind: str) -> None:
    if kind != _TORCH:
        raise UnsupportedError(f"item {item!r} is stored by {kind}, which is not supported; use {_TORCH}", path=file)
    if file not in source.files:
        raise IncompleteError(f"the file of item {item!r} is missing", path=file)


def _files(name: str, item: Any, path: str) -> Iterator[tuple[str, str]]:
    """The file of each rank and how it is stored."""
    ranks = item.get("rank_to_layout_info") if isinstance(item, dict) else None
    for where in ranks.values() if isinstance(ranks, dict) else [ranks]:
        file = where.get("file_path") if isinstance(where, Mapping) else None
        kind = where.get("serialization_format") if isinstance(where, Mapping) else None
        kind = kind.get("type") if isinstance(kind, Mapping) else kind
        if where is None and isinstance(ranks, dict):
            continue
        if type(file) is not str or type(kind) is not str:
            raise MalformedError(f"item {name!r} does not state where its files are, or how they are stored", path=path)
        yield check_file_name(file), kind
