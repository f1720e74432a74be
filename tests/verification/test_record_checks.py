"""A CRC-32 of a zip record that does not hold is an error of every command that reads the record whole.

Each layout is written once; each case is a copy of it in which one byte is another. What ``verify`` says of the copy is
what the other commands have to say too: they must not write, count or load what it calls damaged.
"""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.core.manifest import MASTER, WEIGHT
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.shards import Framing
from ckpt_tools.errors import FormatError, MalformedError
from ckpt_tools.runs.opening import open_checkpoint
from ckpt_tools.serialization.torch_zip import DEFAULT_ROOT
from ckpt_tools.serialization.zip_archive import LOCAL, ZipDirectory, ZipRecord, read_directory
from tests.support.sweep import tiered

LAYOUTS = ("pt", "dcp", "zero2", "zero3", "universal", "npz")
PLACES = ("first byte", "middle", "last byte", "checksum", "descriptor", "local header", "pickle")
COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "convert": lambda path, out: ckpt_tools.convert(path, out / "out.safetensors", to="safetensors"),
    "diff": lambda path, out: ckpt_tools.diff(path, path),
    "checksum": lambda path, out: ckpt_tools.checksum(path, output="-"),
    "inspect": lambda path, out: ckpt_tools.inspect(path, stats=True),
    "open": lambda path, out: [tensor.numpy() for tensor in ckpt_tools.open(path).values()],
}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(60, 50), torch.nn.Linear(50, 7))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 60)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "pt.pt")
    found = {"pt": folder / "pt.pt"}
    for to in LAYOUTS[1:]:
        found[to] = folder / (f"{to}.npz" if to == "npz" else to)
        more = {"state": "model"} if to == "npz" else {"world_size": 2} if to.startswith("zero") else {}
        ckpt_tools.convert(found["pt"], found[to], to=to, **more)  # type: ignore[arg-type]
    return found


def record_of_a_weight(path: Path) -> tuple[Path, int, ZipDirectory, ZipRecord, tuple[int, int]]:
    """The file, the start of the zip in it, its directory, the record that holds the first elements of the largest
    weight or its master, and the range of that."""
    manifest = open_checkpoint(path, ReadOptions()).manifest
    slot = MASTER if any(key.slot == MASTER for key in manifest.tensors) else WEIGHT
    entry = max((each for key, each in manifest.tensors.items() if key.slot == slot), key=lambda each: each.numel)
    at = entry.shards.get_byte_range(0)
    file = path if path.is_file() else path / at.file
    is_item = entry.shards.framing is not Framing.RAW
    base, stop = (at.start, at.stop) if is_item else (0, file.stat().st_size)
    data = file.read_bytes()[base:stop]
    directory = read_directory(lambda a, b: data[a:b], len(data), "", tail_bytes=len(data))
    assert directory is not None
    ranges = directory.locate_payloads(lambda a, b: data[a:b], directory.records)
    holding = [name for name, (a, b) in ranges.items() if a <= at.start < b] or [f"{DEFAULT_ROOT}/data/0"]
    return file, base, directory, directory.records[holding[0]], ranges[holding[0]]


def position(path: Path, place: str) -> tuple[Path, int]:
    """The byte of a file that a place means."""
    file, base, directory, record, (start, stop) = record_of_a_weight(path)
    pickle = next(iter(directory.records.values()))
    name_bytes = len(record.name.encode())
    return file, base + {
        "first byte": start + (128 if record.name.endswith(".npy") else 0),
        "middle": (start + stop) // 2,
        "last byte": stop - 1,
        "checksum": record.crc_at + 1,
        "descriptor": stop + 5,
        "local header": record.header_offset + 15,
        "pickle": pickle.header_offset + LOCAL.size + name_bytes + 90,
    }[place]


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 0x10]))


def copied(path: Path, folder: Path) -> Path:
    to = folder / path.name
    return Path(shutil.copytree(path, to) if path.is_dir() else shutil.copy(path, to))


def is_whole(path: Path) -> bool:
    try:
        return ckpt_tools.verify(path).equal
    except FormatError:
        return False


@pytest.mark.parametrize(("layout", "place"), [each for each in product(LAYOUTS, PLACES) if each != ("npz", "pickle")])
def test_what_verify_calls_damaged_no_command_uses(layouts, layout, place, tmp_path):
    path = copied(layouts[layout], tmp_path)
    flip(*position(path, place))
    is_damaged = not is_whole(path)
    # A checksum stands in three places; that of the directory decides.
    assert is_damaged == (place not in ("descriptor", "local header"))
    form = "." if place == "pickle" else "(record .*|item .*) does not have its stored CRC-32"
    for use in COMMANDS.values():
        with pytest.raises(FormatError, match=form) if is_damaged else nullcontext():
            use(path, tmp_path)
    assert not is_damaged or not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_whole_one_is_used(layouts, layout, tmp_path):
    for use in COMMANDS.values():
        use(layouts[layout], tmp_path)


PAIRS = tiered(
    [f"{layout} to {to}" for layout, to in product(LAYOUTS[:-1], ("torch", "dcp", "zero2", "universal"))],
    test=("pt to zero2", "dcp to torch", "zero2 to universal", "zero3 to dcp", "universal to torch"),
    extended=("zero2 to torch", "zero3 to zero2", "universal to dcp", "pt to universal"),
)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_flat_buffers_padding_and_cut_tensors_hide_nothing(layouts, pair, tmp_path):
    """The tensors of optimizer state are cut otherwise than they lie in the records."""
    layout, _, to = pair.partition(" to ")
    path = copied(layouts[layout], tmp_path)
    flip(*position(path, "middle"))
    with pytest.raises(MalformedError, match="CRC-32"):
        ckpt_tools.convert(path, tmp_path / "out", to=to, **({"world_size": 3} if to == "zero2" else {}))
    assert not (tmp_path / "out").exists()


def test_a_load_into_a_model_is_an_error(layouts, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(60, 50), torch.nn.Linear(50, 7))
    for layout in ("pt", "dcp"):
        path = copied(layouts[layout], tmp_path)
        ckpt_tools.load_into(model, None, path)
        flip(*position(path, "middle"))
        with pytest.raises(MalformedError, match="CRC-32"):
            ckpt_tools.load_into(model, torch.optim.AdamW(model.parameters()), path)


def test_a_part_of_a_record_is_not_compared(layouts, tmp_path):
    path = copied(layouts["pt"], tmp_path)
    flip(*position(path, "last byte"))
    name = max(ckpt_tools.open(path).items(), key=lambda each: each[1].nbytes)[0]
    assert ckpt_tools.open(path)[name][:3].shape[0] == 3


def test_a_second_attempt_does_not_publish_it(tmp_path):
    """``--resume`` keeps what was written, but not what was made of a damaged source."""
    path = tmp_path / "a.pt"
    torch.save({"a": torch.arange(4_000_000.0), "b": torch.arange(10.0)}, path)
    flip(*position(path, "middle"))
    for _ in range(3):
        with pytest.raises(MalformedError, match="CRC-32"):
            ckpt_tools.convert(path, tmp_path / "out.safetensors", resume=True)
    assert not (tmp_path / "out.safetensors").exists()
