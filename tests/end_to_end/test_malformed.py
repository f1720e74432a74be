"""Damaged and hostile checkpoints of every format: each ends with its named error, or is read as its own library does.

The files are made by class in ``malformed``, from checkpoints that the libraries themselves wrote. None may take
more memory than its bound, run into a loop, or have an element of a tensor read before it is refused. Time is the
processor's, and its bound is generous: it tells a loop from a slow machine, and no more.
"""

import os
import re
import resource
import socket
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import CkptError, FormatError, IncompleteError, SourceNotFoundError, UnsafeError
from ckpt_tools.formats.index import find_format, read_manifest
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source
from tests.end_to_end.fuzzing.seeds import DcpFolder, saved, torch_bytes
from tests.end_to_end.fuzzing.target import Outcome, execute
from tests.end_to_end.malformed import carriers, dcp, deepspeed, headers, tensors, zips
from tests.end_to_end.malformed.case import HOSTILE_NAMES, Case, Read, RefusedError, read_by_library, seed
from tests.formats.deepspeed import zero_files
from tests.support.commands import printed
from tests.support.files import write_files
from tests.support.sweep import spread

CLASSES: dict[str, Callable[[], Iterator[Case]]] = {
    "truncated": carriers.truncated,
    "headers": headers.cases,
    "zips": zips.cases,
    "tensors": tensors.cases,
    "dcp": dcp.cases,
    "deepspeed": deepspeed.cases,
    "carriers": carriers.cases,
}

IN_TEST, IN_EXTENDED = 12, 40
"""Cases of each rule, evenly spread; of ``headers``, which cost little, all, and in ``make test-all`` of the fields of
zips as many as six times so many."""

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

STRICTER = (
    "zip field",  # torch looks at the local headers of records too that hold no tensor
    "record missing",  # torch wants a version in every archive
    "record too long",  # torch reads the archive's alignment, on which nothing depends
    "path", "path of the wrong kind",  # torch's loader wants names that spell their paths
)  # fmt: skip
"""Rules of which the libraries ask for more than is needed to read the same tensors."""


def _problem(case: Case, folder: Path) -> str | None:
    """What is wrong with how a case ended."""
    before, begun = _peak_bytes(), time.process_time()
    try:
        outcome = execute(case.files)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    seconds, memory_bytes = time.process_time() - begun, _peak_bytes() - before
    if seconds > HANG_SECONDS or memory_bytes > MAX_MEMORY_BYTES:
        return f"it took {seconds:.1f} s and {memory_bytes:,} bytes"
    return _refused(case, outcome.error) if outcome.error else _read(case, outcome, folder)


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
        theirs = read_by_library(case.family, case.files, folder)
    except RefusedError as error:
        return None if case.rule in STRICTER else f"read, and the library refuses it: {error!s:.300}"
    return None if theirs <= _described(outcome) else "read otherwise than by the library"


def _described(outcome: Outcome) -> Read:
    assert outcome.manifest is not None, "it was read"
    entries = outcome.manifest.tensors
    return {
        (entries[StateKey(*key)].dtype.value, entries[StateKey(*key)].shape, elements)
        for key, elements in outcome.elements.items()
    }


def cases_of(name: str, most: int | None) -> list[Case]:
    """All of a class, or so many of each of its rules."""
    rules: dict[tuple[str, str], list[Case]] = {}
    for case in CLASSES[name]():
        rules.setdefault((case.family, case.rule), []).append(case)
    return [case for cases in rules.values() for case in spread(cases, most)]


@pytest.mark.parametrize(
    ("tier", "name"),
    [
        *(("test", name) for name in CLASSES),
        *(pytest.param("extended", name, marks=pytest.mark.extended) for name in CLASSES if name != "headers"),
    ],
)
def test_each_is_refused_by_name_or_read_as_its_library_reads_it(tier, name, tmp_path, request):
    execute(seed("torch"))
    most = IN_TEST if tier == "test" else 6 * IN_EXTENDED if name == "zips" else IN_EXTENDED
    is_whole = name == "headers" or (tier == "extended" and request.config.getoption("--soak"))
    cases = enumerate(cases_of(name, None if is_whole else most))
    found = ((case, _problem(case, tmp_path / str(number))) for number, case in cases)
    problems = [f"{case}: {problem}" for case, problem in found if problem]
    assert not problems, f"{len(problems)}:\n" + "\n".join(problems[:40])


@pytest.mark.soak
def test_there_are_enough_of_every_format():
    found = Counter(case.family for made in CLASSES.values() for case in made())
    assert sum(found.values()) >= 8000 and min(found.values()) >= 200


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


def refused(folder: Path, *errors: type[CkptError]) -> None:
    """Opening it and reading it through is, in bounded time of the processor."""
    begun = time.process_time()
    with pytest.raises(errors):  # noqa: PT012
        checkpoint = ckpt_tools.open(folder)
        for key in checkpoint.manifest.tensors:
            checkpoint.state(*key)[...]
    assert time.process_time() - begun < HANG_SECONDS


LINKED = {
    "safetensors": "model.safetensors",
    "torch": "model.pt",
    "safetensors_sharded": "model-00002-of-00002.safetensors",
    "dcp": "__0_0.distcp",
    "zero3": zero_files.rank_model(1),
    "universal": f"{zero_files.TAG}/zero/a.bias/fp32.pt",
}
"""A file of each format that the checkpoint does not do without."""


@pytest.mark.parametrize("name", LINKED)
@pytest.mark.parametrize("target", ["outside", "relative", "/dev/zero", "itself", "no"])
def test_links_that_lead_out_are_not_followed(name, target, tmp_path):
    folder = write_files(tmp_path / "checkpoint", dict(seed(name)))
    path = folder / LINKED[name]
    outside = tmp_path / "outside"
    path.rename(outside)
    places = {"outside": outside, "relative": Path(os.path.relpath(outside, path.parent)), "itself": path.name}
    path.symlink_to(places.get(target, Path(target) if target.startswith("/") else "no-such-file"))
    refused(folder, UnsafeError, FormatError, SourceNotFoundError)


@pytest.mark.parametrize("name", LINKED)
@pytest.mark.parametrize("kind", ["pipe", "socket", "folder"])
def test_what_is_no_file_is_not_opened(name, kind, tmp_path, monkeypatch):
    folder = write_files(tmp_path / "c", dict(seed(name)))
    path = folder / LINKED[name]
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        monkeypatch.chdir(path.parent)  # addresses have at most 107 bytes
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    refused(folder, FormatError, SourceNotFoundError)


def test_a_linked_folder_is_not_entered(tmp_path):
    files = dict(seed("universal"))
    write_files(
        tmp_path / "outside", {path.rpartition("/")[2]: data for path, data in files.items() if "/a.bias/" in path}
    )
    inside = {path: data for path, data in files.items() if "/a.bias/" not in path}
    folder = write_files(tmp_path / "c", inside)
    (folder / zero_files.TAG / "zero" / "a.bias").symlink_to(tmp_path / "outside")
    refused(folder, IncompleteError)


@pytest.mark.parametrize("name", ["zero1", "universal"])
@pytest.mark.parametrize("hostile", [name for name in HOSTILE_NAMES if "\0" not in name])
def test_latest_chooses_no_folder_outside(name, hostile, tmp_path):
    write_files(tmp_path, {path.replace(zero_files.TAG, "x"): data for path, data in seed(name).items()})
    folder = write_files(tmp_path / "checkpoint", dict(seed(name)))
    next(folder.glob("latest*")).write_text(hostile)
    refused(folder, UnsafeError)


SPARSE = {
    "model.safetensors": struct.pack("<Q", 2**60),
    "x.safetensors": struct.pack("<Q", 100_000_000) + b"{",
    "model.pt": b"PK\3\4",
    "model.safetensors.index.json": b"{",
    ".metadata": b"\x80\x04",
    "latest": b"x",
}


@pytest.mark.parametrize("name", SPARSE)
def test_a_terabyte_of_nothing_is_not_read(name, tmp_path):
    """A file with holes costs its maker nothing."""
    folder = write_files(tmp_path / "c", dict(seed("zero1")) if name == "latest" else {})
    (folder / name).write_bytes(SPARSE[name])
    os.truncate(folder / name, 1 << 40)
    tracemalloc.start()
    refused(folder, FormatError)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A header of a hundred million bytes is allowed, and one of nothing costs those.
    assert peak_bytes < (MAX_MEMORY_BYTES if name != "x.safetensors" else 512 << 20)


def test_names_that_a_terminal_would_obey_are_shown_as_text(tmp_path):
    names = ["\x1b[2J\x1b]0;owned\x07", "[/bold]", "[link=http://x]y[/link]", "a\rb", "a\nb", "\u202egnp.exe"]
    torch.save({name: torch.zeros(2) for name in names}, tmp_path / "x.pt")
    out = printed("inspect", tmp_path / "x.pt", "--tensors")
    assert "\x1b" not in out and "\r" not in out and "\u202e" not in out and "[/bold]" in out
