"""``scan`` refuses what a loader would run, in every carrier, and nothing of what the frameworks wrote."""

import argparse
import collections
import contextlib
import datetime
import decimal
import io
import json
import os
import pickle
import random
import re
import shutil
import struct
import subprocess
import sys
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan

import ckpt_tools
import fixtures
from ckpt_tools.errors import CkptError, UnsafeError
from ckpt_tools.serialization.pickle.closed_list import is_listed
from ckpt_tools.serialization.pickle.dcp_metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageInfo
from ckpt_tools.serialization.pickle.dump import dumps
from fixtures.store import Fixture
from tests.serialization.archives import npy, saved, saved_legacy, zipped
from tests.support.commands import run_command as command
from tests.support.sweep import swept
from tests.verification.scan.generator import npy_of_objects
from tests.verification.scan.hosts import HOSTS, put
from tests.verification.scan.scanner import is_clean

ROOT = Path(__file__).parents[2]
Checkpoint = Callable[[str, str, int], Fixture]


def host_of(kind: str, folder: Path, checkpoint: Checkpoint) -> None:
    host, _, _ = HOSTS[kind]
    if host in SMALL:
        SMALL[host](folder)
    else:
        shutil.copytree(checkpoint(host, "lone", 1).checkpoint, folder)


def _torch(folder: Path) -> None:
    folder.mkdir()
    torch.save({"weight": torch.arange(6.0).reshape(2, 3)}, folder / "model.pt")


def _dcp(folder: Path) -> None:
    tree = {"app": {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "note": {"epoch": 3}}}
    with warnings.catch_warnings(action="ignore"):
        dcp.save(tree, checkpoint_id=str(folder), no_dist=True)


def _universal(folder: Path) -> None:
    with TemporaryDirectory() as before:
        _torch(Path(before, "torch"))
        ckpt_tools.convert(Path(before, "torch"), folder, to="universal")


SMALL: dict[str, Callable[[Path], None]] = {"torch": _torch, "dcp": _dcp, "universal": _universal}
"""Hosts of a tensor or two: every command reads all of a host for every sample."""


@pytest.mark.parametrize("kind", HOSTS)
def test_a_call_in_any_file_of_a_checkpoint_is_found_and_not_run(kind, checkpoint, tmp_path):
    canary, folder = tmp_path / "canary", tmp_path / "host"
    host_of(kind, folder, checkpoint)
    assert ckpt_tools.scan(folder).clean
    put(kind, folder, b"cos\nmkdir\n(V%b\ntR." % str(canary).encode())
    found = [each.what for each in ckpt_tools.scan(folder).findings]
    assert found and ("os.mkdir" in " ".join(found) or kind == "torch, tar")
    for read in (ckpt_tools.inspect, lambda folder: ckpt_tools.convert(folder, tmp_path / "out", to="torch")):
        with contextlib.suppress(CkptError):
            read(folder)
    assert not canary.exists()


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_no_command_starts_a_program_or_a_connection_whatever_a_pickle_holds(checkpoint, tmp_path):
    """Every payload in one kind of file at least; nor does one open a file of others."""
    trace, work = tmp_path / "trace", tmp_path / "work"
    work.mkdir()
    for kind in HOSTS:
        host_of(kind, work / kind, checkpoint)
    calls = "trace=execve,execveat,connect,socket,fork,vfork,open,openat,creat,unlink,unlinkat,rename,renameat2,kill"
    strace = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", trace, "-e", calls, sys.executable, "-c"]
    code = "import sys; from tests.verification.scan.hosts import read_payloads; read_payloads(sys.argv[1])"
    done = subprocess.run([*strace, code, work], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = trace.read_text()
    opened = re.findall(r'(\w+)\((?:AT_FDCWD, |\d+, )?"([^"]*)"', found)
    own = (str(work), str(ROOT), sys.prefix, sys.base_prefix, "/usr/", "/lib", "/etc/", "/proc/", "/sys/", "/dev/")
    assert len([path for call, path in opened if call.startswith("exec")]) == 1, "Python itself"
    assert [path for _, path in opened if path.startswith("/") and not path.startswith(own)] == []
    assert not re.search(r"\b(connect|socket|kill|v?fork)\(", found)


# What is clean

TORCH_SCRIPT = "torch-script"
"""The one kind that is a program, and said to be one."""


SLOW_TO_MAKE = ("universal-zero1-fp32", "universal-zero3-fp32")
"""Kinds that differ little from others that are scanned in ``make test``."""


def sweep() -> list[Any]:
    found = swept(fixtures.CORE)
    slow = [each for each in found if each.values[0].kind in SLOW_TO_MAKE]
    later = [pytest.param(*each.values, id=each.id, marks=[*each.marks, pytest.mark.extended]) for each in slow]
    return [*(each for each in found if each not in slow), *later]


@pytest.mark.parametrize("wanted", sweep())
def test_what_frameworks_wrote_is_clean(wanted, checkpoint):
    """Torch, DCP in all layouts, DeepSpeed in all stages, transformers with its arguments and RNG."""
    report = ckpt_tools.scan(checkpoint(wanted.kind, wanted.case, wanted.world_size).checkpoint)
    if wanted.kind == TORCH_SCRIPT:
        assert any("TorchScript archive" in finding.what for finding in report.findings)
    else:
        assert report.clean, report.findings
    assert report.num_pickles or wanted.kind.startswith((TORCH_SCRIPT, "safetensors", "transformers", "fsdp2-hf"))


def test_a_generator_of_numpy_before_2_is_clean():
    """It names its maker too."""
    made = b"cnumpy.random._pickle\n__generator_ctor\n(VPCG64\ncnumpy.random._pickle\n%b\ntR."
    assert is_clean({"a.pkl": made % b"__bit_generator_ctor"})
    assert not is_clean({"a.pkl": made % b"other"})


def test_arrays_of_records_are_clean_if_their_sizes_fit():
    records = np.zeros(2, [("a", "f4"), ("b", "S3"), ("c", [("d", "i2"), ("e", "U2")], (2,))])
    assert is_clean({"a.npy": npy(records)})
    assert is_clean({"a.pkl": pickle.dumps(records, 4)})
    assert is_clean({"a.pkl": pickle.dumps(records.view(np.recarray), 4)})
    text = pickle.dumps(np.zeros(2, "S3"), 4)
    of_four = text.replace(b"K\x03K\x01K\x00t", b"K\x04K\x01K\x00t")
    assert is_clean({"a.pkl": text}) and of_four != text and not is_clean({"a.pkl": of_four})


LEFT_OUT = {"torch._utils._rebuild_device_tensor_from_numpy"}
"""What torch's own loader takes and the closed list does not: none is in a checkpoint that we know."""


def test_every_global_of_torchs_own_list_is_clean():
    """Its own, and not what modules add when they are imported: that depends on the tests before."""
    from torch._weights_only_unpickler import _get_allowed_globals

    parts = [name.rpartition(".")[::2] for name in _get_allowed_globals()]
    assert {".".join(part) for part in parts if not is_listed(*part)} == LEFT_OUT


def genuine() -> dict[str, Any]:
    """What people keep beside weights."""
    generator = np.random.default_rng(3)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "rng": [random.getstate(), np.random.get_state(), torch.get_rng_state(), generator, np.random.RandomState(1)],
        "arrays": [np.arange(3), np.float32(2), np.array(["a"]), np.array([{"x": 1}], dtype=object), np.bool_(True)],
        "args": argparse.Namespace(lr=0.1, path=Path("x"), dtype=torch.bfloat16, device=torch.device("cpu")),
        "kept": [collections.Counter("aab"), collections.deque([1]), collections.defaultdict(list, x=[1])],
        "times": [datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), datetime.timedelta(1), decimal.Decimal("1.5")],
        "plain": [b"bytes", bytearray(b"x"), {1, 2}, frozenset({3}), 1 + 2j, range(3), slice(1), 2**70],
        "id": uuid.UUID(int=5),
        "plan": SavePlan([]),
        "buffer": io.BytesIO(b"state"),
    }  # fmt: skip


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_python_and_numpy_pickle_is_clean(protocol, tmp_path):
    value = genuine()
    if protocol < 2:
        del value["plain"], value["buffer"]
    (tmp_path / "state.pkl").write_bytes(pickle.dumps(value, protocol))
    (tmp_path / "state.pt").write_bytes(saved(value, pickle_protocol=max(protocol, 2)))
    (tmp_path / "legacy.pt").write_bytes(saved_legacy(value, pickle_protocol=max(protocol, 2)))
    assert ckpt_tools.scan(tmp_path).findings == ()


# What is not

HARM = b"cos\nsystem\n(Vid\ntR."
CALL, NAMES, RUNS = "it calls os.system", "it names os.system", "a loader of pickles could run it"
UNSAFE = ("runs", "could run", "outside")


def found(data: bytes, tmp_path: Path, name: str = "model.pt") -> tuple[list[str], bool]:
    """What a scan of a file says, and whether it is unsafe."""
    path = tmp_path / "found" / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(data)
    report = ckpt_tools.scan(tmp_path / "found")
    return [finding.what for finding in report.findings], any(each.danger in UNSAFE for each in report.findings)


def _with_a_second_directory() -> bytes:
    """miniz takes the last end record that it finds, also in what another calls its comment."""
    inner, outer = zipped({"archive/data.pkl": HARM}), zipped({"archive/data.pkl": b"N."})
    return outer[:-2] + struct.pack("<H", len(inner)) + inner


TENSOR = {"w": torch.arange(4.0)}
IN_A_ZIP = zipped({"archive/data.pkl": HARM})
PLACES: dict[str, tuple[bytes, str]] = {
    "after a pickle": (pickle.dumps({"x": 1}) + HARM, "more data follows the end of the pickle"),
    "after the storages of a legacy file": (saved_legacy(TENSOR) + HARM, "after the last storage"),
    "after two legacy files": (saved_legacy(TENSOR) * 2 + HARM, "after the last storage"),
    "before damage": (HARM[:-1] + b"\xff\xff", NAMES),
    "cut off": (HARM[:-1], NAMES),
    "compressed": (zipped({"archive/data.pkl": HARM}, compress=True), "is compressed"),
    "with a wrong checksum": (
        zipped({"archive/data.pkl": HARM.replace(b"id", b"ls")}).replace(b"Vls", b"Vid"), "its checksum is wrong",
    ),
    "twice in a zip": (zipped({"archive/data.pkl": b"N.", "archive/other.pkl": HARM}), "belongs to no tensor"),
    "without a name of a pickle": (zipped({"archive/data.pkl": b"N.", "archive/notes": HARM}), "belongs to no tensor"),
    "in a zip in a zip": (zipped({"archive/data.pkl": b"N.", "archive/inner.pt": IN_A_ZIP}), "belongs to no tensor"),
    "in an array of objects": (npy_of_objects(HARM), CALL),
    "named otherwise in its record": (
        IN_A_ZIP.replace(b"archive/data", b"archive/dota", 1), "does not start where the directory says",
    ),
    "behind a prefix": (b"\0" * 10 + IN_A_ZIP, "0x00 is not an opcode"),
    "in bytes of bytes": (
        pickle.dumps(b"x") + b"c_pickle\nloads\nC" + bytes([len(HARM)]) + HARM + b"\x85R.",
        "more data follows the end of the pickle",
    ),
    "beyond the first read": (pickle.dumps(["x" * 100_000, b"y" * 300_000])[:-1] + b"0" + HARM, CALL),
    "in a second directory": (_with_a_second_directory(), "end record"),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_every_place_of_a_pickle_is_refused(place, tmp_path):
    data, said = PLACES[place]
    (finding,), unsafe = found(data, tmp_path, "a.npy" if place == "in an array of objects" else "model.pt")
    assert said in finding
    assert unsafe == (said in (NAMES, CALL))


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("config.json", pickle.dumps(1)[:2] + HARM, RUNS),
        (".hidden/model.pt", pickle.dumps(1)[:2] + HARM, CALL),
        ("a/b/rng_state_0.pth", pickle.dumps(1)[:2] + HARM, CALL),
        ("weights.safetensors", pickle.dumps(1)[:2] + HARM, RUNS),
        ("model.safetensors.index.json", b'{"weight_map": {"w": "../secret.safetensors"}}', "outside"),
        ("latest", b"../elsewhere", "outside"),
        ("config.yaml", b"a: !!python/object/apply:os.system ['id']\n", ""),
        ("modeling.py", b"print(1)\n", ""),
    ],
)
def test_every_file_is_looked_at(name, data, said, tmp_path):
    findings, unsafe = found(data, tmp_path, name)
    assert said in findings[0] and unsafe
    assert command("scan", tmp_path / "found")[0] == 7


@pytest.mark.parametrize(
    ("name", "data", "is_finding"),
    [
        ("cut.pt", saved(TENSOR)[:300], True),
        ("noise.bin", bytes(range(256)), True),
        ("text.pkl", b"no pickle at all", True),
        ("torn.metadata", pickle.dumps([1, 2, 3])[:-4], True),
        ("legacy.pt", saved_legacy(TENSOR)[:-3], True),
        ("padded.pkl", pickle.dumps(1) + b"\0" * 64, True),
        ("logo.png", b"\x89PNG\r\n\x1a\n" + bytes(50), True),
        ("pytorch_model.bin", struct.pack("<Q", 640) + b"{" + b" " * 638 + b"}", True),
        ("config.json", b'{"auto_map": {"AutoModel": "modeling.Model"}}', True),
        ("README.md", b"cos is a function\nand so is sin\nRead on.\n", False),
        ("model.safetensors", struct.pack("<Q", 2) + b"{}", False),
        ("latest", b"global_step4", False),
        ("empty.pt", b"", False),
        ("trainer_state.json", b'{"global_step": 4}', False),
    ],
)
def test_what_cannot_be_followed_is_a_finding_and_what_is_no_pickle_is_none(name, data, is_finding, tmp_path):
    findings, unsafe = found(data, tmp_path, name)
    assert (bool(findings), unsafe) == (is_finding, False)
    assert command("scan", tmp_path / "found", "--json")[0] == (7 if is_finding else 0)


def test_names_that_lead_out_are_findings(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "model.pt").write_bytes(HARM)
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "linked").symlink_to(tmp_path / "outside")
    (tmp_path / "inside" / "model.pt").symlink_to(tmp_path / "outside" / "model.pt")
    metadata = Metadata({"x": BytesStorageMetadata()}, None, {MetadataIndex("x"): StorageInfo("../outside/x", 0, 1)})
    (tmp_path / "inside" / ".metadata").write_bytes(dumps(metadata))
    report = ckpt_tools.scan(tmp_path / "inside")
    assert {(finding.file, finding.danger) for finding in report.findings} == {
        (name, "outside") for name in ("linked", "model.pt", ".metadata")
    }


# Options and commands


class Own:
    def __init__(self) -> None:
        self.rate = 0.1


def test_what_the_user_vouches_for_is_clean_and_said(tmp_path):
    name = f"{Own.__module__}.{Own.__name__}"
    torch.save({"config": Own()}, tmp_path / "state.pt")
    refused = ckpt_tools.scan(tmp_path)
    assert (refused.clean, refused.names) == (False, (name,))
    allowed = ckpt_tools.scan(tmp_path, allow=[name])
    assert (allowed.clean, allowed.allowed, allowed.num_files) == (True, (name,), 1)
    assert not ckpt_tools.scan(tmp_path, allow=[f"{Own.__module__}.*"]).clean


def test_the_command_says_what_and_where(tmp_path):
    (tmp_path / "model.pt").write_bytes(zipped({"archive/data.pkl": HARM.replace(b"system", b"[red]\x1b[0m")}))
    code, out, error = command("scan", tmp_path)
    assert code == 7
    assert all(text in out for text in ("model.pt", "archive/data.pkl", "it calls os.[red]\\x1b[0m"))
    assert error.startswith("Error: ") and "Traceback" not in error
    code, out, _ = command("scan", tmp_path, "--json")
    (finding,) = json.loads(out)["findings"]
    assert (code, finding["danger"]) == (7, "runs")
    assert command("scan", tmp_path / "missing")[0] == 3


def test_a_glob_of_exclude_that_matches_nothing_is_said(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    code, out, _ = command("scan", tmp_path, "--exclude", "*.svgg")
    assert (code, "excluded by you, not looked at: 0 files" in out) == (0, True)
    assert "excluded" not in command("scan", tmp_path)[1]


# Calls in other commands


class _Call:
    def __reduce__(self) -> Any:
        return os.getpid, ()


def test_a_call_in_the_place_of_data_is_refused_as_unsafe(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(UnsafeError, match=r"ckpt-tools scan. tells more"):
        ckpt_tools.inspect(tmp_path / "model.pt")


@pytest.mark.parametrize("words", [["inspect"], ["convert", "--to", "safetensors"]])
@pytest.mark.parametrize("form", ["zip", "legacy", "DCP"])
def test_a_call_at_the_top_ends_with_7_and_sends_to_scan(words, form, tmp_path):
    source = tmp_path / "model.pt"
    if form == "DCP":
        source.mkdir()
        (source / ".metadata").write_bytes(pickle.dumps(_Call()))
    else:
        torch.save(_Call(), source, _use_new_zipfile_serialization=form == "zip")
    target = [tmp_path / "out"] if words[0] == "convert" else []
    code, _, error = command(words[0], source, *target, *words[1:])
    assert code == 7
    assert "posix.getpid" in error and "`ckpt-tools scan` tells more" in " ".join(error.split())
    assert not (tmp_path / "out").exists()


def test_a_call_beside_tensors_is_named_in_a_note(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "config": [{"a": _Call()}], "lr": 0.1}, tmp_path / "model.pt")
    (note,) = ckpt_tools.inspect(tmp_path / "model.pt").notes
    assert (note.what, "posix.getpid" in note.why, "scan" in note.why) == ("config", True, True)
    code, out, error = command("inspect", tmp_path / "model.pt")
    assert (code, "posix.getpid" in out + error) == (0, True)
