"""Compressed items, indexes of single ranks, several models: what is read, and what is wrong with them."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import sys

import pytest
import torch
import zstandard

import ckpt_tools
from ckpt_tools.core.shards import ByteRange
from ckpt_tools.errors import CkptError, IncompleteError, MalformedError, UnsupportedError, UsageError
from ckpt_tools.transfer import inflating
from ckpt_tools.transfer.inflating import Inflating, inflated_name
from fixtures.corpus import make
from tests.end_to_end.test_matrix import assert_same_course, assert_same_state
from tests.layouts.contents import contents
from tests.support.ranks import for_ranks
from tests.support.truth import Truth

pytestmark = pytest.mark.extended


@pytest.fixture
def copied(tmp_path, request):
    shutil.copytree(make(request.param).source, tmp_path / "in")
    return tmp_path / "in"


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match=r"pip install 'ckpt-tools\[zstd\]'"):
        ckpt_tools.inspect(make("dcp-zstd").source)
    report = ckpt_tools.scan(make("dcp-zstd").source)
    assert not report.clean
    assert all("zstd" in finding.what for finding in report.findings)


@pytest.mark.parametrize("copied", ["dcp-zstd"], indirect=True)
def test_damage_to_compressed_items_is_found(copied):
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


@pytest.mark.parametrize("copied", ["dcp-zstd"], indirect=True)
def test_a_compressed_item_may_not_be_larger_than_its_index_says(copied):
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
    monkeypatch.setattr(inflating, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(inflating, "WINDOW_BYTES", 3000)
    data = os.urandom(20_000)
    packed = zstandard.ZstdCompressor().compress(data)
    found = Inflating(lambda file, start, stop: packed[start:stop])
    at = ByteRange("x", 0, len(packed))
    assert found.size(at, limit_bytes=20_000) == 20_000
    for start, stop in [(19_000, 20_000), (0, 10), (5_000, 12_345), (4_000, 4_001), (0, 20_000), (13_000, 13_000)]:
        buffer = bytearray(stop - start)
        found.read_into(inflated_name(at), start, memoryview(buffer))
        assert buffer == data[start:stop]
    with pytest.raises(IncompleteError, match="ends at byte 20,000"):
        found.read_into(inflated_name(at), 19_999, memoryview(bytearray(2)))


def test_a_checkpoint_that_was_read_is_let_go():
    """zstandard's streams are invisible to the garbage collector: in a cycle they would stay for good."""
    gc.collect()
    before = sum(type(found) is inflating._Stream for found in gc.get_objects())
    contents(make("dcp-zstd").source)
    gc.collect()
    assert sum(type(found) is inflating._Stream for found in gc.get_objects()) == before


def test_few_streams_are_kept():
    packed = zstandard.ZstdCompressor().compress(bytes(100))
    found = Inflating(lambda file, start, stop: packed[start:stop])
    for number in range(20):
        assert found.size(ByteRange(f"{number}", 0, len(packed)), limit_bytes=100) == 100
    assert len(found._streams) == inflating.MAX_STREAMS


@pytest.mark.parametrize("copied", ["dcp-alone"], indirect=True)
@pytest.mark.parametrize(("rank", "message"), [(0, "__0.metadata of rank 0"), (1, "rank 1"), (2, "in no shard")])
def test_a_lost_rank_is_missed(copied, rank, message):
    (copied / f"__{rank}.metadata").unlink()
    with pytest.raises(IncompleteError, match=message):
        contents(copied)


@pytest.mark.parametrize("copied", ["dcp-alone"], indirect=True)
def test_two_saves_in_one_folder_are_not_mixed(copied):
    shutil.copy(make("dcp").source / ".metadata", copied)
    with pytest.raises(UnsupportedError, match="two checkpoints were saved into this folder"):
        contents(copied)


@pytest.mark.parametrize("copied", ["dcp-alone"], indirect=True)
def test_ranks_of_two_runs_are_not_mixed(copied):
    (copied / "__2.metadata").write_bytes((copied / "__1.metadata").read_bytes())
    with pytest.raises(CkptError):
        contents(copied)


@pytest.mark.parametrize("key", ["gen", "disc"])
def test_each_of_two_models_goes_with_its_optimizer(key):
    """Both know the same names; the sizes tell the models apart."""
    source = make("dcp-two-models").source
    found = ckpt_tools.inspect(source, optim_key=f"{key}_optim")
    shapes = {each.shape for each in found.tensors if each.name == "0.weight" and each.slot != "step"}
    assert shapes == {(4 if key == "gen" else 5, 3)}
    assert ckpt_tools.inspect(source, optim_key=f"{key}_optim", model_key=key).num_parameters == found.num_parameters


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_models_that_both_fit_are_a_question(tmp_path):
    state = {"state": {"w": {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": ["w"], "lr": 0.1}]}
    tree = {"teacher": {"w": torch.zeros(3)}, "student": {"w": torch.ones(3)}, "optim": state}
    torch.save(tree, tmp_path / "two.pt")
    with pytest.raises(UnsupportedError, match=r"several models .* \(teacher, student\); choose one with model_key"):
        ckpt_tools.inspect(tmp_path / "two.pt")
    assert ckpt_tools.inspect(tmp_path / "two.pt", model_key="student").num_parameters == 3


@pytest.mark.parametrize("name", ["dcp-zstd", "dcp-alone", "dcp-hsdp", "dcp-tied"])
@pytest.mark.parametrize("to", ["dcp", "zero2", "universal"])
def test_it_is_written_as_anything_else(name, to, tmp_path):
    source = make(name).source
    ckpt_tools.convert(source, tmp_path / "out", to=to, **({"world_size": 3} if to != "universal" else {}))
    assert ckpt_tools.verify(source, tmp_path / "out", state="all").equal


CELLS = [("fsdp2-zstd", "dcp"), ("fsdp2-zstd", "zero2"), ("fsdp2-alone", "dcp"), ("fsdp2-alone", "universal")]
KINDS = {"dcp": "fsdp2", "zero2": "zero2-fp32", "universal": "universal-zero2-fp32"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All cells in ``make soak``, one in ``make test-all``."""
    if {"source", "to"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("source", "to"), CELLS if metafunc.config.getoption("--soak") else CELLS[-1:])


def test_a_run_goes_on_from_it(source, to, checkpoint, resume, tmp_path):
    case = "plain" if to == "universal" else "awkward"
    made = checkpoint(source, case, 2)
    ckpt_tools.convert(made.checkpoint, tmp_path / "out", to=to, **for_ranks(to, 3))
    truth, resumed = Truth.load(made.root), resume(KINDS[to], case, tmp_path / "out", 3)
    assert_same_state(truth, resumed)
    assert_same_course(truth, resumed, exactly=False)
