"""Published deltas of weights: read as the models that they make, and made from two checkpoints of any formats.

The writer and the reader here are others than ours: numpy and zstandard on whole tensors, after the public layout of
slime and SGLang.
"""

import json
import shutil
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3
import ml_dtypes
import numpy as np
import pytest
import torch
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import (
    DestinationExistsError,
    DifferenceError,
    IncompleteError,
    MalformedError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from fixtures.store import checkpoint
from tests.support.commands import run_command
from tests.support.refusals import refusal_test
from tests.support.s3_server import BUCKET

State = Mapping[str, NDArray[Any]]
INDEX = "model.safetensors.index.json"
CHECKSUMS = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


def raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.frombuffer(array.tobytes(), np.uint8)


def publish(
    folder: Path,
    old: State,
    new: State,
    *,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    frames: Mapping[str, bytes] | None = None,
    digests: Mapping[str, str] | None = None,
    **metadata: str,
) -> Path:
    """A delta as slime writes it, in the folder of a version. ``frames``, ``digests`` and ``metadata`` replace what
    would be written."""
    version = int(folder.name.removeprefix("weight_v"))
    changes: dict[str, NDArray[np.uint8]] = {}
    texts: dict[str, str] = {}
    for name, array in new.items():
        before, after = raw(old[name]), raw(array)
        where = np.flatnonzero(before != after)
        if not len(where) and name not in (frames or {}):
            continue
        change = after ^ before
        if encoding == "overwrite":
            header = struct.pack(f"<{len(where) + 1}I", len(where), *where)
            change = np.frombuffer(header + after[where].tobytes(), np.uint8)
        frame = zstandard.ZstdCompressor(level=1).compress(change.tobytes())
        changes[name] = np.frombuffer((frames or {}).get(name, frame), np.uint8)
        texts[name] = CHECKSUMS[checksum](after.tobytes())
    folder.mkdir(parents=True)
    file = "model-00000-of-00001.safetensors"
    if changes:
        save_file(changes, folder / file, metadata=texts | dict(digests or {}))
    index = {
        "metadata": {
            "version": f"{version:06d}",
            "base_version": f"{version - 1:06d}",
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": checksum,
            **metadata,
        },
        "weight_map": dict.fromkeys(changes, file),
    }
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def save_base(folder: Path, state: State) -> Path:
    base = folder / "weight_v000000"
    base.mkdir(parents=True)
    save_file(dict(state), base / "model.safetensors")
    return base


def read_bits(src: str | Path, out: Path) -> dict[str, bytes]:
    ckpt_tools.convert(src, out)
    return {name: array.tobytes() for name, array in load_file(out).items()}


def make_state(seed: int = 0, numel: int = 3_000_000) -> dict[str, NDArray[Any]]:
    """Random bits, so that there are NaNs with payloads, infinities and -0.0; one tensor is of several blocks."""
    random = np.random.default_rng(seed)
    return {
        "big": random.integers(0, 1 << 16, numel, np.uint16).view(ml_dtypes.bfloat16).reshape(3, -1),
        "half": random.integers(0, 1 << 16, (5, 7), np.uint16).view(np.float16),
        "same": np.arange(4, dtype=np.float32),
        "zero-d": np.array(-0.0, np.float32),
        "none": np.zeros((0, 3), np.float32),
    }


def change_some(state: State, seed: int) -> dict[str, NDArray[Any]]:
    random, changed = np.random.default_rng(seed), {name: array.copy() for name, array in state.items()}
    for name in ("big", "half"):
        bits = changed[name].reshape(-1).view(np.uint16)
        bits[random.integers(0, len(bits), len(bits) // 50 + 1)] ^= random.integers(1, 1 << 16, dtype=np.uint16)
    changed["zero-d"] = np.array([0.0, -0.0, np.nan][seed % 3], np.float32)
    return changed


def test_literal_bytes(tmp_path):
    """Nothing here was made by a library: a frame of one raw block, and a checksum that was computed by hand."""
    base = tmp_path / "weight_v000000" / "model.safetensors"
    header = b'{"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    (tmp_path / "weight_v000000").mkdir()
    base.write_bytes(struct.pack("<Q", len(header)) + header + bytes.fromhex("803f 0080"))  # 1.0, -0.0
    frame = bytes.fromhex("28b52ffd 20 04 210000 c040 017f")  # of 4 bytes; the last block, raw, of 4 bytes
    # The new bytes are 40 7f 01 ff: a = 1 + 0x1bf = 0x1c0; b = 0x41 + 0xc0 + 0xc1 + 0x1c0 = 0x382.
    header = b'{"__metadata__":{"w":"038201c0"},"w":{"dtype":"U8","shape":[13],"data_offsets":[0,13]}}'
    delta = tmp_path / "weight_v000001"
    delta.mkdir()
    (delta / "d.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + frame)
    (delta / INDEX).write_text(
        '{"metadata": {"version": "000001", "base_version": "000000", "delta_encoding": "xor", "compression_format": '
        '"zstd", "checksum_format": "adler32"}, "weight_map": {"w": "d.safetensors"}}'
    )
    assert read_bits(delta, tmp_path / "out.safetensors") == {"w": bytes.fromhex("407f 01ff")}


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", CHECKSUMS)
def test_every_version_of_a_stream_has_the_bits_that_were_published(encoding, checksum, tmp_path):
    states = [make_state()]
    save_base(tmp_path, states[0])
    for version in range(1, 6):
        states.append(change_some(states[-1], version))
        folder = tmp_path / f"weight_v{version:06d}"
        publish(folder, states[-2], states[-1], encoding=encoding, checksum=checksum)
    for version in (5, 1):
        expected = {name: array.tobytes() for name, array in states[version].items()}
        assert read_bits(tmp_path / f"weight_v{version:06d}", tmp_path / f"{version}.safetensors") == expected


bits16 = st.lists(st.integers(0, (1 << 16) - 1), min_size=1, max_size=40)


@settings(deadline=None)
@given(bits=bits16, data=st.data(), encoding=st.sampled_from(["xor", "overwrite"]))
def test_any_bits_are_read_and_written(bits, data, encoding, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    other = data.draw(st.lists(st.integers(0, (1 << 16) - 1), min_size=len(bits), max_size=len(bits)))
    old, new = ({"w": np.array(each, np.uint16).view(np.float16)} for each in (bits, other))
    base = save_base(folder, old)
    src = publish(folder / "weight_v000001", old, new, encoding=encoding)
    assert read_bits(src, folder / "new.safetensors") == {"w": new["w"].tobytes()}
    shutil.rmtree(src)
    report = ckpt_tools.delta(base, folder / "new.safetensors", src)
    assert report.num_changed_elements == sum(a != b for a, b in zip(bits, other, strict=True))
    assert apply_as_sglang(src, old) == {"w": new["w"].tobytes()}
    shutil.rmtree(folder)


def apply_as_sglang(folder: Path, old: State) -> dict[str, bytes]:
    """What SGLang's ``/pull_weights`` makes of ``old``: its checks and its arithmetic, on whole tensors."""
    index = json.loads((folder / INDEX).read_text())
    metadata, bits = index["metadata"], {name: array.tobytes() for name, array in old.items()}
    assert int(metadata["base_version"]) == int(metadata["version"]) - 1
    assert (metadata["compression_format"], metadata["delta_encoding"]) == ("zstd", "xor")
    for file in sorted(set(index["weight_map"].values())):
        blob = (folder / file).read_bytes()
        (length,) = struct.unpack("<Q", blob[:8])
        header = json.loads(blob[8 : 8 + length])
        texts = header.pop("__metadata__")
        assert header.keys() == {name for name, where in index["weight_map"].items() if where == file}
        for name, entry in header.items():
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            change = zstandard.ZstdDecompressor().decompress(blob[start:stop])  # needs the size in the frame
            region = np.frombuffer(bits[name], np.uint8) ^ np.frombuffer(change, np.uint8)
            assert CHECKSUMS[metadata["checksum_format"]](region.tobytes()) == texts[name]
            bits[name] = region.tobytes()
    return bits


def test_a_delta_that_is_made_is_applied_by_the_other_reader(tmp_path, monkeypatch):
    old, new = make_state(), change_some(make_state(), 2)
    base = save_base(tmp_path, old)
    save_file(new, tmp_path / "new.safetensors")
    monkeypatch.setattr("ckpt_tools.conversion.delta.BLOCK_BYTES", 1 << 16)  # frames of several parts
    report = ckpt_tools.delta(base, tmp_path / "new.safetensors", tmp_path / "weight_v000001", workers=3)
    assert apply_as_sglang(tmp_path / "weight_v000001", old) == {name: each.tobytes() for name, each in new.items()}
    changed = {
        name: int((raw(old[name]).reshape(-1, each.itemsize) != raw(each).reshape(-1, each.itemsize)).any(1).sum())
        for name, each in new.items()
    }
    assert report.num_changed_elements == sum(changed.values())
    assert report.num_changed_tensors == sum(map(bool, changed.values())) == 3
    files = [path.stat().st_size for path in (tmp_path / "weight_v000001").iterdir()]
    assert report.bytes_written == sum(files) and report.size_ratio == sum(files) / report.num_bytes
    assert ckpt_tools.diff(tmp_path / "weight_v000001", tmp_path / "new.safetensors").equal
    # The same again is the same, byte for byte, and nothing is left of the temporary file.
    again = tmp_path / "again" / "weight_v000001"
    ckpt_tools.delta(base, tmp_path / "new.safetensors", again, workers=1)
    assert all(
        (again / path.name).read_bytes() == path.read_bytes() for path in (tmp_path / "weight_v000001").iterdir()
    )


def test_a_training_checkpoint_is_published_in_the_dtypes_of_the_base(tmp_path):
    """FSDP2 in fp32 against a base in bf16, on two ranks: the bits are those of torch's cast."""
    trained = checkpoint("fsdp2", "plain", 2).checkpoint
    ckpt_tools.convert(trained, tmp_path / "trained.safetensors", dtype="bfloat16")
    after = load_file(tmp_path / "trained.safetensors")
    base = save_base(tmp_path, {name: np.zeros_like(array) for name, array in after.items()})
    done = run_command("delta", base, trained, tmp_path / "weight_v000001")
    assert done.code == 0 and "cast:" in done.out, done
    before = {name: np.zeros_like(array) for name, array in after.items()}
    expected = {name: array.tobytes() for name, array in after.items()}
    assert apply_as_sglang(tmp_path / "weight_v000001", before) == expected


def test_nothing_changed(tmp_path):
    base = save_base(tmp_path, make_state(numel=30))
    report = ckpt_tools.delta(base, base / "model.safetensors", tmp_path / "weight_v000001")
    assert (report.num_changed_elements, [path.name for path in (tmp_path / "weight_v000001").iterdir()]) == (
        0,
        [INDEX],
    )
    assert ckpt_tools.diff(tmp_path / "weight_v000001", base).equal


def test_a_delta_is_a_source_of_every_command(tmp_path):
    old, new = make_state(numel=3000), change_some(make_state(numel=3000), 1)
    base = save_base(tmp_path / "run", old)
    (base / "config.json").write_text('{"model_type": "llama"}')
    folder = publish(tmp_path / "run" / "weight_v000001", old, new)
    (folder / "notes.txt").write_text("x")
    save_file(new, tmp_path / "new.safetensors")
    summary = ckpt_tools.inspect(folder)
    assert (summary.format, summary.num_tensors) == ("safetensors", 5)
    assert {note.outcome.value for note in summary.notes} == {"merged", "dropped"}
    ckpt_tools.convert(folder, tmp_path / "dcp", to="dcp", world_size=3)
    assert ckpt_tools.verify(folder, tmp_path / "dcp").equal and ckpt_tools.verify(folder).equal
    assert ckpt_tools.diff(folder, base).num_differing == 2
    assert ckpt_tools.diff(folder / INDEX, tmp_path / "new.safetensors").equal
    ckpt_tools.convert(tmp_path / "run@weight_v000001", tmp_path / "hf", to="safetensors")
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"config.json", "model.safetensors"}
    lazy = ckpt_tools.open(folder)["big"]
    assert np.asarray(lazy[1, 5:9]).tobytes() == new["big"][1, 5:9].tobytes()
    assert ckpt_tools.ls(tmp_path / "run").checkpoints[0].is_complete
    ckpt_tools.checksum(folder, output=tmp_path / "digests.json")
    assert ckpt_tools.verify(tmp_path / "new.safetensors", digests=tmp_path / "digests.json").equal


def test_a_full_version_ends_the_chain(tmp_path):
    old, new = make_state(numel=30), change_some(make_state(numel=30), 1)
    full = tmp_path / "weight_v000006"
    save_base(tmp_path / "x", old).rename(full)
    publish(tmp_path / "weight_v000007", old, new)
    expected = {name: array.tobytes() for name, array in new.items()}
    assert read_bits(tmp_path / "weight_v000007", tmp_path / "out.safetensors") == expected


def test_a_reader_that_goes_back_patches_again(tmp_path, monkeypatch):
    """With a window of less than a tensor; blocks are read from the last to the first."""
    old, new = make_state(), change_some(make_state(), 1)
    save_base(tmp_path, old)
    publish(tmp_path / "weight_v000001", old, new, encoding="overwrite")
    monkeypatch.setattr("ckpt_tools.serialization.windowed_stream.WINDOW_BYTES", 1 << 20)
    monkeypatch.setattr("ckpt_tools.serialization.windowed_stream.BLOCK_BYTES", 100_001)
    lazy = ckpt_tools.open(tmp_path / "weight_v000001")["big"]
    for start in range(900_000, -1, -100_000):
        found = np.asarray(lazy[2, start : start + 1000])
        assert found.tobytes() == new["big"][2, start : start + 1000].tobytes()


def refuse_reading(**published: Any) -> Any:
    """Reads every byte of a delta that is published so, over a base of 40 bytes."""

    def call(folder: Path) -> None:
        old = {"w": np.arange(20, dtype=np.float16)}
        base = old if "base" not in published else published.pop("base")
        save_base(folder, base)
        new = {"w": old["w"] + 1}
        read_bits(publish(folder / "weight_v000001", old, new, **published), folder / "out.safetensors")

    return call


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def overwrite(count: int, positions: list[int], values: bytes) -> dict[str, Any]:
    return {
        "encoding": "overwrite",
        "frames": {"w": zstd(struct.pack(f"<{len(positions) + 1}I", count, *positions) + values)},
    }


def tear(name: str, change: Any) -> Any:
    """Reads a delta whose file ``name`` was changed."""

    def call(folder: Path) -> None:
        old = {"w": np.arange(20, dtype=np.float16)}
        save_base(folder, old)
        path = publish(folder / "weight_v000001", old, {"w": old["w"] + 1}) / name
        change(path)
        read_bits(folder / "weight_v000001", folder / "out.safetensors")

    return call


def edit_index(**weight_map: str) -> Any:
    def change(path: Path) -> None:
        index = json.loads(path.read_text())
        path.write_text(json.dumps(index | {"weight_map": index["weight_map"] | weight_map}))

    return tear(INDEX, change)


def refuse_chain(folder: Path) -> None:
    publish(folder / "weight_v000002", {"w": np.zeros(2)}, {"w": np.ones(2)})
    publish(folder / "weight_v000001", {"w": np.zeros(2)}, {"w": np.ones(2)}, version="000009", base_version="000000")
    ckpt_tools.inspect(folder / "weight_v000002")


def refuse_missing(version: int) -> Any:
    def call(folder: Path) -> None:
        publish(folder / f"weight_v{version:06d}", {"w": np.zeros(2)}, {"w": np.ones(2)})
        ckpt_tools.inspect(folder / f"weight_v{version:06d}")

    return call


FILE = "model-00000-of-00001.safetensors"
SHORT = np.arange(19, dtype=np.float16)
test_hostile_and_torn_deltas_are_refused_by_name = refusal_test(
    ("more than the tensor", refuse_reading(frames={"w": zstd(bytes(41))}), MalformedError, "w: .*more bytes than the"),
    ("a bomb", refuse_reading(frames={"w": zstd(bytes(1 << 28))}), MalformedError, "more bytes than the tensor"),
    ("less than the tensor", refuse_reading(frames={"w": zstd(bytes(39))}), IncompleteError, "its change ends early"),
    ("no frame", refuse_reading(frames={"w": b"no frame"}), MalformedError, "damaged"),
    ("half a frame", refuse_reading(frames={"w": zstd(bytes(range(40)))[:-9]}), IncompleteError, "ends early"),
    (
        "other change",
        refuse_reading(frames={"w": zstd(bytes(40))}),
        MalformedError,
        "w: its checksum after the changes",
    ),
    (
        "wrong digest",
        refuse_reading(digests={"w": "0" * 32}),
        MalformedError,
        "the base or a delta is not the right one",
    ),
    (
        "other base",
        refuse_reading(base={"w": np.ones(20, np.float16)}),
        MalformedError,
        "its checksum after the changes",
    ),
    ("shorter base", refuse_reading(base={"w": SHORT}), MalformedError, "more bytes than the tensor has in the base"),
    ("wider base", refuse_reading(base={"w": np.ones(20, np.float32)}), IncompleteError, "its change ends early"),
    ("no such tensor", refuse_reading(base={"v": SHORT}), UnsupportedError, "weight_v000000 has no such tensor"),
    ("count", refuse_reading(**overwrite(1 << 30, [], b"")), IncompleteError, "its change ends early"),
    ("descending", refuse_reading(**overwrite(2, [5, 4], b"ab")), MalformedError, "positions that do not ascend"),
    ("twice", refuse_reading(**overwrite(2, [5, 5], b"ab")), MalformedError, "positions that do not ascend"),
    ("after the end", refuse_reading(**overwrite(1, [40], b"a")), MalformedError, "positions after the end"),
    ("too many values", refuse_reading(**overwrite(1, [4], b"ab")), MalformedError, "more bytes than the tensor"),
    ("too few values", refuse_reading(**overwrite(2, [4, 5], b"a")), IncompleteError, "its change ends early"),
    (
        "encoding",
        refuse_reading(delta_encoding="add"),
        UnsupportedError,
        "delta_encoding 'add' is not xor or overwrite",
    ),
    ("compression", refuse_reading(compression_format="lz4"), UnsupportedError, "compression_format 'lz4' is not zstd"),
    (
        "checksum",
        refuse_reading(checksum_format="md5"),
        UnsupportedError,
        "checksum_format 'md5' is not one of xxh3-128",
    ),
    ("no version", refuse_reading(version="new"), MalformedError, "version 'new' against '000000'"),
    ("later base", refuse_reading(base_version="000001"), MalformedError, "against an earlier version"),
    ("renumbered", refuse_chain, UnsupportedError, "weight_v000001: its index says that it is version 9"),
    (
        "no base",
        refuse_missing(1),
        IncompleteError,
        "weight_v000000: .*put the model there that the engine started from",
    ),
    ("no version before", refuse_missing(4), IncompleteError, "weight_v000003: weight_v000004 is a delta against this"),
    ("lost file", tear(FILE, Path.unlink), IncompleteError, f"weight_v000001/{FILE}: this file of the checkpoint is"),
    ("cut file", tear(FILE, lambda path: path.write_bytes(path.read_bytes()[:-1])), IncompleteError, "truncated"),
    ("cut index", tear(INDEX, lambda path: path.write_text(path.read_text()[:-9])), MalformedError, INDEX),
    ("other names", edit_index(v=FILE), MalformedError, "v: the index and this file do not name the same tensors"),
    ("outside", edit_index(v="../x.safetensors"), UnsafeError, "outside of itself"),
)


def refuse_making(old: State, new: State, name: str = "weight_v000001") -> Any:
    def call(folder: Path) -> None:
        save_file(dict(old), folder / "old.safetensors")
        save_file(dict(new), folder / "new.safetensors")
        try:
            ckpt_tools.delta(folder / "old.safetensors", folder / "new.safetensors", folder / name)
        finally:
            assert sorted(path.name for path in folder.iterdir()) == ["new.safetensors", "old.safetensors"]

    return call


TWO = {"w": np.zeros(2, np.float16)}
test_versions_that_do_not_fit_are_refused_and_nothing_is_written = refusal_test(
    ("lost", refuse_making(TWO | {"v": SHORT}, TWO), UsageError, "new.safetensors lacks v"),
    ("new", refuse_making(TWO, TWO | {"v": SHORT}), UsageError, "old.safetensors lacks v"),
    (
        "shape",
        refuse_making(TWO, {"w": SHORT}),
        UsageError,
        r"w is \[19\] of float16 in .*new.safetensors and \[2\] of",
    ),
    ("dtype", refuse_making(TWO, {"w": np.zeros(2, np.int16)}), UsageError, r"w is \[2\] of int16 .* of float16"),
    ("name", refuse_making(TWO, TWO, "next"), UsageError, "next: name a folder as engines look for it, weight_v000001"),
    ("version 0", refuse_making(TWO, TWO, "weight_v000000"), UsageError, "name a folder as engines look for it"),
)


def test_a_published_version_stays_as_it_is(tmp_path):
    base = save_base(tmp_path, make_state(numel=30))
    ckpt_tools.delta(base, base, tmp_path / "weight_v000001")
    with pytest.raises(DestinationExistsError, match="a published version is not replaced"):
        ckpt_tools.delta(base, base, tmp_path / "weight_v000001")
    with pytest.raises(UsageError, match=r"is a delta against version 4, and .*weight_v000000 is version 0"):
        ckpt_tools.delta(base, base, tmp_path / "weight_v000005")


def test_tied_weights_have_one_change(tmp_path):
    """The base has one of two names; the new version has both, tied."""
    base = save_base(tmp_path, {"embed": np.zeros(4, np.float32)})
    tied = torch.arange(4.0)
    torch.save({"embed": tied, "head": tied}, tmp_path / "new.pt")
    with pytest.raises(UsageError, match="lacks head"):
        ckpt_tools.delta(base, tmp_path / "new.pt", tmp_path / "weight_v000001")
    ckpt_tools.convert(tmp_path / "new.pt", tmp_path / "tied.safetensors")
    (base / "model.safetensors").unlink()
    shutil.copy(tmp_path / "tied.safetensors", base / "model.safetensors")
    changed = tied + 1
    torch.save({"embed": changed, "head": changed}, tmp_path / "changed.pt")
    assert ckpt_tools.delta(base, tmp_path / "changed.pt", tmp_path / "weight_v000001").num_tensors == 1
    assert ckpt_tools.diff(tmp_path / "weight_v000001", tmp_path / "changed.pt").equal
    torch.save({"embed": changed, "head": tied}, tmp_path / "untied.pt")
    with pytest.raises(DifferenceError, match=r"embed and head of .*untied.pt, which .* ties: their bits differ"):
        ckpt_tools.delta(base, tmp_path / "untied.pt", tmp_path / "other" / "weight_v000001")


def test_deltas_in_a_store_are_those_of_local_folders(s3, tmp_path):
    states = [make_state()]
    base = save_base(tmp_path, states[0])
    prefix = s3.new_prefix()
    place = f"s3://{BUCKET}/{prefix}"
    s3.upload(f"{prefix}weight_v000000/", base)
    for version in (1, 2):
        states.append(change_some(states[-1], version))
        save_file(states[-1], tmp_path / f"{version}.safetensors")
        name, last = f"weight_v{version:06d}", f"weight_v{version - 1:06d}"
        new = f"{place}{version}.safetensors"
        ckpt_tools.convert(tmp_path / f"{version}.safetensors", new)
        ckpt_tools.delta(tmp_path / last, tmp_path / f"{version}.safetensors", tmp_path / name)
        ckpt_tools.delta(f"{place}{last}", new, f"{place}{name}")
        local = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        assert s3.files(f"{prefix}{name}/") == local
    with pytest.raises(DestinationExistsError, match="a published version is not replaced"):
        ckpt_tools.delta(f"{place}weight_v000001", new, f"{place}weight_v000002")
    expected = {name: array.tobytes() for name, array in states[2].items()}
    ckpt_tools.convert(f"{place}weight_v000002", f"{place}out", to="dcp", world_size=2)
    assert read_bits(f"{place}out", tmp_path / "a.safetensors") == expected
    assert read_bits(f"{place}weight_v000002", tmp_path / "b.safetensors") == expected
    assert ckpt_tools.verify(f"{place}weight_v000002", tmp_path / "b.safetensors").equal
