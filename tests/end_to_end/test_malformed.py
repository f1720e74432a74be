"""Damaged and hostile checkpoints of every format: each ends with its named error, or is read as its own library does.

The files are made by class in ``malformed``, from checkpoints that the libraries themselves wrote. None may take
more memory than its bound, run into a loop, or have an element of a tensor read before it is refused. Time is the
processor's, and its bound is generous: it tells a loop from a slow machine, and no more.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import (
    CkptError,
    FormatError,
    IncompleteError,
    MalformedError,
    SourceNotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ckpt_tools.formats.index import find_format, read_manifest
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source
from tests.end_to_end.fuzzing.seeds import SEEDS, DcpFolder, saved, torch_bytes
from tests.end_to_end.fuzzing.target import Outcome, execute
from tests.end_to_end.malformed import carriers, dcp, deepspeed, headers, judges, tensors, truncated, zips
from tests.end_to_end.malformed.case import HOSTILE_NAMES, Case, seed
from tests.formats.deepspeed import zero_files

Made = Callable[[], Iterator[Case]]

CLASSES: dict[str, Made] = {
    "truncated": truncated.cases,
    "headers": headers.cases,
    "zips": zips.cases,
    "tensors": tensors.cases,
    "dcp": dcp.cases,
    "deepspeed": deepspeed.cases,
    "carriers": carriers.cases,
}

HANG_SECONDS = 10.0
"""Of processor time for one file, where the slowest takes a fifth of a second."""

MAX_MEMORY_BYTES = 64 << 20
"""Beyond the files themselves."""

MAX_MESSAGE_CHARS = 1700
"""A message, and the path and key before it, each cut where a checkpoint makes them long."""

INNER = re.compile(
    r"Opaque|GlobalRef|StorageRef|StoredTensor|ShardTable|MetadataIndex|Box\(|DType\.|Traceback|<class|<function"
    r"|object at|0x[0-9a-f]{6}|self\.|__init__|positional argument|'[A-Za-z]+' object"
)
"""Of classes of ours, and of the interpreter: a user of the command line knows neither."""

WRONG_PLURAL = re.compile(
    r"(?<![\w.,-])1 (?:bytes|files|tensors|elements|ranks|tasks|items|shards|groups|records|parameters|partitions)\b"
)

STRICTER = {
    "zip field": "torch looks at the local headers of records too that hold no tensor",
    "gap": "torch wants a version in every archive",
    "record missing": "torch wants a version in every archive",
    "record too long": "torch reads the archive's alignment, on which nothing depends",
    "path": "torch's loader wants names that spell their paths",
    "path of the wrong kind": "torch's loader wants names that spell their paths",
}
"""Rules of which the libraries ask for more than is needed to read the same tensors."""


@dataclass
class Verdicts:
    """What came of the cases of a class."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    memory_bytes: int = 0

    def add(self, case: Case, folder: Path) -> None:
        before, begun = _peak_bytes(), time.process_time()
        try:
            outcome = execute(case.files)
        except Exception as error:
            self.problems.append(f"{case}: {type(error).__name__}: {error}")
            return
        self._measure(case, time.process_time() - begun, _peak_bytes() - before)
        problem = _refused(case, outcome.error) if outcome.error else _read(case, outcome, folder)
        self.counts[case.family] += 1
        self.problems += [f"{case}: {problem}"] if problem else []

    def _measure(self, case: Case, seconds: float, memory_bytes: int) -> None:
        self.seconds = max(self.seconds, seconds)
        self.memory_bytes = max(self.memory_bytes, memory_bytes)
        if seconds > HANG_SECONDS:
            self.problems.append(f"{case}: it took {seconds:.1f} s")
        if memory_bytes > MAX_MEMORY_BYTES:
            self.problems.append(f"{case}: it took {memory_bytes:,} bytes")


def _peak_bytes() -> int:
    """The most that the process ever held; it grows where something takes more than anything before."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _refused(case: Case, error: CkptError) -> str | None:
    text = str(error)
    if not isinstance(error, case.errors):
        return f"{type(error).__name__} instead of {case.errors}: {text[:200]}"
    if "\n" in text or not 8 < len(text) <= MAX_MESSAGE_CHARS:
        return f"no sentence: {text[:200]!r}"
    if found := INNER.search(text) or WRONG_PLURAL.search(text):
        return f"{found[0]!r} in {text[:200]!r}"
    return None if error.path or "memory://" in text else f"no file: {text[:200]!r}"


def _read(case: Case, outcome: Outcome, folder: Path) -> str | None:
    """Why this should not have been read so."""
    if case.must_fail:
        return "it was read"
    if case.family in carriers.CARRIERS:
        return carriers.judge(case, outcome)
    if case.family not in ("safetensors", "torch", "dcp") or "bomb" in case.rule:
        return None
    try:
        theirs = judges.read(case.family, case.files, folder)
    except judges.RefusedError as error:
        return None if case.rule in STRICTER else f"read, and the library refuses it: {error!s:.300}"
    return None if theirs <= _described(outcome) else "read otherwise than by the library"


def _described(outcome: Outcome) -> judges.Read:
    assert outcome.manifest is not None, "it was read"
    entries = outcome.manifest.tensors
    return {
        (entries[StateKey(*key)].dtype.value, entries[StateKey(*key)].shape, elements)
        for key, elements in outcome.elements.items()
    }


@pytest.fixture
def traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


SEEN: Counter[str] = Counter()


@pytest.mark.parametrize("name", CLASSES)
def test_each_is_refused_by_name_or_read_as_its_library_reads_it(name, tmp_path):
    execute(seed("torch"))
    verdicts = Verdicts()
    for number, case in enumerate(CLASSES[name]()):
        verdicts.add(case, tmp_path / str(number))
    SEEN.update(verdicts.counts)
    print(f"{name}: {dict(verdicts.counts)}, at most {verdicts.seconds:.3f} s and {verdicts.memory_bytes:,} bytes")
    assert not verdicts.problems, f"{len(verdicts.problems)}:\n" + "\n".join(verdicts.problems[:40])


def test_there_are_enough_of_every_format():
    assert sum(SEEN.values()) >= 2000 or not SEEN
    assert all(count >= 200 for count in SEEN.values())


@pytest.mark.parametrize("name", SEEDS)
def test_what_they_are_made_from_is_read(name):
    outcome = execute(seed(name))
    assert outcome.error is None and outcome.elements


# No element is read before the refusal

BIG = 1 << 20
"""Elements of a tensor so large that reading it would be seen."""


class Counting(MemoryStore):
    """Counts the bytes asked of it."""

    num_bytes = 0

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        type(self).num_bytes += len(buffer)
        super().read_into(path, start, buffer)


def _broken_dcp() -> dict[str, bytes]:
    folder = DcpFolder()
    folder.add_tensor(("a",), torch.zeros(BIG, 1), [0, BIG // 2])
    folder.metadata.state_dict_metadata["a"].chunks.pop()
    return folder.saved()


def _broken_zero(stage: int) -> dict[str, bytes]:
    files = zero_files.build(stage, 2, [{"a": (BIG,), "b": (3,)}])
    zero_files.own(files, 1)["partition_count"] = 3
    return saved(files)


def _broken_universal() -> dict[str, bytes]:
    tag = zero_files.TAG
    model = zero_files.build(1, 1, [{"a": (BIG,)}])[zero_files.MODEL]
    state = {"param_groups": [{"params": [0]}]}
    files = {zero_files.MODEL: model, f"{tag}/zero/optimizer_state.pt": state}
    return saved(files | {f"{tag}/zero/a/fp32.pt": {"param": torch.zeros(BIG - 1)}})


BROKEN: dict[str, Callable[[], dict[str, bytes]]] = {
    "safetensors": lambda: {
        "x.safetensors": headers.packed({"a": headers.good()["a"] | {"shape": [BIG]}}, bytes(4 * BIG))
    },
    "torch": lambda: {"x.pt": torch_bytes({"a": torch.zeros(BIG)}).replace(b"PK\1\2", b"PK\1\3", 1)},
    "two shards": lambda: {f"m-0000{n}-of-00002.bin": torch_bytes({"a": torch.zeros(BIG)}) for n in (1, 2)},
    "dcp": _broken_dcp,
    "zero1": lambda: _broken_zero(1),
    "zero3": lambda: _broken_zero(3),
    "universal": _broken_universal,
}


@pytest.mark.parametrize("name", BROKEN)
def test_no_element_is_read_before_the_refusal(name):
    files = {path: bytearray(data) for path, data in BROKEN[name]().items()}
    source = Source.open(Counting(files))
    Counting.num_bytes = 0
    with pytest.raises(FormatError):
        read_manifest(find_format(source), source, ReadOptions())
    assert Counting.num_bytes < sum(map(len, files.values())) / 8


# On a disk


def written(folder: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return folder


def _read_all(folder: Path) -> None:
    checkpoint = ckpt_tools.open(folder)
    for key in checkpoint.manifest.tensors:
        checkpoint.state(*key)[...]


def refused(folder: Path, *errors: type[CkptError]) -> str:
    """The message of opening and reading it through; the processor's time is bounded."""
    begun = time.process_time()
    with pytest.raises(errors) as caught:
        _read_all(folder)
    assert time.process_time() - begun < HANG_SECONDS
    return str(caught.value)


LINKED = {
    "safetensors": "model.safetensors",
    "torch": "model.pt",
    "torch_sharded": "pytorch_model-00001-of-00002.bin",
    "safetensors_sharded": "model-00002-of-00002.safetensors",
    "dcp": "__0_0.distcp",
    "zero1": zero_files.optim(1),
    "zero3": zero_files.rank_model(1),
    "universal": f"{zero_files.TAG}/zero/a.bias/fp32.pt",
}
"""A file of each format that the checkpoint does not do without."""


@pytest.mark.parametrize("name", LINKED)
@pytest.mark.parametrize("target", ["outside", "relative", "/etc/passwd", "/dev/zero", "/dev/stdin", "itself", "no"])
def test_links_that_lead_out_are_not_followed(name, target, tmp_path):
    folder = written(tmp_path / "checkpoint", dict(seed(name)))
    path = folder / LINKED[name]
    outside = tmp_path / "outside"
    path.rename(outside)
    places = {"outside": outside, "relative": Path(os.path.relpath(outside, path.parent)), "itself": path.name}
    path.symlink_to(places.get(target, Path(target) if target.startswith("/") else "no-such-file"))
    refused(folder, UnsafeError, FormatError, SourceNotFoundError)


@pytest.mark.parametrize("name", LINKED)
@pytest.mark.parametrize("kind", ["pipe", "socket", "folder"])
def test_what_is_no_file_is_not_opened(name, kind, tmp_path):
    folder = written(tmp_path / "c", dict(seed(name)))
    path = folder / LINKED[name]
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        _bind(path)
    refused(folder, FormatError, SourceNotFoundError)


def _bind(path: Path) -> None:
    """A socket at ``path``, by a short name: addresses have at most 107 bytes."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def test_a_linked_folder_is_not_entered(tmp_path):
    files = dict(seed("universal"))
    written(tmp_path / "outside", {path.rpartition("/")[2]: data for path, data in files.items() if "/a.bias/" in path})
    inside = {path: data for path, data in files.items() if "/a.bias/" not in path}
    folder = written(tmp_path / "c", inside)
    (folder / zero_files.TAG / "zero" / "a.bias").symlink_to(tmp_path / "outside")
    refused(folder, IncompleteError)


@pytest.mark.parametrize("name", ["zero1", "universal"])
@pytest.mark.parametrize("hostile", [name for name in HOSTILE_NAMES if "\0" not in name])
def test_latest_chooses_no_folder_outside(name, hostile, tmp_path):
    written(tmp_path, {path.replace(zero_files.TAG, "x"): data for path, data in seed(name).items()})
    folder = written(tmp_path / "checkpoint", dict(seed(name)))
    next(folder.glob("latest*")).write_text(hostile)
    refused(folder, UnsafeError)


SPARSE = {
    "model.safetensors": struct.pack("<Q", 2**60),
    "x.safetensors": struct.pack("<Q", 100_000_000) + b"{",
    "model.pt": b"PK\3\4",
    "model.safetensors.index.json": b"{",
    "pytorch_model.bin.index.json": b"[",
    ".metadata": b"\x80\x04",
    "latest": b"x",
}


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.usefixtures("traced")
def test_a_terabyte_of_nothing_is_not_read(name, tmp_path):
    """A file with holes costs its maker nothing."""
    folder = written(tmp_path / "c", dict(seed("zero1")) if name == "latest" else {})
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(SPARSE[name])
    os.truncate(folder / name, 1 << 40)
    tracemalloc.reset_peak()
    refused(folder, FormatError)
    # A header of a hundred million bytes is allowed, and one of nothing costs those.
    assert tracemalloc.get_traced_memory()[1] < (MAX_MEMORY_BYTES if name != "x.safetensors" else 512 << 20)


def test_names_that_a_terminal_would_obey_are_shown_as_text(tmp_path, capsys):
    from ckpt_tools.cli import main

    names = ["\x1b[2J\x1b]0;owned\x07", "[/bold]", "[link=http://x]y[/link]", "a\rb", "a\nb", "\u202egnp.exe"]
    torch.save({name: torch.zeros(2) for name in names}, tmp_path / "x.pt")
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(tmp_path / "x.pt"), "--tensors"])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    assert "\x1b" not in out and "\r" not in out and "\u202e" not in out and "[/bold]" in out


def test_objects_in_deep_circles_are_an_error_and_no_crash():
    """Objects may refer to each other in circles, so that one order of walking is deeper than another: a chain of 100
    with links both ways, entered at its middle and then at its end, and a tensor that makes the reader walk."""
    num, weight = 100, tensors.pickled(tensors.tensor())[2:-1] + b"a"
    links = b""
    for n in range(num):
        others = b"".join(b"h%ca" % m for m in (n - 1, n + 1) if 0 <= m < num)
        links += b"h%c]" % n + others + (weight if n == 0 else b"") + b"b0"
    made = b"".join(b"cx\ny\n)\x81q%c0" % n for n in range(num))
    entries = b"X\1\0\0\0ah%csX\1\0\0\0bh\0s" % (num // 2)
    outcome = execute({"x.pt": tensors.archive(b"\x80\x02" + made + links + b"}" + entries + b".")})
    assert isinstance(outcome.error, MalformedError | UnsupportedError)
