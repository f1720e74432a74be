"""A damaged layout is an error, or exactly what it was: never another content with exit code 0.

One file of a layout is hidden, renamed, copied beside itself, cut off, or swapped with another of its kind. What is
read then has to be what was read before. Files that match the layout's ``optional`` patterns may take tensors with
them.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from ckpt_tools.errors import CkptError
from fixtures.corpus import layouts, make
from tests.layouts.contents import Contents, contents

OPENED = [name for name, layout in layouts().items() if layout.opens_as is not None]

NUM_FILES = 3
"""In a sample; with ``--soak`` all."""

CODES = {2, 3, 4, 5, 7}


def hidden(path: Path) -> None:
    path.unlink()


def renamed(path: Path) -> None:
    path.rename(path.with_name(f"{path.stem}-old{path.suffix}"))


def backed_up(path: Path) -> None:
    path.rename(path.with_name(f"{path.name}.bak"))


def copied(path: Path) -> None:
    shutil.copy(path, path.with_name(f"{path.stem} (1){path.suffix}"))


def shortened(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


ALONE: Mapping[str, Callable[[Path], None]] = {
    each.__name__: each for each in (hidden, renamed, backed_up, copied, shortened, halved, emptied)
}


@dataclass(frozen=True, slots=True)
class Damage:
    """What is done to which file of a layout, and with which other one."""

    what: str
    file: str
    other: str = ""

    def do(self, folder: Path) -> None:
        if self.other:
            swap(folder / self.file, folder / self.other)
        else:
            ALONE[self.what](folder / self.file)


def swap(one: Path, other: Path) -> None:
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def damages(files: Sequence[str], *, soak: bool, seed: str) -> Iterator[Damage]:
    """Every damage of a sample of files, or of all."""
    rng = random.Random(seed)
    chosen = files if soak else sorted(rng.sample(files, min(NUM_FILES, len(files))))
    for file in chosen:
        yield from (Damage(what, file) for what in ALONE)
        kind = [each for each in files if Path(each).suffix == Path(file).suffix and each != file]
        for other in (each for each in kind if each > file) if soak else rng.sample(kind, min(1, len(kind))):
            yield Damage("swapped", file, other)


_LAST_SHARD = ("*shard-00002-*", "if one after shard-00001-")
UNPROVABLE = {"dcp-hf-pieces": _LAST_SHARD, "torchtitan-hf": _LAST_SHARD}
"""Layouts of which a file can be missing without a trace, that file, and the note that says so."""


def outcome(name: str, damage: Damage, source: Path) -> Contents | CkptError | None:
    """What is read; None if the loss cannot be seen and a note says so."""
    try:
        manifest, found = contents(source)
    except CkptError as error:
        return error
    file, note = UNPROVABLE.get(name, ("", ""))
    is_told = bool(file) and any(note in each.why for each in manifest.notes)
    return None if is_told and fnmatchcase(damage.file, file) else found


def wrong(damage: Damage, optional: Sequence[str], before: Contents, after: Contents | CkptError | None) -> str | None:
    """What is wrong with the outcome, if anything is."""
    if after is None:
        return None
    if isinstance(after, CkptError):
        return None if after.exit_code in CODES and str(after) else f"exit code {after.exit_code}: {after}"
    if after == before:
        return None
    is_optional = any(fnmatchcase(damage.file, pattern) for pattern in optional)
    if is_optional and after.items() < before.items():
        return None
    differing = [key for key in {*before, *after} if before.get(key) != after.get(key)]
    return f"{len(differing)} tensors differ, such as {differing[0]}"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", OPENED)
def test_no_damage_gives_another_content(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    made = make(name)
    before = contents(made.source)[1]
    files = sorted(path.relative_to(made.folder).as_posix() for path in made.folder.rglob("*") if path.is_file())
    found: list[str] = []
    for number, damage in enumerate(damages(files, soak=bool(pytestconfig.getoption("--soak")), seed=name)):
        folder = tmp_path / str(number)
        shutil.copytree(made.folder, folder)
        damage.do(folder)
        problem = wrong(damage, made.layout.optional, before, outcome(name, damage, folder / made.layout.source))
        found += [] if problem is None else [f"{damage}: {problem}"]
        shutil.rmtree(folder)
    assert not found, "\n".join(found)
