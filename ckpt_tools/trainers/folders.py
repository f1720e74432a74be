"""The folder of a trainer that saves through DCP: which of its files are written again for it to resume."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ckpt_tools.core.trainer_folder import CompanionFile, TrainerFolder
from ckpt_tools.stores.marker_files import DIGESTS_NAME, SIGNATURE_NAME
from ckpt_tools.trainers.all import TRAINERS
from ckpt_tools.trainers.record import ResumeRules


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
        resume_rules = trainer.resume_rules
        base = None if resume_rules is None else _find_base(resume_rules, metadata_by_folder, files)
        if resume_rules is not None and base is not None:
            parts = {folder[len(base) :]: top_names[path] for folder, path in metadata_by_folder.items()}
            copied_files = _match_copied_files(resume_rules, base, files)
            copied_paths = {file.source for file in copied_files.values()}
            other_paths = (path for path in files if _is_direct_file(path, base) and not is_dcp_file(path[len(base) :]))
            unknown = frozenset(path for path in other_paths if path not in copied_paths)
            return TrainerFolder(
                trainer.name,
                parts,
                copied_files,
                resume_rules.note_without_rank_files,
                resume_rules.is_rank0_enough,
                unknown,
                resume=resume_rules.resume_code,
            )
    return None


def _is_direct_file(path: str, base: str) -> bool:
    """Whether a file is in the folder itself, and not written by ckpt-tools."""
    name = path[len(base) :]
    return path.startswith(base) and "/" not in name and name not in (SIGNATURE_NAME, DIGESTS_NAME)


def _find_base(resume_rules: ResumeRules, folders: Iterable[str], files: Mapping[str, int]) -> str | None:
    prefixes = set()
    for folder in folders:
        parent, _, name = folder.rpartition("/")
        above, last = (parent, name) if resume_rules.dcp_folders else (folder, "")
        if re.fullmatch(resume_rules.dcp_folders, last) is None:
            return None
        prefixes.add(f"{above}/" if above else "")
    base = prefixes.pop()
    return (
        base
        if not prefixes and (resume_rules.marker_file is None or f"{base}{resume_rules.marker_file}" in files)
        else None
    )


def _match_copied_files(resume_rules: ResumeRules, base: str, files: Mapping[str, int]) -> dict[str, CompanionFile]:
    copied_files = {}
    for path, size in files.items():
        name = path.removeprefix(base)
        matches = (re.fullmatch(pattern, name) for pattern in resume_rules.copied_files if path.startswith(base))
        match = next((match for match in matches if match is not None), None)
        if match is not None:
            copied_files[name] = CompanionFile(path, size, int(match[1] or 0) if match.re.groups else None)
    return copied_files
