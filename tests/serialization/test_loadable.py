"""A foreign .pt is written again of nothing but what ``torch.load(weights_only=True)`` takes."""

import argparse
import collections
import enum
import functools
import json
import os
import pathlib
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import DestinationExistsError, LossError, MalformedError, UnsupportedError, UsageError
from ckpt_tools.serialization.loadable import LeftOut, Replaced
from tests.support.commands import run_command as command
from tests.support.refusals import refusal_test


class Trainer:
    """A class that no other program has."""

    def __init__(self) -> None:
        self.weight = torch.ones(3)
        self.twice = self.weight
        self.num = 1


class Colour(enum.Enum):
    RED = 1


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo a loader has run this",)


class Subclass(torch.Tensor):
    pass


Pair = collections.namedtuple("Pair", "a b")


def rewritten(value: Any, folder: Path, **options: Any) -> tuple[Any, ckpt_tools.LoadableReport]:
    """What torch loads of the rewritten file, and the report."""
    torch.save(value, folder / "foreign.pt")
    report = ckpt_tools.make_loadable(folder / "foreign.pt", folder / "plain.pt", overwrite=True, **options)
    return torch.load(folder / "plain.pt", weights_only=True), report


PLAIN: dict[str, Any] = {
    "number": 2**100, "real": 0.5, "complex": 1 + 2j, "text": "größe", "bytes": b"\0\xff", "none": None,
    "bytearray": bytearray(b"ab"), "set": {1, "x"}, "tuple": (1, (2, "3")), "list": [1, [2.5]], "size": torch.Size([2]),
    "dtype": torch.bfloat16, "device": torch.device("cuda", 1), "counter": collections.Counter("aab"),
    "ordered": collections.OrderedDict(b=1, a=2), "empty": {}, 7: "seven", (1, "a"): 2, torch.float32: 3,
}  # fmt: skip


def test_plain_values_stay(tmp_path):
    found, report = rewritten({"w": torch.ones(1), **PLAIN}, tmp_path, strict=True)
    del found["w"]
    assert found == PLAIN
    assert {name: type(value) for name, value in found.items()} == {name: type(each) for name, each in PLAIN.items()}
    assert (report.left_out, report.replaced) == ((), ())


def test_tensors_stay_bit_for_bit(tmp_path):
    names = ("float64", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex64", "uint16")
    tensors = {name: (torch.randn(3, 5) * 9).to(getattr(torch, name)) for name in names}
    tensors |= {"empty": torch.empty(0, 3), "zero": torch.tensor(2.5), "parameter": torch.nn.Parameter(torch.ones(2))}
    found, _ = rewritten(tensors, tmp_path, strict=True)
    for name, tensor in tensors.items():
        assert type(found[name]) is type(tensor) and found[name].dtype is tensor.dtype, name
        assert found[name].shape == tensor.shape and found[name].requires_grad == tensor.requires_grad, name
        assert bits(found[name]) == bits(tensor), name


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_what_was_shared_is_shared(tmp_path):
    base, values = torch.arange(24.0), [1, 2]
    views = {"whole": base, "part": base[3:9].view(2, 3), "turned": base.view(4, 6).t(), "again": base}
    found, _ = rewritten({**views, "a": values, "b": values, "c": {"deep": values}}, tmp_path)
    assert len({found[name].untyped_storage().data_ptr() for name in views}) == 1
    assert found["whole"] is found["again"] and found["turned"].stride() == (1, 6)
    assert found["a"] is found["b"] is found["c"]["deep"]
    for name, view in views.items():
        assert torch.equal(found[name], view)


def test_a_state_dict_keeps_its_metadata_and_a_tensor_its_attributes(tmp_path):
    model = torch.nn.BatchNorm1d(3)
    tensor = torch.ones(2)
    tensor.note = "kept"  # type: ignore[attr-defined]
    found, _ = rewritten({"model": model.state_dict(), "t": tensor}, tmp_path)
    assert found["model"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
    assert found["t"].note == "kept"


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_a_sparse_tensor_stays(tmp_path):
    found, report = rewritten({"s": torch.eye(3).to_sparse()}, tmp_path)
    assert torch.equal(found["s"].to_dense(), torch.eye(3)) and not report.left_out


def test_objects_of_plain_data_become_it(tmp_path):
    value = {
        "w": torch.ones(1),
        "args": argparse.Namespace(lr=0.1, path=pathlib.PurePosixPath("/data/set"), layers=[1, np.int32(-2)]),
        "simple": types.SimpleNamespace(a=1),
        "loss": np.float64(1.5),
        "half": np.float16(0.25),
        "flag": np.bool_(True),
        "wide": np.uint64(2**63),
        "default": collections.defaultdict(list, {"a": [1]}),
        "frozen": frozenset({1}),
    }
    found, report = rewritten(value, tmp_path, strict=True)
    del found["w"]
    assert found == {
        "args": {"lr": 0.1, "path": "/data/set", "layers": [1, -2]}, "simple": {"a": 1}, "loss": 1.5, "half": 0.25,
        "flag": True, "wide": 2**63, "default": {"a": [1]}, "frozen": {1},
    }  # fmt: skip
    assert Replaced("args", "argparse.Namespace", "a dict") in report.replaced
    assert "args.layers[1]" in [each.place for each in report.replaced]
    assert len(report.replaced) == 10


def test_other_objects_are_left_out_and_listed(tmp_path, capfd):
    shared = Trainer()
    value = {
        "w": torch.ones(1),
        "trainer": shared,
        "again": shared,
        "list": [1, shared, torch.ones(2)],
        "tuple": (Colour.RED, 2),
        "evil": Runs(),
        "function": torch.nn.functional.relu,
        "class": torch.nn.Linear,
        "partial": functools.partial(int, base=2),
        "array": np.ones(3),
        "pair": Pair(1, 2),
        "subclass": torch.ones(2).as_subclass(Subclass),
        Colour.RED: "a key",
        "args": argparse.Namespace(trainer=Trainer(), lr=1),
    }
    found, report = rewritten(value, tmp_path)
    assert found["args"] == {"lr": 1} and found["tuple"] == (None, 2) and found["list"][:2] == [1, None]
    assert found.keys() == {"w", "list", "tuple", "args"}
    lost = {each.place: each for each in report.left_out}
    here = f"{__name__}."
    assert lost["trainer"] == LeftOut("trainer", f"{here}Trainer", 1)
    assert lost.keys() >= {"again", "list[1]", "tuple[0]", "args.trainer", "array", "pair", "class", "partial"}
    assert lost["evil"].kind.endswith(".system") and lost["function"].kind.endswith(".relu")
    assert (lost["subclass"].kind, lost["subclass"].num_tensors) == (f"{here}Subclass", 1)
    assert len(report.left_out) == 13
    assert "a loader has run this" not in capfd.readouterr().out
    assert ckpt_tools.scan(tmp_path / "plain.pt").clean


def of(value: Any, target: str = "plain.pt", *, cut: int | None = None, **options: Any) -> Callable[[Path], object]:
    def call(folder: Path) -> object:
        torch.save(value, folder / "foreign.pt")
        if cut is not None:
            (folder / "foreign.pt").write_bytes((folder / "foreign.pt").read_bytes()[:cut])
        try:
            return ckpt_tools.make_loadable(folder / "foreign.pt", folder / target, **options)
        finally:
            assert sorted(path.name for path in folder.iterdir()) == ["foreign.pt"]

    return call


def of_another_file(folder: Path) -> None:
    (folder / "other").write_text("x")
    ckpt_tools.make_loadable(folder / "other", folder / "plain.pt")


def of_a_folder(folder: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save(W, folder / name)
    ckpt_tools.make_loadable(folder, folder / "plain.pt")


W, MODEL = {"w": torch.ones(300)}, torch.nn.Linear(2, 3)
WHOLE = r"is a model \(torch.nn.*Linear\) that was pickled whole"
test_refusals = refusal_test(
    ("strict", of({**W, "t": Trainer()}, strict=True), LossError, r"strict=True.*t \(.*Trainer\)"),
    ("a model", of(MODEL), UnsupportedError, f"the whole file {WHOLE}"),
    ("a model in it", of({"model": MODEL}), UnsupportedError, f"model {WHOLE}"),
    ("no tensor", of({"t": Trainer(), "n": 1}), UnsupportedError, "none would be left"),
    ("an object", of(Trainer()), UnsupportedError, r"which torch\.load\(weights_only=True\) refuses"),
    ("another ending", of(W, "plain.safetensors"), UsageError, r"ends in \.pt, \.pth or \.bin"),
    ("a folder", of_a_folder, UsageError, "is a folder"),
    ("another file", of_another_file, MalformedError, r"not a file of torch\.save"),
    ("itself", of(W, "foreign.pt"), DestinationExistsError, "."),
    ("over itself", of(W, "foreign.pt", overwrite=True), DestinationExistsError, "."),
    *((f"cut at {cut}", of({**W, "t": Trainer()}, cut=cut), MalformedError, ".") for cut in (10, 400, -30)),
)


def test_storages_of_what_is_left_out_are_not_written(tmp_path):
    torch.save({"w": torch.ones(3), "t": {"trainer": Trainer()}}, tmp_path / "foreign.pt")
    report = ckpt_tools.make_loadable(tmp_path / "foreign.pt", tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as archive:
        assert len([name for name in archive.namelist() if "/data/" in name]) == report.num_storages == 1
        assert archive.testzip() is None


def test_the_command_lists_what_is_left_out(tmp_path):
    torch.save({"w": torch.ones(3), "t": Trainer(), "n": np.float64(1)}, tmp_path / "foreign.pt")
    code, out, _ = command("make-loadable", tmp_path / "foreign.pt", tmp_path / "a.pt")
    assert code == 0 and f"left out: t: {__name__}.Trainer with 1 tensor" in " ".join(out.split())
    assert "replaced: n: " in out and "by a number" in out
    found = json.loads(command("make-loadable", tmp_path / "foreign.pt", tmp_path / "b.pt", "--json")[1])
    assert found["left_out"] == [{"place": "t", "kind": f"{__name__}.Trainer", "num_tensors": 1}]
    assert found["num_storages"] == 1
