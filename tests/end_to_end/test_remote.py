"""Any format to any format where source, destination or both are on a real S3 server: the very bytes of a local run."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ckpt_tools
from ckpt_tools.errors import CkptError
from ckpt_tools.planning.plan import REMOTE_BYTES
from ckpt_tools.stores.s3.client import Bucket
from ckpt_tools.stores.s3.options import S3Options
from tests.support.commands import run_command
from tests.support.files import files_below
from tests.support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY
from tests.support.sweep import tiered

SOURCES = {
    "dcp": ("fsdp2", "plain", 2),
    "zero3": ("zero3-fp32", "awkward", 2),
    "universal": ("universal-zero3-fp32", "plain", 1),
    "safetensors": ("safetensors-sharded", "scalar", 1),
    "torch": ("torch-training", "scalar", 1),
}
TARGETS = {
    "dcp": ("out", {"to": "dcp"}),
    "zero3": ("out", {"to": "zero3", "world_size": 2}),
    "universal": ("out", {"to": "universal"}),
    "safetensors": ("out", {"to": "safetensors", "state": "model", "max_shard_size": "100KB"}),
    "file": ("whole.safetensors", {"state": "all"}),
    "torch": ("whole.pt", {"state": "all"}),
}
# No training state can be made from a model's safetensors.
CELLS = [pair for pair in itertools.product(SOURCES, TARGETS) if pair[0] != "safetensors" or pair[1] == "safetensors"]


@pytest.fixture(scope="module")
def uploaded(s3_server):
    """``uploaded(checkpoint)``: its URL on the server, where each is put once, by another road than ours."""
    prefix, urls = s3_server.new_prefix(), {}

    def url_of(checkpoint: Path) -> str:
        if checkpoint not in urls:
            key = f"{prefix}{len(urls)}/{checkpoint.name}"
            s3_server.upload(f"{key}/", checkpoint)
            urls[checkpoint] = f"s3://{BUCKET}/{key}"
        return urls[checkpoint]

    return url_of


@pytest.mark.parametrize(
    ("source", "target"),
    tiered(
        CELLS,
        test=["dcp-zero3", "zero3-torch", "torch-dcp", "safetensors-safetensors", "universal-file"],
        extended=["zero3-universal", "universal-zero3"],
    ),
)
def test_cell(source, target, checkpoint, s3, uploaded, tmp_path):
    made = checkpoint(*SOURCES[source]).checkpoint
    name, options = TARGETS[target]
    ckpt_tools.convert(made, tmp_path / "expected" / name, **options)
    expected = files_below(tmp_path / "expected" / name)
    assert expected

    ckpt_tools.convert(uploaded(made), tmp_path / "down" / name, **options)
    assert files_below(tmp_path / "down" / name) == expected
    for from_ in (made, uploaded(made)):
        prefix = s3.new_prefix()
        report = ckpt_tools.convert(from_, f"s3://{BUCKET}/{prefix}{name}", **options)
        assert report.destination == f"s3://{BUCKET}/{prefix}{name}"
        files = s3.files(prefix)
        assert {path.removeprefix(name).lstrip("/") or ".": data for path, data in files.items()} == expected
        assert s3.open_uploads(prefix) == []


@pytest.mark.extended
def test_no_file_holds_a_secret(s3, checkpoint, tmp_path, monkeypatch):
    """Neither the output, nor what lies beside it while a run is under way."""
    prefix, found, turns = s3.new_prefix(), {}, itertools.count()
    secrets = {"HF_TOKEN": "token-4711-of-nobody", "AWS_SECRET_ACCESS_KEY": "another-secret"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    options = {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": s3.endpoint}

    def look(*_: int) -> None:
        found.update({str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()})
        if next(turns) % 8 == 0:
            found.update(s3.files(prefix))

    url, made = f"s3://{BUCKET}/{prefix}", checkpoint("fsdp2", "plain", 2).checkpoint
    for source, to in ((made, f"{url}up"), (f"{url}up", tmp_path / "down"), (f"{url}up", f"{url}again")):
        more: dict[str, Any] = {"storage_options": options, "on_progress": look}
        ckpt_tools.convert(source, to, to="dcp", checksum=True, resume=True, **more)
        look()
    found.update(s3.files(prefix))
    assert all(f"{each}/.metadata" in " ".join(found) for each in ("up", "down", "again"))
    assert any(b'"plan"' in data for data in found.values()), "no journal was seen"
    for name, data in found.items():
        assert not any(secret.encode() in data for secret in (SECRET_KEY, *secrets.values())), name


@pytest.fixture
def dcp(checkpoint):
    return checkpoint(*SOURCES["dcp"]).checkpoint


def of_bucket(*options: str) -> tuple[str, ...]:
    return ("inspect", "s3://checkpoints/x", *(word for each in options for word in ("--storage-option", each)))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("inspect", "s3://checkpoints/nothing/here"), 3, "there is no file or folder"),
        (("inspect", "s3://no-such-bucket/x"), 3, "there is no bucket"),
        (of_bucket(f"key={ACCESS_KEY}", "secret=wrong", "retries=0"), 5, "refused"),
        (of_bucket("endpoint_url=http://127.0.0.1:9", "retries=0"), 5, "no answer"),
        (of_bucket("what"), 2, "KEY=VALUE"),
        (("inspect", "gs://bucket/x"), 2, "gcsfs"),
        (("inspect", "nonsense://bucket/x"), 4, "nonsense"),
    ],
)
def test_errors_are_one_sentence(s3, words, code, said):
    done = run_command(*words)
    assert (done.code, "Traceback" in done.err, said in done.err) == (code, False, True), done.err


def test_every_function_takes_storage_options(s3, tmp_path, monkeypatch):
    """Instead of the environment. Clients of that outlive a test, so it is watched with which options stores are
    opened."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    used, parse = [], S3Options.parse
    monkeypatch.setattr(S3Options, "parse", lambda options: used.append(options) or parse(options))
    reach: dict[str, Any] = {"storage_options": {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": s3.endpoint}}
    folder = f"s3://{BUCKET}/{s3.new_prefix()}"
    torch.save({"layer.weight": torch.arange(8.0).reshape(2, 4), "layer.bias": torch.ones(2)}, tmp_path / "a.pt")
    file, run, other = f"{folder}a.safetensors", f"{folder}run", f"{folder}other"
    for _ in range(2):  # replaced, with the digests beside it, the second time
        ckpt_tools.convert(tmp_path / "a.pt", file, checksum=True, overwrite=True, **reach)
    assert ckpt_tools.verify(file, **reach).num_digests == 2
    assert ckpt_tools.plan(file, run, to="dcp", **reach).num_tensors == 2
    ckpt_tools.convert(file, run, to="dcp", world_size=2, **reach)
    ckpt_tools.reshard(run, other, world_size=1, checksum=True, **reach)
    ckpt_tools.consolidate(run, f"{folder}weights", **reach)
    assert ckpt_tools.checksum(file, output=f"{folder}digests.json", **reach).num_bytes == 40
    assert ckpt_tools.verify(run, digests=f"{folder}digests.json", **reach).num_digests == 2
    assert ckpt_tools.verify(file, run, **reach).equal
    assert ckpt_tools.diff(run, other, **reach).equal
    assert ckpt_tools.scan(run, **reach).clean
    assert not ckpt_tools.clean(run, **reach).leftovers
    assert ckpt_tools.inspect(run, **reach).format == "dcp"
    assert ckpt_tools.open(run, **reach)["layer.bias"][...].tolist() == [1, 1]
    with ckpt_tools.claim(f"{folder}claimed", **reach) as claim:
        claim.check()
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(4, 2)})
    ckpt_tools.load_into(model, None, run, **reach)
    assert model["layer"].weight.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ckpt_tools.storage_reader(run, **reach).read_metadata().state_dict_metadata
    assert used and all(options == reach["storage_options"] for options in used)


@pytest.fixture
def fetched(monkeypatch):
    """The number of bytes of each range that is read of the server from here on."""
    read, found = Bucket.read_into, []

    def watched(self: Bucket, key: str, start: int, buffer: memoryview, **more: Any) -> None:
        found.append(len(buffer))
        read(self, key, start, buffer, **more)

    monkeypatch.setattr(Bucket, "read_into", watched)
    return found


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A DCP of two ranks, 84 MiB: shards of 20 and 11 MiB, between which there is a little."""
    random, folder = np.random.default_rng(3), tmp_path_factory.mktemp("wide")
    shapes = {"embed": (4096, 2560), "a.norm": (2560,), "a.up": (2252, 2560), "b.norm": (2560,), "b.up": (2252, 2560)}
    save_file({name: random.random(shape, np.float32) for name, shape in shapes.items()}, folder / "in.safetensors")
    ckpt_tools.convert(folder / "in.safetensors", folder / "dcp", to="dcp", world_size=2)
    ckpt_tools.convert(folder / "dcp", folder / "out.safetensors")
    return folder


def test_shards_are_copied_within_the_service(s3, wide, fetched):
    prefix = s3.new_prefix()
    s3.upload(f"{prefix}in/", wide / "dcp")
    planned = ckpt_tools.plan(f"s3://{BUCKET}/{prefix}in", f"s3://{BUCKET}/{prefix}out.safetensors")
    fetched.clear()
    report = ckpt_tools.convert(f"s3://{BUCKET}/{prefix}in", f"s3://{BUCKET}/{prefix}out.safetensors")
    assert s3.files(prefix)["out.safetensors"] == (wide / "out.safetensors").read_bytes()
    # Uploaded are three parts of 5 MiB: the header, and what is between the large tensors.
    assert report.bytes_written - report.bytes_copied < 16 << 20
    assert report.plan.num_tasks == planned.num_tasks
    # Of what is copied only headers come here: one of 64 KiB for each of 6 shards.
    assert sum(fetched) < report.bytes_written - report.bytes_copied + (1 << 20)
    elsewhere = ckpt_tools.plan(wide / "dcp", f"s3://{BUCKET}/{prefix}other.safetensors")
    assert elsewhere.num_tasks < planned.num_tasks


KILLED = """
import os, sys
import ckpt_tools
from ckpt_tools.transfer import journal
from ckpt_tools.stores.s3.client import Bucket

send, sent = Bucket.upload_part, []

def send_or_die(*given):
    sent.append(send(*given))
    if len(sent) == 3:
        os.kill(os.getpid(), 9)
    return sent[-1]

Bucket.upload_part = send_or_die
journal.MAX_SHARE = 1e9  # every task is noted at once
ckpt_tools.convert(*sys.argv[1:], workers=1, resume=True, dtype="bfloat16")
"""
"""It dies with the service's answer to its third part."""


def test_a_killed_run_is_resumed(s3, tmp_path):
    source = tmp_path / "a.safetensors"
    save_file({"a": np.random.default_rng(2).standard_normal((20 << 20,), np.float32)}, source)
    ckpt_tools.convert(source, tmp_path / "b.safetensors", dtype="bfloat16")
    prefix = s3.new_prefix()
    out = f"s3://{BUCKET}/{prefix}b.safetensors"
    assert subprocess.run([sys.executable, "-c", KILLED, str(source), out]).returncode == -9
    assert s3.open_uploads(prefix) == ["b.safetensors"] and "b.safetensors" not in s3.keys(prefix)
    assert {left.kind for left in ckpt_tools.clean(out, dry_run=True).leftovers} >= {"open upload", "log"}
    report = ckpt_tools.convert(source, out, dtype="bfloat16", workers=1, resume=True)
    assert 0 < report.bytes_recovered < 4 * (9 << 20)
    assert report.bytes_recovered + report.bytes_written == report.plan.bytes_written
    assert s3.files(prefix) == {"b.safetensors": (tmp_path / "b.safetensors").read_bytes()}
    assert s3.open_uploads(prefix) == []


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    return fs


def test_any_store_of_fsspec(dcp, memory, tmp_path):
    for path, data in files_below(dcp).items():
        memory.pipe_file(f"/ckpt/{path}", data)
    ckpt_tools.convert(dcp, tmp_path / "expected", to="zero2", world_size=2)
    expected = files_below(tmp_path / "expected")
    ckpt_tools.convert("memory://ckpt", "memory://out", to="zero2", world_size=2)
    assert {path.removeprefix("/out/"): memory.cat_file(path) for path in memory.find("/out")} == expected
    ckpt_tools.convert("memory://out", "memory://one/whole.pt", state="all", workers=3)
    ckpt_tools.convert(tmp_path / "expected", tmp_path / "whole.pt", state="all")
    assert memory.cat_file("/one/whole.pt") == (tmp_path / "whole.pt").read_bytes()
    assert memory.find("/one") == ["/one/whole.pt"]
    assert ckpt_tools.verify("memory://out", tmp_path / "expected").equal


@pytest.mark.parametrize("is_remote_source", [False, True])
@pytest.mark.parametrize("workers", [None, 3])
def test_a_plan_says_the_memory_that_a_conversion_takes(dcp, memory, tmp_path, is_remote_source, workers, monkeypatch):
    """A remote URL on either side means a client, and more threads, of which each has buffers."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    for path, data in files_below(dcp).items():
        memory.pipe_file(f"/ckpt/{path}", data)
    source, target = ("memory://ckpt", tmp_path / "out") if is_remote_source else (dcp, "memory://out")
    planned = ckpt_tools.plan(source, target, to="zero2", workers=workers)
    assert planned == ckpt_tools.convert(source, target, to="zero2", workers=workers).plan
    local = ckpt_tools.plan(dcp, tmp_path / "other", to="zero2", workers=workers)
    more = planned.peak_memory_bytes - local.peak_memory_bytes
    assert more >= REMOTE_BYTES and (more > REMOTE_BYTES) is (workers is None)


def test_a_failing_source_leaves_nothing_in_a_store_of_fsspec(dcp, memory):
    for path, data in files_below(dcp).items():
        memory.pipe_file(f"/ckpt/{path}", data if path == ".metadata" else data[: len(data) // 2])
    with pytest.raises(CkptError):
        ckpt_tools.convert("memory://ckpt", "memory://out", to="zero2", world_size=2, workers=4)
    assert memory.find("/out") == []
