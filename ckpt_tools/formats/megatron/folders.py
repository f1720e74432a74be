"""The folder of a checkpoint, and its files.

A run's folder has ``latest_checkpointed_iteration.txt`` and ``iter_0000010/``; NeMo 2 keeps the same below
``weights/``, beside ``context/``. ``metadata.json`` is written last (megatron-core 0.16.1, dist_checkpointing,
``save``): a folder without it was not finished.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from ckpt_tools.core.notes import Note, note_unrelated_files
from ckpt_tools.errors import (
    IncompleteError,
    MalformedError,
    SeveralCheckpointsError,
    SourceNotFoundError,
    UnsupportedError,
)
from ckpt_tools.formats.dcp.names import METADATA
from ckpt_tools.formats.megatron.names import (
    COMMON_FILE,
    CONFIG_FILE,
    DATA_FILE_NAME,
    ITERATION_FOLDER,
    TRACKER_FILE,
    find_torch_dist_folders,
    is_legacy_file,
    read_backend,
)
from ckpt_tools.messages.wording import join_newest
from ckpt_tools.stores.source import Source

SUPPORTED_BACKEND = "torch_dist"

MAX_TRACKER_BYTES = 64
"""A number, or ``release``."""

_CONVERT_ADVICE = "save it with --ckpt-format torch_dist"


@dataclass(frozen=True, slots=True)
class MegatronFolder:
    """The folder of one checkpoint. ``prefix`` ends in a slash, or is empty."""

    source: Source
    prefix: str

    @property
    def metadata_path(self) -> str:
        return f"{self.prefix}{METADATA}"

    @property
    def common_path(self) -> str | None:
        """The file of the common state; since megatron-core 0.19 it is an item of the checkpoint instead."""
        path = f"{self.prefix}{COMMON_FILE}"
        return path if path in self.source.files else None

    @property
    def iteration(self) -> int | None:
        name = self.prefix or f"{self.source.store.url.rstrip('/')}/"
        found = ITERATION_FOLDER.fullmatch(name)
        return int(found[1]) if found is not None else None

    @property
    def files(self) -> frozenset[str]:
        """The files that dist_checkpointing writes, and the tracker where it chose the folder."""
        name_by_path = {path: path[len(self.prefix) :] for path in self.source.files if path.startswith(self.prefix)}
        names = (METADATA, COMMON_FILE, CONFIG_FILE)
        own_files = {path for path, name in name_by_path.items() if name in names or DATA_FILE_NAME.fullmatch(name)}
        return frozenset(own_files | ({TRACKER_FILE} & self.source.files.keys() if self.prefix else set()))

    def check_complete(self) -> None:
        """Raises UnsupportedError for another backend, IncompleteError for a checkpoint that was not finished."""
        path = f"{self.prefix}{CONFIG_FILE}"
        if path not in self.source.files:
            message = "this file is missing, which megatron-core writes last: the checkpoint was not finished"
            raise IncompleteError(f"{message}; take an earlier one", path=path)
        backend = read_backend(self.source, path)
        if backend is None:
            raise MalformedError("it does not state how the tensors are stored (sharded_backend)", path=path)
        if backend != SUPPORTED_BACKEND:
            message = f"its tensors are stored as {backend!r:.80}, which is not supported"
            raise UnsupportedError(f"{message}; load it with Megatron and {_CONVERT_ADVICE}", path=path)
        if self.metadata_path not in self.source.files:
            raise IncompleteError("this file of the checkpoint is missing", path=self.metadata_path)

    def note_unread_files(self, read_files: Collection[str]) -> list[Note]:
        """Notes on files in the folder, or in the other half of a NeMo checkpoint, that are not read."""
        checkpoint_prefix = self.prefix.removesuffix("weights/")
        others = [path for path in self.source.files if path.startswith(checkpoint_prefix) and path not in read_files]
        unread_by_top = Counter(checkpoint_prefix + path[len(checkpoint_prefix) :].partition("/")[0] for path in others)
        return [note_unrelated_files(top, count) for top, count in unread_by_top.items() if top != TRACKER_FILE]


def find_folder(source: Source) -> MegatronFolder:
    """The checkpoint in ``source``. Raises SourceNotFoundError if there is none; UnsupportedError if there are several,
    or it is of a form that is not read; IncompleteError if it was not finished, or the tracker names one that is not
    there."""
    prefixes = find_torch_dist_folders(source)
    prefix = _read_tracker(source, prefixes) if TRACKER_FILE in source.files else None
    if prefix is None:
        _refuse_legacy(source)
        prefix = _find_only_prefix(source, prefixes)
    folder = MegatronFolder(source, prefix)
    folder.check_complete()
    return folder


def _read_tracker(source: Source, prefixes: list[str]) -> str | None:
    tracker_text = source.read_all(TRACKER_FILE, limit_bytes=MAX_TRACKER_BYTES).decode("ascii", "replace").strip()
    if tracker_text != "release" and not tracker_text.isdecimal():
        raise MalformedError("it should contain the number of an iteration", path=TRACKER_FILE)
    name = "release/" if tracker_text == "release" else f"iter_{int(tracker_text):07d}/"
    if name not in prefixes:
        _refuse_legacy(source, name)
        raise IncompleteError(f"it names {name}, which does not hold a checkpoint of megatron-core", path=TRACKER_FILE)
    return name


def _find_only_prefix(source: Source, prefixes: list[str]) -> str:
    if not prefixes:
        prefixes = [path.removesuffix(METADATA) for path in source.files if f"/{path}".endswith(f"/{METADATA}")]
    if not prefixes:
        raise SourceNotFoundError(f"there is no checkpoint of megatron-core in {source.store.url}")
    if len(prefixes) > 1:
        names = join_newest([prefix.rstrip("/") or "the folder itself" for prefix in prefixes])
        raise SeveralCheckpointsError.of(names)
    return prefixes[0]


def _refuse_legacy(source: Source, prefix: str = "") -> None:
    legacy_path = next((path for path in source.files if path.startswith(prefix) and is_legacy_file(path)), None)
    if legacy_path is not None:
        raise UnsupportedError(
            "it is of Megatron-LM's legacy format (--ckpt-format torch), one file for each tensor and pipeline "
            f"parallel rank, which is not supported; load it with Megatron-LM and {_CONVERT_ADVICE} "
            f"(--ckpt-convert-format)",
            path=legacy_path,
        )
