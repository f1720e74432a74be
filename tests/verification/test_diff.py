"""``diff``: every way in which two tensors can differ, in every format, against numpy's own arithmetic."""

import json
import math
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.notes import Outcome
from ckpt_tools.errors import UsageError
from ckpt_tools.verification.deviation import Deviation, measure_deviation
from ckpt_tools.verification.report import Aspect, VerifyReport
from tests.support.commands import run_command as command
from tests.support.saved_files import change_file

Tensors = Mapping[str, torch.Tensor]


def bits32(*patterns: int) -> torch.Tensor:
    return torch.from_numpy(np.array(patterns, np.uint32).view(np.float32).copy())


def diff_of(tmp_path: Path, a: Tensors, b: Tensors, **options: Any) -> VerifyReport:
    """Of a safetensors file and a torch file."""
    save_file(dict(a), tmp_path / "a.safetensors")
    torch.save(dict(b), tmp_path / "b.pt")
    return ckpt_tools.diff(tmp_path / "a.safetensors", tmp_path / "b.pt", **options)


def only(report: VerifyReport) -> tuple[str, Aspect, Deviation | None]:
    (difference,) = report.differences
    return difference.key.fqn, difference.aspect, difference.deviation


def test_values(tmp_path):
    a = torch.arange(10, dtype=torch.float32)
    b = a.clone()
    b[2], b[9] = 2.5, 8
    assert only(diff_of(tmp_path, {"w": a}, {"w": b})) == (
        "w",
        Aspect.VALUES,
        Deviation(num_differing=2, max_abs=1.0, max_rel=0.2),
    )


def test_bits_of_nans_and_signs_of_zeros_differ_and_are_counted_apart(tmp_path):
    a = bits32(0x7FC0_0000, 0x7FC0_0000, 0x0000_0000, 0x3F80_0000, 0x7FC0_0001)
    b = bits32(0x7FC0_0001, 0xFFC0_0000, 0x8000_0000, 0x7FC0_0000, 0x7FC0_0001)
    report = diff_of(tmp_path, {"w": a}, {"w": b})
    assert only(report)[2] == Deviation(num_differing=4, num_nan_bits=2, num_zero_signs=1, num_one_nan=1)
    assert report.differences[0].what == (
        "4 of 5 elements differ; 2 in the bits of a NaN; 1 in the sign of a zero; 1 NaN on one side only"
    )


def test_infinities(tmp_path):
    inf = float("inf")
    report = diff_of(tmp_path, {"w": torch.tensor([inf, inf, 1.0])}, {"w": torch.tensor([inf, -inf, 1.0])})
    assert only(report)[2] == Deviation(1, max_abs=inf, max_rel=inf)
    assert json.loads(json.dumps(report.to_json()))["differences"][0]["deviation"]["max_abs"] == "inf"


def test_a_tensor_on_one_side_alone_and_one_of_another_shape(tmp_path):
    a = {"w": torch.ones(2), "a": torch.ones(2), "x": torch.ones(2, 3)}
    report = diff_of(tmp_path, a, {"w": torch.ones(2), "b": torch.ones(2), "x": torch.ones(3, 2)})
    assert {(d.key.fqn, d.aspect, d.what, d.deviation) for d in report.differences} == {
        ("a", Aspect.MISSING, "only in A", None),
        ("b", Aspect.UNEXPECTED, "only in B", None),
        ("x", Aspect.SHAPE, "shape [2, 3] in A, [3, 2] in B", None),
    }


def test_another_dtype_is_a_difference_and_its_values_are_compared_as_numbers(tmp_path):
    a = torch.tensor([1.0, 2.0, 1 / 3, float("nan")])
    report = diff_of(tmp_path, {"w": a}, {"w": a.bfloat16()})
    name, aspect, deviation = only(report)
    assert (name, aspect) == ("w", Aspect.DTYPE) and deviation is not None
    assert deviation.num_differing == 1
    assert deviation.max_abs == abs(float(a[2].double()) - float(a[2].bfloat16().double()))


def test_a_loss_free_cast_has_the_same_numbers(tmp_path):
    a = torch.randn(100).bfloat16()
    report = diff_of(tmp_path, {"w": a}, {"w": a.float()})
    assert only(report) == ("w", Aspect.DTYPE, Deviation())
    assert report.differences[0].what == "bfloat16 in A, float32 in B; as numbers, 0 of 100 elements differ"


def test_packed_values_and_those_of_another_dtype_differ_in_every_element(tmp_path):
    a = torch.zeros(2, 3, dtype=torch.uint8)
    report = diff_of(tmp_path, {"w": a.view(torch.float4_e2m1fn_x2)}, {"w": a})
    assert only(report) == ("w", Aspect.DTYPE, Deviation(num_differing=6))


def test_a_difference_in_any_block_of_a_large_tensor(tmp_path):
    a = torch.zeros(3 << 20)
    b = a.clone()
    b[0], b[1 << 20], b[-1] = 1, 2, 3
    assert only(diff_of(tmp_path, {"w": a}, {"w": b}))[2] == Deviation(3, max_abs=3.0, max_rel=1.0)


def test_tied_names_are_compared_under_each_name_and_count_once(tmp_path):
    shared, other = torch.ones(3), torch.zeros(3)
    torch.save({"w": shared, "tied": shared}, tmp_path / "a.pt")
    torch.save({"w": other, "tied": other}, tmp_path / "b.pt")
    found = ckpt_tools.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert (found.num_tensors, found.num_differing, found.num_equal, found.num_bytes) == (1, 1, 0, 12)
    save_file({"w": shared, "tied": shared.clone()}, tmp_path / "b.safetensors")
    assert ckpt_tools.diff(tmp_path / "a.pt", tmp_path / "b.safetensors").equal


def test_names_are_rewritten_and_chosen(tmp_path):
    a, b = {"m.w": torch.ones(2), "m.x": torch.ones(2)}, {"w": torch.ones(2), "x": torch.zeros(2)}
    assert only(diff_of(tmp_path, a, b, rename=[r"^m\.="]))[0] == "x"
    assert diff_of(tmp_path, a, b, rename=[r"^m\.="], exclude=["x"]).equal
    assert diff_of(tmp_path, a, b, rename=[r"^m\.="], include=["w"]).num_tensors == 1
    (tmp_path / "map.json").write_text('{"m.w": "w", "m.x": "x"}')
    assert only(diff_of(tmp_path, a, b, key_map=tmp_path / "map.json"))[0] == "x"
    with pytest.raises(UsageError, match="matches no tensor"):
        diff_of(tmp_path, a, b, include=["nothing"])
    with pytest.raises(UsageError, match="no tensor on either side"):
        diff_of(tmp_path, a, b, include=["w"], exclude=["*"])


def test_a_moment_that_differs_is_named(checkpoint, tmp_path):
    made = checkpoint("fsdp2", "awkward", 2).checkpoint
    ckpt_tools.convert(made, tmp_path / "all.pt", state="all")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    name, slots = next((name, s) for name, s in state["optim"]["state"].items() if s["exp_avg"].numel())
    slots["exp_avg"].view(-1)[0] += 1
    torch.save(state, tmp_path / "other.pt")
    report = ckpt_tools.diff(made, tmp_path / "other.pt")
    assert [(d.key.fqn, d.key.slot) for d in report.differences] == [(name, "exp_avg")]
    assert ckpt_tools.diff(made, tmp_path / "other.pt", state="model").equal


def test_which_copies_were_compared_is_said(checkpoint, tmp_path):
    made = checkpoint("zero3-bf16", "awkward", 2).checkpoint
    ckpt_tools.convert(made, tmp_path / "m.safetensors", weights="model")
    report = ckpt_tools.diff(made, tmp_path / "m.safetensors", state="model", weights="model")
    assert report.equal
    ckpt_tools.convert(made, tmp_path / "dcp", to="dcp")
    report = ckpt_tools.diff(made, tmp_path / "dcp")
    assert report.equal and "model copies" in report.notes[0].what
    assert {d.aspect for d in ckpt_tools.diff(made, tmp_path / "dcp", weights="model").differences} == {Aspect.DTYPE}


REAL = [np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint8]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(REAL))
def test_deviations_are_those_of_python_numbers(data, dtype):
    """Python's integers are exact, and its floats are float64."""
    draw = hnp.arrays(dtype, 6)
    a, b = data.draw(draw), data.draw(draw)
    found = measure_deviation(*(each.view(np.uint8) for each in (a, b)), *[DType(np.dtype(dtype).name)] * 2)
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x.tobytes() != y.tobytes()]
    values = [(x.item(), y.item()) for x, y in pairs]
    numbers = [(x, y) for x, y in values if not (math.isnan(x) or math.isnan(y))]
    assert found.num_differing == len(pairs)
    assert found.num_zero_signs == sum(x == y == 0 for x, y in numbers)
    assert found.num_nan_bits == sum(math.isnan(x) and math.isnan(y) for x, y in values)
    assert found.num_one_nan == sum(math.isnan(x) != math.isnan(y) for x, y in values)
    assert found.max_abs == max((abs(x - y) for x, y in numbers), default=0)
    assert found.max_rel <= 2 or math.isinf(found.max_rel)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_complex_numbers(dtype, tmp_path):
    a = torch.tensor([1 + 1j, 0j, complex("inf+1j"), complex("nan")], dtype=torch.complex128).to(dtype)
    b = torch.tensor([4 + 5j, 0j, complex("inf+2j"), complex("nan")], dtype=torch.complex128).to(dtype)
    for name, tensors in (("a", a), ("b", b)):
        torch.save({"w": tensors}, tmp_path / f"{name}.pt")
    deviation = only(ckpt_tools.diff(tmp_path / "a.pt", tmp_path / "b.pt"))[2]
    assert deviation is not None
    assert (deviation.num_differing, deviation.max_abs, deviation.max_rel) == (2, 5.0, float("inf"))


def sparse_model(path: Path, dtype: str, num_bytes: int) -> None:
    """One tensor of zeros that take no room on the disk."""
    item_bytes = {"F32": 4, "I8": 1}[dtype]
    entry = {"dtype": dtype, "shape": [num_bytes // item_bytes], "data_offsets": [0, num_bytes]}
    header = json.dumps({"w": entry}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_bytes)


@pytest.mark.parametrize("dtype", ["F32", "I8"])
def test_memory_is_a_few_blocks_whatever_the_tensors_are(dtype, tmp_path):
    num_bytes = 64 << 20
    for name in ("a", "b"):
        sparse_model(tmp_path / f"{name}.safetensors", dtype, num_bytes)
    with (tmp_path / "b.safetensors").open("r+b") as file:
        file.seek(-(4 << 20), 2)
        file.write(b"\x01" * (4 << 20))
    tracemalloc.start()
    try:
        report = ckpt_tools.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", workers=1)
        ckpt_tools.checksum(tmp_path / "a.safetensors", workers=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert only(report)[2] is not None
    assert peak < num_bytes / 3


@pytest.mark.parametrize(
    "to", ["dcp", "zero2", *(pytest.param(to, marks=pytest.mark.extended) for to in ("universal", "torch"))]
)
def test_the_model_alone_is_verified_in_a_whole_checkpoint(to, checkpoint, tmp_path):
    """State beside the model is a note and no difference, as ``diff`` with the same option has none; a weight is."""
    made = checkpoint("zero3-bf16", "awkward", 2).checkpoint
    ckpt_tools.convert(made, tmp_path / "out", to=to, state="all")
    report = ckpt_tools.verify(made, tmp_path / "out", state="model")
    assert report.equal and ckpt_tools.diff(made, tmp_path / "out", state="model").equal
    (note,) = report.notes
    assert note.outcome is Outcome.NOT_COMPARED and "has them besides the model" in note.why
    ckpt_tools.convert(made, tmp_path / "model.safetensors", exclude=["*bias*"])
    found = ckpt_tools.verify(tmp_path / "model.safetensors", tmp_path / "out", state="model").differences
    assert found and {each.aspect for each in found} == {Aspect.UNEXPECTED}


# Values beside the tensors: two checkpoints in which they alone differ are not said to be the same


def run_saved(path: Path, *, step: int = 5, seed: int = 1, when: Any = None, **options: Any) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0].update(options)
    own = {
        "step": step,
        "args": {"seed": seed, "name": "run"},
        "rng": torch.arange(4),
        **({"when": when} if when else {}),
    }
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **own}, path)
    return path


@pytest.fixture
def a(tmp_path):
    return run_saved(tmp_path / "a.pt")


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"lr": 5e-4}, "lr of weight and 1 more: 0.001 in A, 0.0005 in B"),
    "betas": ({"betas": (0.8, 0.99)}, "betas of weight and 1 more: [0.9, 0.999] in A, [0.8, 0.99] in B"),
    "step": ({"step": 6}, "step: 5 in A, 6 in B"),
    "own": ({"seed": 2}, "args.seed: 1 in A, 2 in B"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_value_is_a_difference(name, a, tmp_path):
    changed, line = DIFFERENT[name]
    b = run_saved(tmp_path / "b.pt", **changed)
    assert not ckpt_tools.verify(a, b).equal
    code, out, _ = command("diff", a, b)
    assert (code, out.splitlines()[1:]) == (6, [line])
    assert out.splitlines()[0] == (
        "9 tensors (2 weights, 6 of the optimizer, 1 other) are the same, bit for bit; "
        "1 value beside the tensors differs"
    )
    found = json.loads(command("diff", a, b, "--json")[1])
    assert (found["num_differing"], found["num_entries"], found["equal"]) == (0, 1, False)
    assert ckpt_tools.diff(a, b, state="model").equal


def test_tensors_and_values_are_counted_apart(a, tmp_path):
    b = run_saved(tmp_path / "b.pt", lr=1.0)
    change_file(b, lambda value: value["model"]["bias"].add_(1))
    first = command("diff", a, b)[1].splitlines()[0]
    assert first == "1 of 9 tensors differs: 1 in values; 1 value beside the tensors differs"


@pytest.mark.parametrize("to", ["dcp", "zero2", "universal", "torch", "sharded"])
def test_a_conversion_keeps_them(to, a, tmp_path):
    """The user's own tensor too, which other formats have at another path."""
    written = {"state": "all"} if to == "torch" else {} if to == "universal" else {"world_size": 2}
    ckpt_tools.convert(a, tmp_path / "out", to=to, **written)
    report = ckpt_tools.verify(a, tmp_path / "out", **({"state": "all"} if to == "torch" else {}))
    assert report.equal, report.differences
    other = run_saved(tmp_path / "b.pt", lr=0.5, step=9)
    shown = [each.key.fqn for each in ckpt_tools.verify(other, tmp_path / "out", state="all").differences]
    assert shown == ["lr of weight and 1 more", "step"]


def test_objects_are_said_not_to_be_compared(tmp_path):
    paths = [run_saved(tmp_path / name, when=Path("x")) for name in ("a.pt", "b.pt")]
    (note,) = ckpt_tools.diff(*paths).notes
    assert (note.outcome.value, note.what) == ("not compared", "when")
    assert note.why == "it is neither a tensor nor a plain value"
