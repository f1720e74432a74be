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
from itertools import combinations
from pathlib import Path

import pytest

from ckpt_tools.errors import CkptError
from fixtures.corpus import layouts, make
from tests.layouts.contents import Contents, contents

pytestmark = pytest.mark.extended

OPENED = [name for name, layout in layouts().items() if layout.opens_as is not None]

NUM_SAMPLED = 4
"""Damages of a layout in ``make test-all``; ``make soak`` does all to each file, and so many swaps."""

NUM_SWAPS = 200

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
    """Every damage to every file, or a sample of both."""
    rng = random.Random(seed)
    alone = [Damage(what, file) for file in files for what in ALONE]
    pairs = [(a, b) for a, b in combinations(sorted(files), 2) if Path(a).suffix == Path(b).suffix]
    swaps = [Damage("swapped", a, b) for a, b in rng.sample(pairs, min(NUM_SWAPS, len(pairs)))]
    yield from [*alone, *swaps] if soak else [*rng.sample(alone, min(NUM_SAMPLED - 1, len(alone))), *swaps[:1]]


_LAST_SHARD = ("*shard-00002-*", "if one after shard-00001-")
UNPROVABLE = {"dcp-hf-pieces": _LAST_SHARD, "torchtitan-hf": _LAST_SHARD}
"""Layouts of which a file can be missing without a trace, that file, and the note that says so."""

NAMELESS = ("__*_*.distcp", "zero/*/*.pt", "model/model/*/model_*.safetensors", "optimizer/optimizer_pp-*.pt")
"""Files of equal sizes that do not say which ones they are: the items of a DCP have neither names nor checksums, a
universal checkpoint and nanotron say the parameter in the name of the folder alone, and nanotron the ranks of an
optimizer in the name of the file. Swapped with another of its kind, such a file is that other."""


def is_nameless(damage: Damage, folder: Path) -> bool:
    """Whether nothing in two files that were swapped tells them apart."""
    files = (damage.file, damage.other)
    alike = any(all(fnmatchcase(file, f"*{kind}") for file in files) for kind in NAMELESS)
    is_of_rank = damage.file.endswith(".distcp") or "/optimizer_pp-" in damage.file or "_pp-rank-" in damage.file
    same_slot = is_of_rank or Path(files[0]).name == Path(files[1]).name
    return alike and same_slot and len({(folder / file).stat().st_size for file in files}) == 1


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
def test_no_damage_gives_another_content(name, tmp_path, pytestconfig):
    made = make(name)
    before = contents(made.source)[1]
    files = sorted(path.relative_to(made.folder).as_posix() for path in made.folder.rglob("*") if path.is_file())
    found: list[str] = []
    for number, damage in enumerate(damages(files, soak=bool(pytestconfig.getoption("--soak")), seed=name)):
        folder = tmp_path / str(number)
        shutil.copytree(made.folder, folder)
        damage.do(folder)
        if damage.other and is_nameless(damage, folder):
            shutil.rmtree(folder)
            continue
        problem = wrong(damage, made.layout.optional, before, outcome(name, damage, folder / made.layout.source))
        found += [] if problem is None else [f"{damage}: {problem}"]
        shutil.rmtree(folder)
    assert not found, "\n".join(found)
