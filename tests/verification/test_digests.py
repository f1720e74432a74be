"""Digests: of known bytes, the same in every format and world size, and wrong after any flip of a bit."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors.torch import save_file
from xxhash import xxh3_128

import ckpt_tools
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.errors import (
    CkptError,
    DestinationExistsError,
    MalformedError,
    SourceNotFoundError,
    StoreError,
    UnsupportedError,
    UsageError,
)
from ckpt_tools.stores.output_names import DIGESTS_NAME
from ckpt_tools.verification import digests
from ckpt_tools.verification.digests import Digest
from ckpt_tools.verification.report import Aspect
from tests.support.commands import run_command as command
from tests.support.ranks import for_ranks
from tests.support.refusals import refusal_test
from tests.support.s3_server import BUCKET
from tests.support.sweep import extended, tiered
from tests.support.truth import Truth, assert_same_bits

FLIPS, FLIPS_SOAKED = 100, 10_000
NOTHING_XXH3 = "99aa06d3014798d86001c324468d497f"
NOTHING_BLAKE3 = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
FORMATS = ("dcp", "zero1", "zero2", "zero3", "universal", "torch", "safetensors")


def test_known_digests(tmp_path):
    """Of the 12 bytes 00 01 ... 0b, and of none, whose digests both projects publish."""
    tensors = {"w": torch.arange(12, dtype=torch.uint8).reshape(3, 4), "e": torch.zeros(0, 7)}
    save_file(tensors, tmp_path / "m.safetensors")
    found = ckpt_tools.checksum(tmp_path / "m.safetensors", output="-").digests
    assert found == {
        StateKey("w"): Digest(
            DType.UINT8, (3, 4), xxh3_128(bytes(range(12))).hexdigest(), blake3(bytes(range(12))).hexdigest()
        ),
        StateKey("e"): Digest(DType.FLOAT32, (0, 7), NOTHING_XXH3, NOTHING_BLAKE3),
    }


def test_a_list_is_the_same_bytes_whatever_order_its_tensors_came_in():
    one = Digest(DType.UINT8, (), "0" * 32, "0" * 64)
    keys = [StateKey("b"), StateKey("a", "exp_avg"), StateKey("a")]
    data = digests.format_digest_list(dict.fromkeys(keys, one))
    assert data == digests.format_digest_list(dict.fromkeys(reversed(keys), one))
    assert list(digests.parse_digest_list(data, "x")) == [StateKey("a", "exp_avg"), StateKey("a"), StateKey("b")]
    assert digests.parse_digest_list(data, "x") == dict.fromkeys(keys, one)


ENTRY = {"name": "w", "slot": "weight", "dtype": "uint8", "shape": [1], "xxh3_128": "0" * 32, "blake3": "0" * 64}


def listed(*entries: Any, **changes: Any) -> bytes:
    return json.dumps({"format": digests.LIST_FORMAT, "version": 1, "tensors": list(entries), **changes}).encode()


NO_LIST: dict[str, tuple[bytes, type[CkptError], str]] = {
    "no JSON": (b"not json", MalformedError, "not valid JSON"),
    "nested too deep": (b"[" * 100_000, MalformedError, "not valid JSON"),
    "a key twice": (b'{"tensors": [], "tensors": []}', MalformedError, "twice"),
    "a list": (b"[]", MalformedError, "not a list of digests"),
    "another format": (listed(format="other"), MalformedError, "not a list of digests"),
    "tensors by name": (listed(tensors={}), MalformedError, "not a list of digests"),
    "another version": (listed(version=2), UnsupportedError, "version 2"),
    "a tensor twice": (listed(ENTRY, ENTRY), MalformedError, "two digests"),
    "a text": (listed("w"), MalformedError, "has no name, slot, dtype or digests"),
    "a number as name": (listed({**ENTRY, "name": 3}), MalformedError, "has no name, slot, dtype or digests"),
    "no blake3": (listed({**ENTRY, "blake3": None}), MalformedError, "has no name, slot, dtype or digests"),
    "an unknown dtype": (listed({**ENTRY, "dtype": "float7"}), MalformedError, "float7"),
    "a negative size": (listed({**ENTRY, "shape": [-1]}), MalformedError, "shape"),
    "a size of bool": (listed({**ENTRY, "shape": [True]}), MalformedError, "shape"),
    "a short digest": (listed({**ENTRY, "blake3": "0" * 63}), MalformedError, "not a valid blake3"),
    "no hex": (listed({**ENTRY, "xxh3_128": "G" * 32}), MalformedError, "not a valid xxh3_128"),
}  # fmt: skip
test_a_list_that_is_none = refusal_test(
    *(
        (name, partial(lambda data, folder: digests.parse_digest_list(data, "x.digests.json"), data), error, words)
        for name, (data, error, words) in NO_LIST.items()
    )
)


@pytest.mark.parametrize("source", ["fsdp2", *extended("zero3-bf16", "zero1-fp32")])
def test_every_format_of_a_state_has_its_digests_and_no_difference(source, checkpoint, tmp_path):
    """All slots, at four world sizes: digests of what has the same dtype, the source's list as a proof of each format,
    and ``diff`` of each with the one before."""
    made, kept = checkpoint(source, "awkward", 2).checkpoint, tmp_path / "kept.json"
    wanted = ckpt_tools.checksum(made, output=kept).digests
    before = made
    for number, to in enumerate(FORMATS):
        ckpt_tools.convert(made, tmp_path / to, to=to, state="all", **for_ranks(to, 1 + number % 4))
        found = ckpt_tools.checksum(tmp_path / to, output=tmp_path / f"{to}.json").digests
        same = [key for key in found if key in wanted and wanted[key].dtype is found[key].dtype]
        assert [key for key in same if found[key] != wanted[key]] == [] and len(same) >= 75, to
        report = ckpt_tools.verify(tmp_path / to, digests=kept)
        assert report.equal and (report.num_digests or 0) >= 99, (to, report.differences[:3])
        report = ckpt_tools.diff(before, tmp_path / to)
        assert report.equal and report.num_tensors >= 99, (to, report.differences[:3])
        before = tmp_path / to
    assert ckpt_tools.diff(before, made).equal
    options: dict[str, Any] = {"rename": ["^=net."], "exclude": ["*bias"]}
    ckpt_tools.convert(made, tmp_path / "m.pt", **options)
    assert ckpt_tools.verify(tmp_path / "m.pt", digests=kept, state="model", **options).equal
    assert not ckpt_tools.verify(tmp_path / "m.pt", digests=kept, state="model").equal
    with pytest.raises(UsageError, match="distinct"):
        ckpt_tools.verify(tmp_path / "m.pt", digests=kept, rename=[".*=x"])


def test_every_name_of_a_tied_weight_has_its_digest(tmp_path):
    shared = torch.ones(3)
    torch.save({"w": shared, "tied": shared}, tmp_path / "m.pt")
    found = ckpt_tools.checksum(tmp_path / "m.pt").digests
    assert found[StateKey("w")] == found[StateKey("tied")]
    assert ckpt_tools.verify(tmp_path / "m.pt").num_digests == 2


def small_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "a.weight": torch.randn(5, 7, generator=generator),
        "b.weight": torch.randn(3, 4, 2, generator=generator),
        "c.scale": torch.tensor(1.5),
        "n.count": torch.arange(9),
    }


def test_every_flipped_bit_is_found(tmp_path, request):
    """Each alone, at bits drawn uniformly from the bytes of tensors."""
    path, num_flips = tmp_path / "m.safetensors", FLIPS_SOAKED if request.config.getoption("--soak") else FLIPS
    save_file(small_state(), path)
    ckpt_tools.checksum(path)
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for bit in np.random.default_rng(7).integers(8 * start, 8 * len(data), num_flips).tolist():
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert [each.aspect for each in ckpt_tools.verify(path).differences] == [Aspect.DIGEST], bit


def test_a_list_in_another_place(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(2)}, path)
    assert ckpt_tools.verify(path).num_digests is None
    report = ckpt_tools.checksum(path, output=tmp_path / "kept.json")
    assert report.destination == str(tmp_path / "kept.json")
    assert ckpt_tools.verify(path).num_digests is None
    assert ckpt_tools.verify(path, digests=tmp_path / "kept.json").num_digests == 1
    with pytest.raises(DestinationExistsError):
        ckpt_tools.checksum(path, output=tmp_path / "kept.json")
    assert ckpt_tools.checksum(path, output=tmp_path / "kept.json", overwrite=True).digests == report.digests
    with pytest.raises(SourceNotFoundError):
        ckpt_tools.verify(path, digests=tmp_path / "none.json")
    with pytest.raises(UsageError, match="digests="):
        ckpt_tools.verify(path, path, digests=tmp_path / "kept.json")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kept.json", "m.safetensors"]


def test_each_tag_of_a_folder_has_a_list_of_its_own(checkpoint, tmp_path):
    made = shutil.copytree(checkpoint("zero1-fp32", "awkward", 2).checkpoint, tmp_path / "z")
    shutil.copytree(made / "global_step4", made / "global_step8")
    report = ckpt_tools.checksum(made, tag="global_step8")
    assert report.destination == str(made / "global_step8" / DIGESTS_NAME)
    assert ckpt_tools.verify(made, tag="global_step8").num_digests == len(report.digests)
    assert ckpt_tools.verify(made).num_digests is None
    assert ckpt_tools.verify(made / "global_step8").num_digests == len(report.digests)
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    ckpt_tools.convert(tmp_path / "m.pt", tmp_path / "u", to="universal", tag="t")
    assert ckpt_tools.checksum(tmp_path / "u" / "t").destination == str(tmp_path / "u" / "t" / DIGESTS_NAME)
    assert ckpt_tools.verify(tmp_path / "u").num_digests == ckpt_tools.verify(tmp_path / "u" / "t").num_digests == 2


def test_the_commands(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(2)}, path)
    code, out, _ = command("verify", path)
    assert code == 0 and "no digests are stored with" in out
    assert command("checksum", path) == (0, f"{path}.digests.json: digests of 1 tensor, 8 B\n", "")
    assert command("checksum", path)[0] == 8
    code, out, _ = command("checksum", path, "--output", "-")
    assert code == 0 and json.loads(out)["digests"][0]["name"] == "a"
    code, out, _ = command("verify", path)
    assert code == 0 and "match 1 recorded digest" in out
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, out, _ = command("verify", path)
    assert code == 6 and "a" in out and "blake3" in out


@pytest.mark.parametrize("to", FORMATS)
def test_a_conversion_writes_the_digests_of_what_it_wrote(to, tmp_path):
    torch.save(small_state(), tmp_path / "m.pt")
    report = ckpt_tools.convert(tmp_path / "m.pt", tmp_path / "out", to=to, checksum=True, **for_ranks(to, 2))
    assert report.digests is not None and report.to_json()["digests"] == report.digests
    made = Path(report.digests).read_bytes()
    assert (ckpt_tools.verify(tmp_path / "out").num_digests or 0) >= 3
    assert ckpt_tools.checksum(tmp_path / "out", overwrite=True).destination == report.digests
    assert Path(report.digests).read_bytes() == made
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.pt", "out"]


def test_a_list_never_speaks_of_another_file(tmp_path):
    torch.save(small_state(), tmp_path / "m.pt")
    target = tmp_path / "out.safetensors"
    ckpt_tools.convert(tmp_path / "m.pt", target, checksum=True)
    with pytest.raises(DestinationExistsError, match="checksum=True"):
        ckpt_tools.convert(tmp_path / "m.pt", target, overwrite=True, include=["a.*"])
    assert ckpt_tools.verify(target).num_digests == 4
    ckpt_tools.convert(tmp_path / "m.pt", target, overwrite=True, include=["a.*"], checksum=True)
    assert ckpt_tools.verify(target).num_digests == 1
    target.unlink()
    with pytest.raises(DestinationExistsError, match="overwrite=True"):
        ckpt_tools.convert(tmp_path / "m.pt", target, checksum=True)
    assert not target.exists()


def test_a_folder_is_replaced_with_its_list(tmp_path):
    torch.save(small_state(), tmp_path / "m.pt")
    for _ in range(2):
        ckpt_tools.convert(tmp_path / "m.pt", tmp_path / "out", to="zero1", checksum=True, overwrite=True)
        assert (ckpt_tools.verify(tmp_path / "out").num_digests or 0) > 3
    ckpt_tools.convert(tmp_path / "m.pt", tmp_path / "out", to="zero1", overwrite=True)
    assert ckpt_tools.verify(tmp_path / "out").num_digests is None


def _failing(*_: object, **__: object) -> None:
    raise StoreError("the disk is gone")


def test_a_failure_while_hashing_leaves_nothing(tmp_path, monkeypatch):
    torch.save(small_state(), tmp_path / "m.pt")
    monkeypatch.setattr(digests, "compute_digests", _failing)
    for target in ("out.pt", "out"):
        with pytest.raises(StoreError, match="the disk is gone"):
            ckpt_tools.convert(tmp_path / "m.pt", tmp_path / target, to="torch", checksum=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]


LOADED = {"dcp": "fsdp2", "zero1": "zero1-fp32", "zero3": "zero3-fp32", "universal": "universal-zero2-fp32"}


@pytest.mark.parametrize("to", tiered(LOADED, test=("dcp",), extended=("zero1", "universal")))
def test_frameworks_load_folders_with_digests(to, checkpoint, resume, tmp_path):
    made = checkpoint("fsdp2", "plain", 2)
    report = ckpt_tools.convert(made.checkpoint, tmp_path / "out", to=to, checksum=True, **for_ranks(to, 2))
    assert Path(report.digests or "").is_file()
    resumed = resume(LOADED[to], "plain", tmp_path / "out", 2)
    assert_same_bits(Truth.load(made.root).best_weights(), resumed.best_weights())


@pytest.mark.extended
def test_transformers_loads_a_folder_with_digests(checkpoint, tmp_path):
    from transformers import GPT2LMHeadModel

    made = checkpoint("transformers", "plain", 1).checkpoint
    folder = shutil.copytree(made, tmp_path / "gpt2")
    ckpt_tools.checksum(folder)
    wanted, found = (GPT2LMHeadModel.from_pretrained(path).state_dict() for path in (made, folder))
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_where_nothing_can_be_read_before_it_is_published_the_list_follows(name, tmp_path, monkeypatch):
    fs, url = fsspec.filesystem("memory"), f"memory://{tmp_path.name}/{name}"
    torch.save(small_state(), tmp_path / "m.pt")
    options: dict[str, Any] = {"to": "safetensors", "checksum": True}
    report = ckpt_tools.convert(tmp_path / "m.pt", url, **options)
    assert fs.exists(report.digests)
    assert ckpt_tools.verify(url).num_digests == 4
    monkeypatch.setattr(digests, "compute_digests", _failing)
    with pytest.raises(StoreError, match=r"gone; .*out.* is written, but its digests are not"):
        ckpt_tools.convert(tmp_path / "m.pt", url, overwrite=True, **options)
    assert not fs.exists(report.digests) and ckpt_tools.verify(url).num_digests is None


def test_digests_in_an_object_store(s3, tmp_path):
    """Of a folder, of a file, and of what was there before; the list of a file is never left beside another."""
    torch.save(small_state(), tmp_path / "m.pt")
    url = f"s3://{BUCKET}/{s3.new_prefix()}"
    for name, digests_name in (("out", f"out/{DIGESTS_NAME}"), ("o.safetensors", "o.safetensors.digests.json")):
        report = ckpt_tools.convert(tmp_path / "m.pt", url + name, to="safetensors", checksum=True)
        assert report.digests == url + digests_name
        assert ckpt_tools.verify(url + name).num_digests == 4
        assert ckpt_tools.diff(tmp_path / "m.pt", url + name).equal
    with pytest.raises(DestinationExistsError, match="checksum=True"):
        ckpt_tools.convert(tmp_path / "m.pt", f"{url}o.safetensors", overwrite=True)
    ckpt_tools.convert(tmp_path / "m.pt", f"{url}z", to="zero3", tag="t")
    assert ckpt_tools.checksum(f"{url}z").destination == f"{url}z/t/{DIGESTS_NAME}"
    assert (ckpt_tools.verify(f"{url}z").num_digests or 0) > 4
