"""A layout of which files are damaged, missing or copied: an error, or what was read before. Never another content with
exit code 0. What is read with a file less may be less where the layout lists the file as optional, or where a note says
so; and a bit of metadata that is flipped is found.
"""

import random
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import CkptError
from ckpt_tools.reading.checkpoint import read_source
from ckpt_tools.verification.integrity import check_integrity
from fixtures.corpus import layouts, make
from tests.end_to_end.fuzzing import corpus, target
from tests.layouts.contents import Contents, contents
from tests.layouts.sample import opened

pytestmark = [pytest.mark.extended, pytest.mark.timeout(3600)]

NUM_SAMPLED = 4
"""Damages of a layout in ``make test-all``; ``make soak`` does all to each file, and so many swaps."""

NUM_SWAPS = 200

CODES = {2, 3, 4, 5, 7}

ALONE: Mapping[str, Callable[[Path], object]] = {
    "hidden": lambda path: path.unlink(),
    "renamed": lambda path: path.rename(path.with_name(f"{path.stem}-old{path.suffix}")),
    "backed_up": lambda path: path.rename(path.with_name(f"{path.name}.bak")),
    "copied": lambda path: shutil.copy(path, path.with_name(f"{path.stem} (1){path.suffix}")),
    "shortened": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "halved": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
}


@dataclass(frozen=True, slots=True)
class Damage:
    """What is done to which file of a layout, and with which other one."""

    what: str
    file: str
    other: str = ""

    def do(self, folder: Path) -> None:
        if not self.other:
            ALONE[self.what](folder / self.file)
            return
        one, other = folder / self.file, folder / self.other
        data = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(data)


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def damages(files: Sequence[str], *, soak: bool, seed: str) -> Iterator[Damage]:
    rng = random.Random(seed)
    alone = [Damage(what, file) for file in files for what in ALONE]
    pairs = [(a, b) for a, b in combinations(sorted(files), 2) if Path(a).suffix == Path(b).suffix]
    swaps = [Damage("swapped", a, b) for a, b in rng.sample(pairs, min(NUM_SWAPS, len(pairs)))]
    yield from [*alone, *swaps] if soak else [*rng.sample(alone, min(NUM_SAMPLED - 1, len(alone))), *swaps[:1]]


_LAST_SHARD = ("*shard-00002-*", "if one after shard-00001-")
UNPROVABLE = {"dcp-hf-pieces": _LAST_SHARD, "torchtitan-hf": _LAST_SHARD}
"""Layouts of which a file can be missing without a trace, that file, and the note that says so."""

NAMELESS = ("__*_*.distcp", "zero/*/*.pt", "model/model/*/model_*.safetensors", "optimizer/optimizer_pp-*.pt")
"""Files with as many elements, which do not say which ones they are: the items of a DCP have neither names nor
checksums, a universal checkpoint and nanotron say the parameter in the name of the folder alone, and nanotron the ranks
of an optimizer in the name of the file. Swapped with another of its kind, such a file is that other."""


def is_nameless(damage: Damage, folder: Path) -> bool:
    """Whether nothing in two files that were swapped tells them apart."""
    files = (damage.file, damage.other)
    alike = any(all(fnmatchcase(file, f"*{kind}") for file in files) for kind in NAMELESS)
    is_of_rank = damage.file.endswith(".distcp") or "/optimizer_pp-" in damage.file or "_pp-rank-" in damage.file
    same_slot = is_of_rank or Path(files[0]).name == Path(files[1]).name
    return alike and same_slot and len({num_element_bytes(folder / file) for file in files}) == 1


def num_element_bytes(path: Path) -> int:
    """The size of a file; of one of torch, that of its storages: beside them is the same, or no name (``cat_dim``)."""
    if not zipfile.is_zipfile(path):
        return path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        return sum(each.file_size for each in archive.infolist() if "/data/" in each.filename)


def problem_of_damage(name: str, damage: Damage, source: Path, before: Contents) -> str | None:
    try:
        manifest, after = contents(source)
    except CkptError as error:
        return None if error.exit_code in CODES and str(error) else f"exit code {error.exit_code}: {error}"
    file, note = UNPROVABLE.get(name, ("", ""))
    if file and fnmatchcase(damage.file, file) and any(note in each.why for each in manifest.notes):
        return None
    is_optional = any(fnmatchcase(damage.file, pattern) for pattern in layouts()[name].optional)
    if after == before or (is_optional and after.items() < before.items()):
        return None
    differing = [key for key in {*before, *after} if before.get(key) != after.get(key)]
    return f"{len(differing)} tensors differ, such as {differing[0]}"


@pytest.mark.parametrize("name", opened())
def test_no_damage_gives_another_content(name, tmp_path, pytestconfig):
    made = make(name)
    before = contents(made.source)[1]
    found: list[str] = []
    soak = bool(pytestconfig.getoption("--soak"))
    for number, damage in enumerate(damages(files_in(made.folder), soak=soak, seed=name)):
        folder = shutil.copytree(made.folder, tmp_path / str(number))
        damage.do(folder)
        if not (damage.other and is_nameless(damage, folder)):
            problem = problem_of_damage(name, damage, folder / made.layout.source, before)
            found += [] if problem is None else [f"{damage}: {problem}"]
        shutil.rmtree(folder)
    assert not found, "\n".join(found)


# Flipped bits


METADATA = {
    "dcp": (".metadata", ()),
    "dcp_flattened": (".metadata", ("names", "values")),
    "zstd": (".metadata", ()),
    "megatron": ("*", ("names", "values")),
    "torch": ("*", ()),
    "torch_sharded": ("*.bin", ()),
    "zero1": ("*_states.pt", ()),
    "universal": ("*.pt", ()),
    "sharded": ("*.pt", ()),
    "npz": ("*", ()),
    "safetensors": ("*", ("names", "dtype", "values")),
    "safetensors_sharded": ("*", ("names", "dtype", "values")),
    "safetensors_state": ("*", ("names", "dtype", "values")),
    "gguf": ("*", ("names", "dtype", "values", "tensors")),
}
"""Files of each checkpoint that are flipped, and the changes that nothing in the format shows."""


def headers(name: str, path: str, data: bytes) -> range:
    """Bytes before the tensors, which a format without checksums does not protect."""
    if path.endswith(".safetensors"):
        return range(8 + int.from_bytes(data[:8], "little"))
    return range(300) if name == "gguf" else range(len(data))


def flips(name: str, files: Mapping[str, bytes], *, soak: bool) -> Iterator[dict[str, bytes]]:
    """One bit of every byte, or of 60."""
    pattern, _ = METADATA[name]
    rng = random.Random(name)
    places = [
        (path, at) for path, data in files.items() if fnmatchcase(path, pattern) for at in headers(name, path, data)
    ]
    for path, at in places if soak else rng.sample(places, min(60, len(places))):
        data = bytearray(files[path])
        data[at] ^= 1 << rng.randrange(8)
        yield {**files, path: bytes(data)}


def verified(files: Mapping[str, bytes]) -> tuple[Any, ...]:
    """What is read after plain ``verify`` has found nothing. Raises CkptError if it finds something."""
    with target.opened(files) as source:
        source, manifest = read_source(source, ReadOptions())
        report = check_integrity(source, manifest, num_workers=1, on_progress=lambda done, total: None)
        if not report.equal:
            raise CkptError("verify says so")
        try:
            elements = target.elements_of(source.store, manifest)
        except CkptError as error:
            pytest.fail(f"verify finds nothing, and reading does: {error}")
    tensors = {key: (entry.dtype.value, entry.shape, elements[tuple(key)]) for key, entry in manifest.tensors.items()}
    return tensors, (dict(manifest.aliases), repr(manifest.groups), repr(manifest.extra), manifest.step)


def differences(before: tuple[Any, ...], after: tuple[Any, ...]) -> Iterator[str]:
    ours, theirs = (list(found.values()) for found, _ in (before, after))
    if Counter(each[2] for each in ours) != Counter(each[2] for each in theirs):
        yield "tensors"
    elif Counter(each for each in ours if each[2]) != Counter(each for each in theirs if each[2]):
        yield "dtype"
    if before[0].keys() != after[0].keys():
        yield "names"
    if before[1] != after[1]:
        yield "values"


@pytest.mark.parametrize("name", METADATA)
def test_a_flip_of_metadata_is_found_or_named(name, pytestconfig):
    """Refused by plain ``verify``, without effect, or of a kind that docs/trust.md names. The checkpoints are those of
    the fuzzer: a small one of each format, in memory."""
    files = corpus.seeds()[name]
    before = verified(files)
    found: Counter[str] = Counter()
    for changed in flips(name, files, soak=bool(pytestconfig.getoption("--soak"))):
        try:
            found.update(differences(before, verified(changed)))
        except CkptError:
            found["refused"] += 1
    assert found.pop("refused") > 0
    assert found.keys() <= {*METADATA[name][1]}, found
