"""ZeRO and universal checkpoints: every entry of every file wrong in turn, and names that lead out."""

import copy
from collections.abc import Iterator
from typing import Any

import torch

from ckpt_tools.errors import CkptError, FormatError, SourceNotFoundError, UnsafeError
from tests.end_to_end.fuzzing.seeds import loaded, saved, torch_bytes
from tests.end_to_end.malformed.case import HOSTILE_NAMES, Case, seed
from tests.formats.deepspeed import zero_files

WRONG: dict[str, Any] = {
    "None": None, "True": True, "-1": -1, "2 ** 62": 2**62, "2 ** 64": 2**64, "0.5": 0.5, "text": "x", "a list": [],
    "a dict": {}, "a list of lists": [[[]]], "a tensor": torch.arange(3.0), "a 0-d tensor": torch.tensor(1),
    "an empty tensor": torch.empty(0), "a meta tensor": torch.empty(3, device="meta"), "a dtype": torch.float16,
}  # fmt: skip

MADE = ("zero1", "zero2", "zero3", "universal", "universal_stage3")

EVERY = 5
"""Of the wrong values an entry gets each fifth, by turns."""

Path = tuple[Any, ...]


def cases() -> Iterator[Case]:
    for name in MADE:
        yield from _wrong_values(name)
        yield from _latest(name)
        yield from _names(name)
    yield from _shapes()


def _family(name: str) -> str:
    return name.partition("_")[0].rstrip("123")


def _wrong_values(name: str) -> Iterator[Case]:
    for file, content in loaded(name).items():
        if isinstance(content, dict):
            for path in _entries(content):
                yield from _wrong(name, file, content, path)


def _entries(value: Any, path: Path = ()) -> Iterator[Path]:
    """The places of every entry of dicts and lists, the first of alike ones."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _entries(inner, (*path, key))


def _wrong(name: str, file: str, content: Any, path: Path) -> Iterator[Case]:
    words = f"{name} {file.rpartition('/')[2]} {'.'.join(map(str, path))}"
    for number, (word, value) in enumerate(WRONG.items()):
        if (number + len(words)) % EVERY == 0:
            files = {**seed(name), file: torch_bytes(_with(content, path, value))}
            yield Case(_family(name), "wrong value", f"{words} = {word}", files, must_fail=False)
    files = {**seed(name), file: torch_bytes(_with(content, path, _GONE))}
    yield Case(_family(name), "entry missing", words, files, must_fail=False)


_GONE = object()


def _with(content: Any, path: Path, value: Any) -> Any:
    found = copy.copy(content)
    if len(path) > 1:
        found[path[0]] = _with(found[path[0]], path[1:], value)
    elif value is _GONE:
        del found[path[0]]
    else:
        found[path[0]] = value
    return found


def _latest(name: str) -> Iterator[Case]:
    latest = next((path for path in seed(name) if path.startswith("latest")), None)
    if latest is None:
        return
    for hostile in HOSTILE_NAMES:
        files = {**seed(name), latest: hostile.encode()}
        yield Case(_family(name), "latest out of the checkpoint", f"{name} {hostile!r}", files, (UnsafeError,))
    for content in (b"\xff\xfe", b"", b"\n", b"other", b"x" * 5000, b"x" * 10**6, bytes(100)):
        files = {**seed(name), latest: content}
        yield Case(_family(name), "latest", f"{name} {content[:9]!r}", files, (UnsafeError, FormatError))


def _names(name: str) -> Iterator[Case]:
    """Files whose names lead out, as a remote store might list them; ranks of absurd numbers."""
    files = seed(name)
    data = files[next(path for path in files if path.endswith(".pt"))]
    tag = zero_files.TAG
    for hostile in HOSTILE_NAMES:
        for path in (f"{tag}/zero/{hostile}/fp32.pt", f"{tag}/zero/a.weight/{hostile}.pt", f"{hostile}/zero/x/fp32.pt"):
            errors = (UnsafeError, FormatError)
            yield Case(_family(name), "listed name", f"{name} {path!r}", {**files, path: data}, errors, must_fail=False)
    for rank in ("1", "2", "7", "999999999", "9" * 30, "0" * 30, "00", "-1", "9" * 5000):
        for path in (zero_files.optim(0), zero_files.rank_model(0)):
            more = {**files, path.replace("rank_0_", f"rank_{rank}_", 1): data}
            yield Case(_family(name), "rank", f"{name} {path.rpartition('/')[2]} {rank[:9]}", more, must_fail=False)


def _shapes() -> Iterator[Case]:
    """Shapes that are not those of the partitions."""
    for stage in (1, 2, 3):
        for name, shape in {
            "larger": (4, 4), "smaller": (4, 2), "negative": (-4, -3), "overflowing": (2**62, 2**62),
            "one huge": (2**62,), "huge and empty": (2**62, 2**62, 0), "of many dims": (1,) * 65,
            "of 100,000 dims": (2,) * 100_000,
            "of bools": (True, True), "of floats": (4.0, 3.0), "nested": ((4,), 3), "transposed": (3, 4),
        }.items():  # fmt: skip
            files = loaded(f"zero{stage}")
            model = files[zero_files.MODEL if stage < 3 else zero_files.rank_model(0)]
            model["param_shapes"][0]["a.weight"] = shape
            fails = name not in ("transposed",)
            yield Case("zero", "shape", f"stage {stage}: {name}", saved(files), (FormatError,), fails)
    for count in (0, -1, 1, 3, 2**31, 2**62, 10**400, [2, 2], [2, 3], [], ["2"], None, True):
        for stage in (1, 3):
            files = loaded(f"zero{stage}")
            for rank in range(2):
                zero_files.own(files, rank)["partition_count"] = count
            fails = count not in ([2, 2],)
            yield Case("zero", "world size", f"stage {stage}: {count!r:.20}", saved(files), (FormatError,), fails)
    for world_size in (0, -1, 1, 3, 2**31, 2**62, 10**400, "2"):
        yield _dealt(world_size)
    for padding in (2**48, 2**48 + 1, 2**61, 2**62, 2**63 - 1, -1):
        files = loaded("zero1")
        for rank in range(2):
            zero_files.own(files, rank)["group_paddings"] = [padding, padding]
        yield Case("zero", "padding", str(padding), saved(files), (FormatError,))


def _dealt(world_size: Any) -> Case:
    files = loaded("universal")
    config = {"zero_optimization": {"round_robin_gradients": True}}
    files[zero_files.MODEL] |= {"dp_world_size": world_size, "ds_config": config}
    errors: tuple[type[CkptError], ...] = (FormatError, SourceNotFoundError)
    return Case("universal", "world size", f"dealt out to {world_size!r:.20}", saved(files), errors, must_fail=False)
