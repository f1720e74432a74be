"""A run's folder: the checkpoints in it, and which of them ``RUN@latest``, ``RUN@step=N`` or ``RUN@NAME`` means.

A folder is a checkpoint here if a reader recognises the files that lie directly in it. Folders in which savers write
what is not finished do not count: hidden ones, those that end in ``.partial`` or ``.tmp``, those that begin with
``tmp``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import accumulate
from pathlib import Path

from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.wording import natural, newest
from ckpt_tools.errors import CkptError, SourceNotFoundError
from ckpt_tools.formats.registry import reader_for, readers
from ckpt_tools.formats.trainer_files import with_trainer_files
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source

Opened = Callable[[str | Path], Source]

LATEST = "latest"
"""The name of the newest checkpoint. In DeepSpeed's folders a file of this name says which one that is."""

_NAMING = frozenset({LATEST, "latest_universal"})

_UNFINISHED = re.compile(r"\.|tmp[-_.]|.*\.(partial|tmp)$")

_HALF = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
"""Two folders of accelerate and transformers, which are one checkpoint."""

_STEP = re.compile(r"(?:^|[^a-z])(?:global_?)?(?:step|iter|checkpoint)[-_=]?0*(\d+)", re.IGNORECASE)


def resolved(url: str | Path, opened: Opened) -> str | Path:
    """``url``; or the checkpoint that it means, if it is a run and a name behind ``@``, and nothing is called so.

    Raises:
        SourceNotFoundError: the run holds no such checkpoint. CkptError: as ``opened`` raises.
    """
    run, _, name = str(url).rpartition("@")
    if not _is_folder(run) or not name:
        return url
    run = run.rstrip("/") or run
    try:
        opened(url)
    except SourceNotFoundError as error:
        try:
            source = opened(run)
        except SourceNotFoundError:
            raise error from None
        return _chosen(run, name.strip("/"), source, opened)
    return url


def _is_folder(url: str) -> bool:
    """Whether it can be one: the user of ``https://user@host`` is not."""
    _, is_url, path = url.partition("://")
    return "/" in path if is_url else bool(url)


def checkpoints(files: Iterable[str]) -> list[str]:
    """The folders of checkpoints in a run whose files are ``files``, the newest first by the numbers in their names.

    A folder with a number that holds one checkpoint stands for it: ``epoch_12`` for ``epoch_12/global_step264``.
    """
    found = _folders(files)
    return sorted({_outermost(folder, found) for folder in found}, key=natural, reverse=True)


def proposal(source: Source) -> str:
    """The end of a message that several checkpoints were found: how to name one; nothing if that does not help."""
    found, url = checkpoints(source.files), source.store.url
    return f", or write {url}@{LATEST} or {url}@{found[0]}" if len(found) > 1 else ""


def _chosen(run: str, name: str, source: Source, opened: Opened) -> str:
    found = checkpoints(source.files)
    if not found:
        raise SourceNotFoundError(f"there is no file or folder {run}@{name}, and {run} holds no folders of checkpoints")
    if name == LATEST:
        return run if _NAMING & source.files.keys() else f"{run}/{found[0]}"
    step = re.fullmatch(r"step=(\d{1,18})", name)
    if step is not None:
        chosen = list(_of_step(run, int(step[1]), source.files, found, opened))
    else:
        chosen = _holding(found, lambda folder: f"/{folder}".endswith(f"/{name}"), source.files)
    if len(chosen) == 1:
        return f"{run}/{chosen[0]}"
    problem = f"several checkpoints {name!r} ({newest(chosen)})" if chosen else f"no checkpoint {name!r}"
    raise SourceNotFoundError(f"{run} has {problem}; it has {newest(found)}")


def _of_step(run: str, step: int, files: Iterable[str], found: list[str], opened: Opened) -> Iterator[str]:
    """The checkpoints whose names say that step; if none does, those that say so themselves."""
    named = _holding(found, lambda folder: _step_in(folder) == step, files)
    yield from named or (folder for folder in found if _step_of(opened, f"{run}/{folder}") == step)


def _holding(found: list[str], is_meant: Callable[[str], bool], files: Iterable[str]) -> list[str]:
    """Those of ``found`` that are meant, by their own name or by that of the folder of their files."""
    inner = _folders(files)
    return [
        folder
        for folder in found
        if is_meant(folder) or any(is_meant(each) for each in inner if each.startswith(f"{folder}/"))
    ]


def _step_in(folder: str) -> int | None:
    """The step that the last name with one says: 242 of ``epoch=1-step=242``."""
    steps = _STEP.findall(folder)
    return int(steps[-1][:18]) if steps else None


def _step_of(opened: Opened, url: str) -> int | None:
    """The step that a checkpoint says; None if it does not, or cannot be read."""
    try:
        source = opened(url)
        return with_trainer_files(reader_for(source, None).read_manifest(source, ReadOptions()), source).step
    except CkptError:
        return None


def _folders(files: Iterable[str]) -> frozenset[str]:
    """Every folder that is a checkpoint and does not lie in another, but for the run itself."""
    inside: dict[str, list[str]] = {}
    for path in files:
        folder, _, name = path.rpartition("/")
        inside.setdefault(folder, []).append(name)
    found = {folder for folder, names in inside.items() if folder and _is_finished(folder) and _is_checkpoint(names)}
    found -= {_parent(each) for each in found if _has_number(each) and not _has_number(_parent(each))}
    return frozenset(_whole(folder) for folder in found if not found.intersection(list(_path(folder))[:-1]))


def _is_finished(folder: str) -> bool:
    return not any(_UNFINISHED.match(name) for name in folder.split("/"))


def _is_checkpoint(names: Collection[str]) -> bool:
    source = Source(MemoryStore({}), dict.fromkeys(names, 0))
    return any(reader.detect(source) for reader in readers().values())


def _path(folder: str) -> Iterator[str]:
    """``a``, ``a/b`` and ``a/b/c`` of the last."""
    return accumulate(folder.split("/"), "{}/{}".format)


def _parent(folder: str) -> str:
    return folder.rpartition("/")[0]


def _has_number(folder: str) -> bool:
    return re.search(r"\d", folder.rpartition("/")[2]) is not None


def _whole(folder: str) -> str:
    return _parent(folder) or folder if _HALF.fullmatch(folder.rpartition("/")[2]) else folder


def _outermost(folder: str, found: frozenset[str]) -> str:
    parent = _parent(folder)
    is_alone = sum(each.startswith(f"{parent}/") for each in found) == 1
    return _outermost(parent, found) if is_alone and _has_number(parent) else folder
