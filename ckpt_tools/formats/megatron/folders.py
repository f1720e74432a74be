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
from ckpt_tools.core.wording import join_newest
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
    DATA,
    ITERATION,
    TRACKER,
    backend_of,
    is_legacy,
    torch_dist_folders,
)
from ckpt_tools.stores.source import Source

BACKEND = "torch_dist"

MAX_TRACKER_BYTES = 64
"""A number, or ``release``."""

_CONVERT = "save it with --ckpt-format torch_dist"


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of one checkpoint. ``prefix`` ends in a slash, or is empty."""

    source: Source
    prefix: str

    @property
    def metadata(self) -> str:
        return f"{self.prefix}{METADATA}"

    @property
    def common(self) -> str | None:
        """The file of the common state; since megatron-core 0.19 it is an item of the checkpoint instead."""
        path = f"{self.prefix}{COMMON_FILE}"
        return path if path in self.source.files else None

    @property
    def iteration(self) -> int | None:
        name = self.prefix or f"{self.source.store.url.rstrip('/')}/"
        found = ITERATION.fullmatch(name)
        return int(found[1]) if found is not None else None

    @property
    def files(self) -> frozenset[str]:
        """The files that dist_checkpointing writes, and the tracker where it chose the folder."""
        inside = {path: path[len(self.prefix) :] for path in self.source.files if path.startswith(self.prefix)}
        names = (METADATA, COMMON_FILE, CONFIG_FILE)
        own = {path for path, name in inside.items() if name in names or DATA.fullmatch(name)}
        return frozenset(own | ({TRACKER} & self.source.files.keys() if self.prefix else set()))

    def check(self) -> None:
        """Raises UnsupportedError for another backend, IncompleteError for a checkpoint that was not finished."""
        path = f"{self.prefix}{CONFIG_FILE}"
        if path not in self.source.files:
            message = "this file is missing, which megatron-core writes last: the checkpoint was not finished"
            raise IncompleteError(f"{message}; take an earlier one", path=path)
        backend = backend_of(self.source, path)
        if backend is None:
            raise MalformedError("it does not state how the tensors are stored (sharded_backend)", path=path)
        if backend != BACKEND:
            message = f"its tensors are stored as {backend!r:.80}, which is not supported"
            raise UnsupportedError(f"{message}; load it with Megatron and {_CONVERT}", path=path)
        if self.metadata not in self.source.files:
            raise IncompleteError("this file of the checkpoint is missing", path=self.metadata)

    def notes(self, used: Collection[str]) -> list[Note]:
        """Notes on files in the folder, or in the other half of a NeMo checkpoint, that are not read."""
        home = self.prefix.removesuffix("weights/")
        others = [path for path in self.source.files if path.startswith(home) and path not in used]
        tops = Counter(home + path[len(home) :].partition("/")[0] for path in others)
        return [note_unrelated_files(top, count) for top, count in tops.items() if top != TRACKER]


def find_folder(source: Source) -> Folder:
    """The checkpoint in ``source``. Raises SourceNotFoundError if there is none; UnsupportedError if there are several,
    or it is of a form that is not read; IncompleteError if it was not finished, or the tracker names one that is not
    there."""
    found = torch_dist_folders(source)
    chosen = _tracked(source, found) if TRACKER in source.files else None
    if chosen is None:
        _refuse_legacy(source)
        chosen = _only(source, found)
    folder = Folder(source, chosen)
    folder.check()
    return folder


def _tracked(source: Source, found: list[str]) -> str | None:
    text = source.read_all(TRACKER, limit_bytes=MAX_TRACKER_BYTES).decode("ascii", "replace").strip()
    if text != "release" and not text.isdecimal():
        raise MalformedError("it should contain the number of an iteration", path=TRACKER)
    name = "release/" if text == "release" else f"iter_{int(text):07d}/"
    if name not in found:
        _refuse_legacy(source, name)
        raise IncompleteError(f"it names {name}, which does not hold a checkpoint of megatron-core", path=TRACKER)
    return name


def _only(source: Source, found: list[str]) -> str:
    if not found:
        found = [path.removesuffix(METADATA) for path in source.files if f"/{path}".endswith(f"/{METADATA}")]
    if not found:
        raise SourceNotFoundError(f"there is no checkpoint of megatron-core in {source.store.url}")
    if len(found) > 1:
        names = join_newest([prefix.rstrip("/") or "the folder itself" for prefix in found])
        raise SeveralCheckpointsError(f"there are several checkpoints here ({names}); name the folder of one")
    return found[0]


def _refuse_legacy(source: Source, prefix: str = "") -> None:
    legacy = next((path for path in source.files if path.startswith(prefix) and is_legacy(path)), None)
    if legacy is not None:
        raise UnsupportedError(
            "it is of Megatron-LM's legacy format (--ckpt-format torch), one file for each tensor and pipeline "
            f"parallel rank, which is not supported; load it with Megatron-LM and {_CONVERT} (--ckpt-convert-format)",
            path=legacy,
        )
