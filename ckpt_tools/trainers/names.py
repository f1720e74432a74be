"""Questions about names of files and folders, answered by the records of all trainers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache

from ckpt_tools.core.trainer_folder import CompanionFile, TrainerFolder
from ckpt_tools.stores.output_names import DIGESTS_NAME, SIGNATURE_NAME
from ckpt_tools.trainers import accelerate, transformers
from ckpt_tools.trainers.all import TRAINERS
from ckpt_tools.trainers.record import EntryParser, ResumeRules

_UNFINISHED_MARKER = re.compile(r"(?i)(?:^|[._-])(?:in[_-]?progress|incomplete|unfinished)(?:[._-]|$)")
"""Markers that savers write first and remove last."""

_RANK_PART = re.compile(r".*_rank_\d.*\.pt|.*_rank\d.*\.bin")
"""Each rank's part of something."""

_OPTIMIZER_PART = re.compile(r"(?i)(?:.*[^a-z])?(?:opt(?=_states?)|optim(?:s|izers?)?)(?:[^a-z].*)?")
"""A part of a path that says optimizer; one that says model too can hold either."""

_TEXT_SUFFIXES = (".json", ".jsonl", ".yaml", ".yml", ".txt", ".md", ".py", ".csv")

_RANK_FILES = tuple(re.compile(trainer.rank_file) for trainer in TRAINERS if trainer.rank_file)
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_ENTRY_PARSERS = {name: meaning for trainer in TRAINERS for name, meaning in trainer.entry_parsers.items()}


@cache
def combine_patterns(*fields: str) -> re.Pattern[str]:
    """The pattern that matches what one of these fields of any trainer matches."""
    parts = (str(getattr(trainer, field)) for trainer in TRAINERS for field in fields)
    return re.compile("|".join(filter(None, parts)))


def is_trainer_file(name: str) -> bool:
    """Whether a trainer gives this name to a small file beside the model, and to nothing else."""
    return find_entry_parser(name) is not None or combine_patterns("own", "optimizer").fullmatch(name) is not None


def is_private_trainer_file(name: str) -> bool:
    """Whether only the trainer reads a file of this name: its own state, or a part of a rank."""
    return combine_patterns("own", "optimizer").fullmatch(name) is not None or _RANK_PART.fullmatch(name) is not None


def is_companion_file(name: str) -> bool:
    """True if a file of this name accompanies a model and does not hold one."""
    return find_entry_parser(name) is not None or is_private_trainer_file(name)


def is_optimizer_file(name: str) -> bool:
    """Whether a file has the name of the optimizer of a model beside it."""
    return combine_patterns("optimizer").fullmatch(name) is not None


def has_optimizer_in_path(path: str) -> bool:
    """Whether a file in a checkpoint holds an optimizer by its name or the name of a folder around it, whichever
    trainer wrote it."""
    parts = path.split("/")
    has_optimizer_part = any(_OPTIMIZER_PART.fullmatch(part) and "model" not in part.lower() for part in parts)
    return has_optimizer_part and not path.lower().endswith(_TEXT_SUFFIXES)


def find_optimizer_file(files: Collection[str]) -> str | None:
    """The file with the optimizer of the model in a folder; None if there is none."""
    number = accelerate.find_last_model_number(files)
    names = (f"optimizer_{number}.bin",) if number else (accelerate.OPTIMIZER, transformers.OPTIMIZER)
    return next((name for name in names if name in files and len(files) > 1), None)


def find_entry_parser(name: str) -> EntryParser | None:
    """The function that makes entries of the manifest of a file of this name; None if it is not read."""
    return _ENTRY_PARSERS.get(name)


def is_unfinished_marker(name: str) -> bool:
    """Whether a file of this name says that a checkpoint is unfinished."""
    return _UNFINISHED_MARKER.search(name) is not None


def match_rank_file(path: str) -> re.Match[str] | None:
    """The match of a name that says its rank, as verl's and accelerate's do, with the groups ``item``, ``rank``, and
    ``world`` or ``index``. Other files of ranks are known by what they hold."""
    name = path.rpartition("/")[2]
    return next((match for form in _RANK_FILES if (match := form.fullmatch(name)) is not None), None)


def is_rank_file_candidate(path: str) -> bool:
    """Whether a file could be a rank's: one of torch's, and not one that is known to be a trainer's own."""
    name = path.rpartition("/")[2]
    return name.endswith(_TORCH_SUFFIXES) and (match_rank_file(name) is not None or not is_trainer_file(name))


def are_rank_files(paths: Iterable[str]) -> bool:
    """Whether files at the top are those of ranks, by their names: one alone could be a whole state."""
    return sum("/" not in path and match_rank_file(path) is not None for path in paths) > 1


def find_world_sizes(paths: Iterable[str]) -> set[int]:
    """World sizes in the names."""
    world_sizes = (parse_world_size(match) for path in paths if (match := match_rank_file(path)) is not None)
    return {world for world in world_sizes if world is not None}


def parse_world_size(match: re.Match[str]) -> int | None:
    """The world size in the name of a rank's file; verl's has one."""
    world = match.groupdict().get("world")
    return None if world is None else int(world)


def find_trainer_folder(
    files: Mapping[str, int],
    metadata_paths: Sequence[str],
    top_names: Mapping[str, Collection[str]],
    is_dcp_file: Callable[[str], bool],
) -> TrainerFolder | None:
    """The trainer's folder that holds the DCPs whose indexes are ``metadata_paths``; None if no known trainer wrote it.

    ``top_names`` has the names at the top of the tree of each. ``files`` are those of the source, with their sizes.
    ``is_dcp_file`` tells names of torch's files in a DCP.
    """
    metadata_by_folder = {path.rpartition("/")[0]: path for path in metadata_paths}
    for trainer in TRAINERS:
        rules = trainer.resume_rules
        if rules is None or (base := _find_base(rules, metadata_by_folder, files)) is None:
            continue
        parts = {folder[len(base) :]: top_names[path] for folder, path in metadata_by_folder.items()}
        copied_files = _match_copied_files(rules, base, files)
        # Other files in the folder itself are unknown, but for those of the DCP and those that ckpt-tools writes.
        known_paths = {*(file.source for file in copied_files.values()), base + SIGNATURE_NAME, base + DIGESTS_NAME}
        names = (path[len(base) :] for path in files if path.startswith(base) and path not in known_paths)
        unknown = frozenset(base + name for name in names if "/" not in name and not is_dcp_file(name))
        return TrainerFolder(
            trainer.name,
            parts,
            copied_files,
            rules.note_without_rank_files,
            rules.is_rank0_enough,
            unknown,
            resume=rules.resume_code,
        )
    return None


def _find_base(resume_rules: ResumeRules, folders: Iterable[str], files: Mapping[str, int]) -> str | None:
    """The prefix of the trainer's folder in the paths of the source; None if the DCPs in ``folders`` are not its
    own."""
    prefixes = set()
    for folder in folders:
        parent, _, name = folder.rpartition("/")
        above, last = (parent, name) if resume_rules.dcp_folders else (folder, "")
        if re.fullmatch(resume_rules.dcp_folders, last) is None:
            return None
        prefixes.add(f"{above}/" if above else "")
    base = prefixes.pop()
    has_marker = resume_rules.marker_file is None or f"{base}{resume_rules.marker_file}" in files
    return base if not prefixes and has_marker else None


def _match_copied_files(resume_rules: ResumeRules, base: str, files: Mapping[str, int]) -> dict[str, CompanionFile]:
    """The files to copy by their paths in the folder, each with its rank if the pattern has one."""
    copied_files = {}
    for path, size in files.items():
        name = path.removeprefix(base)
        matches = (re.fullmatch(pattern, name) for pattern in resume_rules.copied_files if path.startswith(base))
        match = next((match for match in matches if match is not None), None)
        if match is not None:
            copied_files[name] = CompanionFile(path, size, int(match[1] or 0) if match.re.groups else None)
    return copied_files
