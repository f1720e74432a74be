"""The items of one checkpoint, each with a file of every rank; they are told apart by the names of the files."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ckpt_tools.errors import IncompleteError, MalformedError, SeveralCheckpointsError, UnsupportedError
from ckpt_tools.formats.rank_files.detection import find_rank_folders, has_tensor_parts, pick_samples
from ckpt_tools.formats.rank_files.managed_index import read_index_world_size
from ckpt_tools.formats.rank_files.rank_file import RankFile, read_rank_file
from ckpt_tools.messages.wording import join_names
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.names import find_world_sizes, is_rank_file_candidate, match_rank_file
from ckpt_tools.trainers.saved import get_parent_folder
from ckpt_tools.trainers.torch_checkpointing import INDEX

RANK_FIELD, WORLD_FIELD = "{rank}", "{world}"

_NUMBER = re.compile(r"\d{1,9}")
_RANK_SUFFIX = re.compile(
    r"[-_.]*(?:world_size[-_.]*\{world\}[-_.]*)?(?:(?:dp|fsdp|mp|global)?[-_.]*rank)?[-_.]*\{rank\}"
)


def group_by_template(ranks: Mapping[str, int]) -> dict[str, list[str]]:
    """Files, whose ranks are known, by their names with the rank left out. A number that equals the rank may be another
    thing: what most files agree on is taken, the last one if that does not decide."""
    # step_2_rank_2.pt, known to be of rank 2, has the templates step_{rank}_rank_2 and step_2_rank_{rank}. The second
    # is that of the other ranks' files too, so most files have it.
    templates_by_path = {path: _find_templates(path.rpartition("/")[2], {rank}) for path, rank in ranks.items()}
    template_counts = Counter(template for found in templates_by_path.values() for template, _ in found)
    items: defaultdict[str, list[str]] = defaultdict(list)
    for path, found in templates_by_path.items():
        template = max(reversed(found), key=lambda each: template_counts[each[0]])[0] if found else ""
        items[template].append(path)
    return dict(items)


def group_by_number(paths: Collection[str], ranks: Collection[int]) -> dict[str, dict[int, str]]:
    """Files whose ranks are not known by their content, by template and by the number in its place: those templates
    that have a file for some rank of ``ranks``. If two fit a file, the one that has more files is taken."""
    files_by_template: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for path in paths:
        for template, number in _find_templates(path.rpartition("/")[2], ranks):
            files_by_template[template][number] = path
    assigned_files: set[str] = set()
    chosen = {}
    for template in sorted(files_by_template, key=lambda each: (-len(files_by_template[each]), -each.find(RANK_FIELD))):
        files = {number: path for number, path in files_by_template[template].items() if path not in assigned_files}
        if files:
            chosen[template] = files
            assigned_files |= set(files.values())
    return chosen


def _find_templates(name: str, ranks: Collection[int]) -> list[tuple[str, int]]:
    """Every way to see one of ``ranks`` in a name."""
    rank_match = match_rank_file(name)
    spans = [rank_match.span("rank")] if rank_match else [match.span() for match in _NUMBER.finditer(name)]
    return [(name[:a] + RANK_FIELD + name[b:], int(name[a:b])) for a, b in spans if int(name[a:b]) in ranks]


def generalize_world_size(template: str, world: int) -> str:
    """A template without its world size, if it has one."""
    return template.replace(f"world_size_{world}_rank_{RANK_FIELD}", f"world_size_{WORLD_FIELD}_rank_{RANK_FIELD}")


def make_label(template: str) -> str:
    """Label of an item: the template without the rank and the ending."""
    rank_match = match_rank_file(template.replace(RANK_FIELD, "0"))
    if rank_match is not None and rank_match.groupdict().get("index", "") in (None, "0"):
        return "model" if rank_match["item"] == "pytorch_model_fsdp" else "optimizer"
    stem = template.rpartition(".")[0] or template
    return (
        _RANK_SUFFIX.sub("", re.sub(r"world_size_\d+", f"world_size_{WORLD_FIELD}", stem), count=1).strip("-_.")
        or "state"
    )


@dataclass(frozen=True, slots=True)
class ShardedItem:
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
class ShardedCheckpoint:
    """The items of a folder. ``ranks`` are those that saved it."""

    folder: str
    items: tuple[ShardedItem, ...]
    ranks: tuple[int, ...]

    @property
    def files(self) -> frozenset[str]:
        return frozenset(file.path for item in self.items for file in item.files.values())


def read_checkpoint_files(source: Source) -> ShardedCheckpoint:
    """The one checkpoint of files of ranks in ``source``. Raises FormatError if a file is missing, is there twice, or
    is of another run, or if there are several checkpoints."""
    folder = _find_folder(source)
    folder_files = [path for path in source.files if get_parent_folder(path) == folder]
    index_world_size = read_index_world_size(source, folder, folder_files)
    files = [path for path in folder_files if is_rank_file_candidate(path)]
    world_sizes = sorted(find_world_sizes(files))
    if len(world_sizes) > 1:  # verl's, of a run that was started again with other ranks
        raise MalformedError(
            f"there are files of several world sizes here ({join_names(list(map(str, world_sizes)))}); "
            "move those of one into a folder of their own"
        )
    read_files = source.map_files(_read_if_rank_file, files)
    rank_files = {path: file for path, file in zip(files, read_files, strict=True) if file is not None}
    files_with_parts = {path: file for path, file in rank_files.items() if file.kind is not None}
    if not files_with_parts:
        return _build_plain_checkpoint(folder, rank_files)
    ranks = _collect_ranks(files_with_parts)
    unknown_rank = next((rank for rank in range(max(world_sizes, default=0)) if rank not in ranks), None)
    if unknown_rank is not None:  # a mesh of its own for some ranks does not know the others
        raise IncompleteError(
            f"by their names these are files of {world_sizes[0]} ranks, and that of {unknown_rank} is missing"
        )
    if index_world_size not in (None, len(ranks)):
        raise MalformedError(
            f"the index states {index_world_size} ranks, but the files are of {len(ranks)}", path=INDEX
        )
    if len(files) == 1 and len(ranks) > 1:
        (only,) = files_with_parts.values()
        raise UnsupportedError(
            f"this is rank {only.rank} of {len(ranks)} of a sharded state ({only.kind}s); name the folder that holds "
            "the files of all ranks",
            path=only.path,
        )
    templates = group_by_template({path: file.rank for path, file in files_with_parts.items() if file.rank is not None})
    if "" in templates and len(templates) > 1:
        path = templates[""][0]
        raise MalformedError(
            f"it is of rank {files_with_parts[path].rank} by its content, but its name has another", path=path
        )
    items = [
        _build_item(template, [files_with_parts[path] for path in paths], ranks)
        for template, paths in templates.items()
    ]
    plain_files = group_by_number([path for path in files if path not in files_with_parts], ranks)
    plain_items = (
        _build_plain_item(source, template, by_rank, ranks, rank_files) for template, by_rank in plain_files.items()
    )
    items += [item for item in plain_items if item is not None]
    return _build_checkpoint(folder, items, ranks)


def _find_folder(source: Source) -> str:
    """The folder of the files of ranks: the top, or the only folder below that has some."""
    rank_folders = find_rank_folders(source)
    below = [folder for folder in rank_folders if folder]
    top_files = [path for path in source.files if "/" not in path and is_rank_file_candidate(path)]
    at_top = "" in rank_folders or any(has_tensor_parts(source, path) for path in pick_samples(top_files))
    if at_top or not below:
        return ""
    if len(below) > 1:
        raise SeveralCheckpointsError.of(join_names(below))
    return below[0]


def _collect_ranks(files_with_parts: Mapping[str, RankFile]) -> tuple[int, ...]:
    """All ranks that the meshes name. Raises MalformedError where they are of several world sizes."""
    path_by_size: dict[int, str] = {}
    for path, file in files_with_parts.items():
        path_by_size.setdefault(len(file.ranks), path)
    if len(path_by_size) > 1:
        shown_sizes = ", ".join(f"{path} of {size}" for size, path in sorted(path_by_size.items()))
        raise MalformedError(f"there are files of several world sizes here ({shown_sizes})")
    return tuple(sorted(frozenset[int]().union(*(file.ranks for file in files_with_parts.values()))))


def _build_item(template: str, files: list[RankFile], ranks: tuple[int, ...]) -> ShardedItem:
    by_rank: dict[int, RankFile] = {}
    for file in files:
        assert file.rank is not None, "files with parts know their rank"
        if file.rank in by_rank:
            raise MalformedError(
                f"two files are of rank {file.rank} ({by_rank[file.rank].path} and {file.path}); leave one of them"
            )
        by_rank[file.rank] = file
    _check_ranks(template, by_rank, ranks)
    return ShardedItem(make_label(template), template, dict(sorted(by_rank.items())))


def _check_ranks(template: str, files_by_rank: Mapping[int, object], ranks: tuple[int, ...]) -> None:
    missing = [rank for rank in ranks if rank not in files_by_rank]
    if missing:
        name = template.replace(RANK_FIELD, str(missing[0])) or "its name is not known"
        raise IncompleteError(f"the file of rank {missing[0]} of {len(ranks)} is missing ({name})")


def _read_if_rank_file(source: Source, path: str) -> RankFile | None:
    return read_rank_file(source, path) if match_rank_file(path) or has_tensor_parts(source, path) else None


def _build_plain_item(
    source: Source,
    template: str,
    path_by_rank: Mapping[int, str],
    ranks: tuple[int, ...],
    read_files: Mapping[str, RankFile],
) -> ShardedItem | None:
    """Files without a part of a tensor, such as the generators of each rank; None where they are those of no ranks."""
    if path_by_rank.keys() != set(ranks):
        if any(map(match_rank_file, path_by_rank.values())):
            _check_ranks(template, path_by_rank, ranks)
        return None
    paths = [path_by_rank[rank] for rank in sorted(path_by_rank)]
    unread_paths = [path for path in paths if path not in read_files]
    files = dict(read_files) | dict(zip(unread_paths, source.map_files(read_rank_file, unread_paths), strict=True))
    by_rank = {rank: files[path_by_rank[rank]] for rank in sorted(path_by_rank)}
    return ShardedItem(make_label(template), template, by_rank)


def _build_plain_checkpoint(folder: str, rank_files: Mapping[str, RankFile]) -> ShardedCheckpoint:
    """Files without a part of a tensor, as verl writes on one GPU. Raises UnsupportedError where they are of several
    ranks."""
    if not rank_files:
        raise UnsupportedError("there are no files of ranks here, which are torch files by their names")
    ranks = {path: int(match["rank"]) if (match := match_rank_file(path)) else 0 for path in rank_files}
    world_size = max(max(find_world_sizes(rank_files), default=1), max(ranks.values(), default=0) + 1)
    if world_size > 1:
        raise UnsupportedError(
            f"by their names these are files of {world_size} ranks ({join_names(list(rank_files))}), but they hold "
            "plain tensors, and do not say which part of the model each one is; save with "
            "torch.distributed.checkpoint.save"
        )
    templates = group_by_template(ranks)
    items = [
        ShardedItem(make_label(template), template, {0: rank_files[paths[0]]}) for template, paths in templates.items()
    ]
    return _build_checkpoint(folder, items, (0,))


def _build_checkpoint(folder: str, items: list[ShardedItem], ranks: tuple[int, ...]) -> ShardedCheckpoint:
    """Items of different names: two of one name get the names of their files. Raises IncompleteError where verl or
    accelerate would have written a model beside an optimizer."""
    labels = [item.label for item in items]
    optimizer_paths = [file.path for item in items if item.is_optimizer for file in item.files.values()]
    is_half = all(item.is_optimizer or item.label == "extra_state" for item in items)
    if is_half and any(map(match_rank_file, optimizer_paths)):
        raise IncompleteError(
            "this is an optimizer's state, and the files of its model are missing", path=optimizer_paths[0]
        )
    unique = (replace(item, label=item.label if labels.count(item.label) == 1 else item.template) for item in items)
    return ShardedCheckpoint(folder, tuple(unique), ranks)
