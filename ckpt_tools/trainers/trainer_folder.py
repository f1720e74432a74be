"""The folder of a trainer that saves through DCP: which of its files are written again for it to resume."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ckpt_tools.core.trainer_folder import CompanionFile, TrainerFolder
from ckpt_tools.stores.output_names import DIGESTS_NAME, SIGNATURE_NAME
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
        rules = trainer.resume_rules
        base = None if rules is None else _find_base(rules, metadata_by_folder, files)
        if rules is None or base is None:
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
