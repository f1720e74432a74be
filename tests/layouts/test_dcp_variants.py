"""DCPs written with other settings than the defaults, and by torch's own tests of DCP: read exactly, as torch's own
loader does, or refused by name."""

import gc
import io
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpt_tools
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.shards import ByteRange
from ckpt_tools.errors import IncompleteError, MalformedError, SeveralCheckpointsError, UnsupportedError, UsageError
from ckpt_tools.serialization import windowed_stream
from ckpt_tools.serialization.windowed_stream import WindowedStream
from ckpt_tools.transfer.inflating import InflatedReader, inflated_name
from fixtures import dcp_cases
from fixtures.corpus import make
from tests.layouts.contents import contents, of_tensor
from tests.support.refusals import refusal_test
from tests.support.sweep import tiered

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.extended]


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match=r"pip install 'ckpt-tools\[zstd\]'"):
        ckpt_tools.inspect(make("dcp-zstd").source)
    report = ckpt_tools.scan(make("dcp-zstd").source)
    assert not report.clean
    assert all("zstd" in finding.what for finding in report.findings)


def test_damage_to_compressed_items_is_found(tmp_path):
    copied = copy_of("dcp-zstd", tmp_path)
    metadata = pickle.loads((copied / ".metadata").read_bytes())
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "app.model.blocks.0.up.weight")
    data = bytearray((copied / info.relative_path).read_bytes())
    damaged = []
    for at in range(info.offset, info.offset + info.length, 23):
        changed = bytearray(data)
        changed[at] ^= 0x55
        (copied / info.relative_path).write_bytes(changed)
        damaged.append(ckpt_tools.verify(copied).equal)
    assert damaged.count(False) > 0.8 * len(damaged), "what is no content (a time, a padding) may change"
    data[info.offset] ^= 0x55
    (copied / info.relative_path).write_bytes(data)
    with pytest.raises(MalformedError, match="compressed with zstd, and damaged"):
        contents(copied)
    assert ckpt_tools.verify(make("dcp-zstd").source).equal


def test_a_compressed_item_may_not_be_larger_than_its_index_says(tmp_path):
    copied = copy_of("dcp-zstd", tmp_path)
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    metadata = pickle.loads((copied / ".metadata").read_bytes())
    pieces = [info for index, info in metadata.storage_data.items() if index.fqn == "app.model.blocks.0.up.weight"]
    for number, info in enumerate(pieces):
        info.relative_path, info.offset, info.length = f"__9_{number}.distcp", 0, len(bomb)
        (copied / info.relative_path).write_bytes(bomb)
    (copied / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(MalformedError, match="decompresses to more than"):
        contents(copied)


def test_parts_of_a_compressed_item_are_found_in_any_order(monkeypatch):
    """Also those that came out so long ago that they were let go."""
    monkeypatch.setattr(windowed_stream, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(windowed_stream, "WINDOW_BYTES", 3000)
    data = os.urandom(20_000)
    packed = zstandard.ZstdCompressor().compress(data)
    found = InflatedReader(lambda file, start, stop: packed[start:stop])
    at = ByteRange("x", 0, len(packed))
    assert found.inflated_size(at, limit_bytes=20_000) == 20_000
    for start, stop in [(19_000, 20_000), (0, 10), (5_000, 12_345), (4_000, 4_001), (0, 20_000), (13_000, 13_000)]:
        buffer = bytearray(stop - start)
        found.read_into(inflated_name(at), start, memoryview(buffer))
        assert buffer == data[start:stop]
    with pytest.raises(IncompleteError, match="ends at byte 20,000"):
        found.read_into(inflated_name(at), 19_999, memoryview(bytearray(2)))


def test_a_checkpoint_that_was_read_is_let_go():
    """zstandard's streams are invisible to the garbage collector: in a cycle they would stay for good."""
    gc.collect()
    before = sum(type(found) is WindowedStream for found in gc.get_objects())
    contents(make("dcp-zstd").source)
    gc.collect()
    assert sum(type(found) is WindowedStream for found in gc.get_objects()) == before


def copy_of(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(make(name).source, folder / "in"))


def without_rank(rank: int) -> Callable[[Path], object]:
    def call(folder: Path) -> None:
        (copy_of("dcp-alone", folder) / f"__{rank}.metadata").unlink()
        contents(folder / "in")

    return call


def with_metadata(folder: Path) -> None:
    shutil.copy(make("dcp").source / ".metadata", copy_of("dcp-alone", folder))
    contents(folder / "in")


def with_ranks_of_two_runs(folder: Path) -> None:
    copied = copy_of("dcp-alone", folder)
    (copied / "__2.metadata").write_bytes((copied / "__1.metadata").read_bytes())
    contents(copied)


def with_two_models_that_fit(folder: Path) -> None:
    state = {"state": {"w": {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": ["w"], "lr": 0.1}]}
    torch.save({"teacher": {"w": torch.zeros(3)}, "student": {"w": torch.ones(3)}, "optim": state}, folder / "two.pt")
    assert ckpt_tools.inspect(folder / "two.pt", model_key="student").num_parameters == 3
    ckpt_tools.inspect(folder / "two.pt")


test_what_is_not_one_whole_checkpoint_is_refused = refusal_test(
    ("rank 0 lost", without_rank(0), IncompleteError, "__0.metadata of rank 0"),
    ("rank 1 lost", without_rank(1), IncompleteError, "rank 1"),
    ("rank 2 lost", without_rank(2), IncompleteError, "in no shard"),
    ("two saves", with_metadata, SeveralCheckpointsError, "two checkpoints were saved into this folder"),
    ("two runs", with_ranks_of_two_runs, IncompleteError, r"\d+ of \d+ elements are in no shard"),
    ("two models", with_two_models_that_fit, UnsupportedError,
        r"several models .* \(teacher, student\); choose one with model_key"),
    ("an earlier save", lambda _: ckpt_tools.inspect(dcp_cases.made("hf-over-more-ranks")[0]), MalformedError,
        r"^shard-0000\d-\S+: w: .* overlap; files of an earlier save by more ranks"),
)  # fmt: skip


# States and writers of torch's own tests of DCP

BY_NUMBER = ("ddp", "ddp-unflattened")
"""Their optimizers number parameters. ckpt-tools writes names, if it can prove them."""
CASES = [name for name, case in dcp_cases.CASES.items() if case.is_dcp and name not in BY_NUMBER]
SAMPLE = ("placements-of-two-dims", "sharded-tensors", "pipeline", "experts", "nested", "dtypes", "over-more-ranks")


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of a tree in a form that can be compared, tensors as their bits."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if inner is not None:
        for key, item in inner:
            yield from leaves(item, (*path, key))
    elif isinstance(value, torch.Tensor):
        yield path, of_tensor(value)
    else:
        yield path, value.getvalue() if isinstance(value, io.BytesIO) else value


def as_torch_loads(folder: Path, out: Path) -> dict[tuple[Any, ...], Any]:
    dcp_to_torch_save(folder, out)
    return dict(leaves(torch.load(out, weights_only=False)))


@pytest.mark.parametrize("case", tiered(CASES, test=(), extended=SAMPLE))
def test_it_is_what_torch_loads(case, tmp_path):
    """Written again for other ranks; of tensors, each one that ckpt-tools reads is one that torch gives."""
    source, _ = dcp_cases.made(case)
    wanted = as_torch_loads(source, tmp_path / "wanted.pt")
    ckpt_tools.convert(source, tmp_path / "out", to="dcp")
    assert as_torch_loads(tmp_path / "out", tmp_path / "found.pt") == wanted
    tensors = [value for value in wanted.values() if isinstance(value, tuple)]
    assert tensors and all(found in tensors for found in contents(source)[1].values())


def test_an_optimizer_by_number_has_the_order_of_the_saved_state_dict_or_no_names():
    """torch lists tensors that every rank has by the rank that writes each."""
    for name, has_order in (("ddp", True), ("ddp-unflattened", False)):
        source, moments = dcp_cases.made(name)
        found = {key: value for key, value in contents(source)[1].items() if key.slot == "exp_avg"}
        truth = {StateKey(name, "exp_avg"): of_tensor(tensor) for name, tensor in moments.items()}
        assert truth and found == (truth if has_order else {})
    (note,) = ckpt_tools.inspect(source).notes
    assert note.what == "optim" and "nothing here proves which ones are meant" in note.why
