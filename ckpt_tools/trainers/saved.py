"""A checkpoint in its run: what its name says, its files by name, and small files that rules read. Nothing is opened.

Trainers name a checkpoint by its step, iteration or epoch: ``checkpoint-500``, ``global_step500``, ``step-100``,
``iter_0000010``, ``epoch_1_step_200``, ``ep1-ba20``, ``epoch=1-step=242.ckpt``. Unfinished saves have names that say
so: ``tmp-checkpoint-14``, ``.epoch_3.partial``. Which folders and files are checkpoints, ``run_folders`` finds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ckpt_tools.messages.wording import natural_sort_key

if TYPE_CHECKING:
    from ckpt_tools.stores.source import Source

RUN_ITSELF = "."
"""The name of the run if it is itself one checkpoint."""

MAX_JSON_BYTES = 256 << 20
MAX_NAME_BYTES = 4096

_KEY = r"(?:global[-_]?step|step|iter(?:ation)?|checkpoint|ckpt|epoch|ep|batch|ba)"
_NUMBER = rf"{_KEY}[-_=]?\d{{1,15}}"
_METRIC = r"[A-Za-z][\w/]{0,60}=[-+\d.eE]{1,30}"
_CHECKPOINT_NAME = re.compile(
    rf"(?:[A-Za-z][\w.]{{0,80}}?[-_.=])??(?:{_METRIC}[-_,]{{1,2}}){{0,4}}{_NUMBER}(?:[-_.=,]{{0,2}}{_NUMBER}|[-_,]{_METRIC}"
    r"|-v\d{1,6}|[-_]rank[-_]?\d{1,6}|_universal)*(?:-last)?(?:\.ckpt)?",
    re.IGNORECASE,
)
_LEADING_METRIC = re.compile(rf"(?<![\w/])(?!{_NUMBER}[-_,])(?:{_METRIC}[-_,]{{1,2}})")
"""A metric before the number, which does not say which checkpoint is later."""

_STEP = re.compile(
    r"(?:^|[^a-z])(?:(?:global[-_]?)?step|iter(?:ation)?|checkpoint|ckpt|ba)[-_=]?0*(\d+)", re.IGNORECASE
)
_UNFINISHED_NAME = re.compile(
    r"(?P<head>\.|_?tmp[-_.]|)(?P<core>.+?)(?P<tail>\.(?:partial|tmp|incomplete|unfinished)|\.orbax-checkpoint-tmp.*|)"
)
SINGLE_FILE = re.compile(r"(?P<stem>.+)\.(?P<suffix>pt|pth|ckpt|bin|safetensors)")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of ``run``: ``name`` is its path there, ``run_files`` are its files by their paths there. One that
    is a file has that path itself."""

    run: Source
    name: str
    run_files: Mapping[str, int]
    is_finished: bool = True
    """False if its name says that it is being written, or was when its saver was killed."""
    folder_name: str = ""
    """The name of the folder, if the run is itself one checkpoint and ``name`` is ``.``."""

    @property
    def base_name(self) -> str:
        """The last part of its path."""
        return self.folder_name or self.name.rpartition("/")[2]

    @property
    def is_file(self) -> bool:
        return self.name in self.run_files

    @property
    def is_run(self) -> bool:
        """Whether the run is itself this checkpoint."""
        return self.name == RUN_ITSELF

    @cached_property
    def root(self) -> str:
        """The folder of its files in the run."""
        return get_parent_folder(self.name) if self.is_file else "" if self.is_run else self.name

    @cached_property
    def files(self) -> Mapping[str, int]:
        """Its files by their paths below ``root``."""
        skipped = len(self.root) + 1 if self.root else 0
        return {path[skipped:]: size for path, size in self.run_files.items()}

    @property
    def file_names(self) -> frozenset[str]:
        """Names of its files without their folders."""
        return frozenset(path.rpartition("/")[2] for path in self.run_files)

    @cached_property
    def step(self) -> int | None:
        """The step that its name says, or the one of the folders in it."""
        folders = sorted({get_parent_folder(path) for path in self.run_files}, key=len)
        steps = map(parse_step, (self.folder_name or self.name, *folders))
        return next((step for step in steps if step is not None), None)

    @property
    def is_numbered(self) -> bool:
        """Whether its name says a step, an iteration or an epoch."""
        return is_checkpoint_name(self._plain_name)

    @property
    def step_key(self) -> str:
        """Its numbers, which are those of the other files of the same step too."""
        return " ".join(re.findall(r"\d+", self._plain_name))

    @property
    def _plain_name(self) -> str:
        core = strip_unfinished_marks(self.base_name)
        match = SINGLE_FILE.fullmatch(core) if self.is_file else None
        return core if match is None else match["stem"]

    @property
    def sort_key(self) -> tuple[bool, list[tuple[int, str]]]:
        """Later ones are larger. Names without a number come before all others."""
        parts = (_LEADING_METRIC.sub("", strip_unfinished_marks(part)) for part in self.name.split("/"))
        return self.is_numbered, natural_sort_key("/".join(parts))

    @property
    def source(self) -> Source:
        """Its files alone."""
        from ckpt_tools.stores.wrappers import open_subfolder

        return open_subfolder(self.run, self.root, self.files)

    def path_in_run(self, inner_path: str) -> str:
        return f"{self.root}/{inner_path}" if self.root else inner_path

    def read_file(self, inner_path: str, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
        return self.run.read_all(self.path_in_run(inner_path), limit_bytes=limit_bytes)

    def get_archive_arguments(self, inner_path: str) -> tuple[Callable[[int, int], bytes], int, str]:
        """Arguments for ``open_archive`` and ``read_directory``."""
        path = self.path_in_run(inner_path)
        return (lambda start, stop: self.run.read(path, start, stop)), self.files[inner_path], inner_path

    def find_sibling(self, name: str) -> str | None:
        """Path in the run of a file next to the checkpoint, if it exists."""
        path = f"{get_parent_folder(self.name)}/{name}".lstrip("/")
        return path if path in self.run.files and not self.is_run else None

    def read_run_file(self, path: str) -> bytes:
        """The content of a JSON file of the run, of at most ``MAX_JSON_BYTES``."""
        return self.run.read_all(path, limit_bytes=MAX_JSON_BYTES)

    def read_json_object(self, path: str) -> Mapping[str, Any]:
        """The JSON object of a file of the run; empty if it is another value. Raises FormatError."""
        from ckpt_tools.serialization.strict_json import parse_json

        content = parse_json(self.read_run_file(path), path)
        return content if isinstance(content, dict) else {}

    def read_sibling_line(self, name: str) -> str | None:
        """The one line of a small file next to the checkpoint, if it exists."""
        path = self.find_sibling(name)
        return None if path is None else read_name_line(self.run, path)


def read_name_line(run: Source, path: str) -> str:
    """The name of a checkpoint in a file, without spaces and slashes around it."""
    return run.read_all(path, limit_bytes=MAX_NAME_BYTES).decode(errors="replace").strip().strip("/")


def parse_step(folder: str) -> int | None:
    """The step that the last name with one says: 242 of ``epoch=1-step=242``, 1000 of Orbax' ``1000``."""
    name = strip_unfinished_marks(folder.rpartition("/")[2])
    if name.isdecimal() and name.isascii():
        return int(name[:18])
    steps = _STEP.findall(folder)
    return int(steps[-1][:18]) if steps else None


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder's name is that of a checkpoint: it says a step, an iteration or an epoch."""
    return _CHECKPOINT_NAME.fullmatch(name) is not None or (name.isdecimal() and name.isascii())


def strip_unfinished_marks(name: str) -> str:
    """``checkpoint-14`` of ``tmp-checkpoint-14``."""
    match = _UNFINISHED_NAME.fullmatch(name)
    return name if match is None else match["core"]


def is_unfinished_name(name: str) -> bool:
    return name != strip_unfinished_marks(name)


def get_parent_folder(path: str) -> str:
    return path.rpartition("/")[0]


def iter_folder_chain(folder: str) -> Iterator[str]:
    """``a``, ``a/b`` and ``a/b/c`` of the last."""
    return accumulate(folder.split("/"), "{}/{}".format) if folder else iter(())
