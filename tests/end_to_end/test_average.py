"""``average`` against numpy in float64 and torch's ``AveragedModel``, of sources of any format and number of ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch_file
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import ckpt_tools
from ckpt_tools.core.averages import Average, AverageRule
from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.notes import Outcome
from ckpt_tools.errors import DestinationExistsError, DifferenceError, UnsupportedError, UsageError
from tests.support.commands import run_command
from tests.support.ranks import for_ranks
from tests.support.s3_server import BUCKET


def save_sources(folder: Path, states: Sequence[dict[str, NDArray[Any]]]) -> list[Path]:
    paths = [folder / f"s{number}.safetensors" for number in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        save_file(state, path)
    return paths


def average(sources: Sequence[Path], folder: Path, **options: Any) -> dict[str, NDArray[Any]]:
    ckpt_tools.average(sources, folder / "out.safetensors", overwrite=True, **options)
    return load_file(folder / "out.safetensors")


def bits(array: NDArray[Any]) -> bytes:
    return array.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("options", [{}, {"coefficients": [0.5, 2, 0.25, 1, 3]}, {"decay": 0.9}])
def test_the_average_is_numpys_in_float64_within_the_bound_of_its_sums(dtype, options, tmp_path):
    """Each source adds at most three roundings of the sum; the cast is one more."""
    random = np.random.default_rng(7)
    shapes = {"wide": (3, 300_001), "tall": (4099, 7), "zero-d": (), "none": (0, 4)}
    states = [{n: np.asarray(random.standard_normal(s) * 3).astype(dtype) for n, s in shapes.items()} for _ in range(5)]
    found = average(save_sources(tmp_path, states), tmp_path, **options)
    assert {name: array.shape for name, array in found.items()} == shapes
    coefficients = np.asarray(options.get("coefficients", [1] * 5), np.float64)
    if "decay" in options:
        coefficients = np.array([0.9**4, *(0.1 * 0.9 ** (4 - k) for k in range(1, 5))])
    wide = np.longdouble if dtype is np.float64 else np.float64
    for name, array in found.items():
        terms = [
            c * state[name].astype(wide) for c, state in zip(coefficients / coefficients.sum(), states, strict=True)
        ]
        wanted, size = sum(terms), np.abs([state[name].astype(wide) for state in states]).max(axis=0)
        bound = 3 * 5 * (2.0**-53 if dtype is np.float64 else 2.0**-24) * size
        bound = bound + (0 if dtype in (np.float32, np.float64) else float(ml_dtypes.finfo(dtype).eps) / 2) * np.abs(
            wanted
        )
        bound = bound + (2.0**-25 if dtype is np.float16 else 0)
        assert array.dtype == dtype
        assert np.all(np.abs(array.astype(wide) - wanted) <= bound), name


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(300, 70)
        self.norm = torch.nn.BatchNorm1d(70)
        self.register_buffer("mask", torch.arange(6) % 2 == 0)


def train(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model.norm(model.line(torch.randn(16, 300))).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(("decay", "average_function"), [(None, None), (0.7, get_ema_avg_fn(0.7))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bits_are_those_of_torchs_averaged_model(decay, average_function, dtype, tmp_path):
    """Of the running mean, and with ``decay`` of its exponential one; buffers are those of the last model."""
    torch.manual_seed(3)
    torch.set_default_dtype(dtype)
    try:
        model = Model()
        averaged = AveragedModel(model, avg_fn=average_function)
        optimizer, sources = torch.optim.SGD(model.parameters(), lr=0.5), []
        for step in range(7):
            train(model, optimizer)
            averaged.update_parameters(model)
            sources.append(tmp_path / f"step-{step}.pt")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, sources[-1])
    finally:
        torch.set_default_dtype(torch.float32)
    buffers = ["norm.running_*"]
    report = ckpt_tools.average(sources, tmp_path / "out.safetensors", decay=decay, buffers=buffers)
    found, wanted = load_torch_file(tmp_path / "out.safetensors"), averaged.module.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes(), name
    notes = {(note.outcome, note.what) for note in report.notes}
    assert (Outcome.AVERAGED, "4 tensors") in notes
    assert any(note.outcome is Outcome.KEPT and "norm.num_batches_tracked" in note.what for note in report.notes)
    assert any(note.outcome is Outcome.DROPPED and note.what == "parameter groups" for note in report.notes)


NUMBERS = st.floats(-(2.0**60), 2.0**60, width=32) | st.sampled_from([np.inf, -np.inf])


@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=2, max_size=5), st.sampled_from([None, 0.5]))
def test_agreeing_sources_are_their_average_and_others_have_to_be_finite(rows, decay):
    def averaged(parts: list[NDArray[Any]]) -> NDArray[Any]:
        total, labels = np.empty_like(parts[0]), tuple(f"s{number}" for number in range(len(parts)))
        rule = AverageRule.of(len(parts), decay=decay)
        Average(total.shape, DType.FLOAT32, (), rule, "w", labels).compute_box(Box.whole(total.shape), parts, total)
        return total

    parts = [np.array(row, np.float32) for row in rows]
    if decay is None:
        np.testing.assert_array_equal(averaged(parts[:1] * len(parts)), parts[0])
    values = np.array(parts)
    agree = (values == values[0]).all(axis=0)
    if np.isfinite(values[:, ~agree]).all():
        found = averaged(parts)
        np.testing.assert_array_equal(found[np.isinf(values[0])], values[0][np.isinf(values[0])])
        assert np.isfinite(found[~agree]).all()
    else:
        with pytest.raises(
            DifferenceError, match=r"w would not be finite in the average: NaN or infinities are in s\d"
        ):
            averaged(parts)


@pytest.mark.parametrize("options", [{}, {"decay": 0.5}])
@pytest.mark.parametrize(
    ("value", "said"),
    [(np.nan, r"in \S*s1\.safetensors;"), (-np.inf, r"in \S*s1\.safetensors;"), (3.4e38, "are too large")],
)
def test_one_value_that_is_not_finite_is_refused_and_nothing_is_written(value, said, options, tmp_path):
    states = [{"b": np.ones(4, np.float32), "w": np.ones((70, 3000), np.float32)} for _ in range(3)]
    states[1]["w"][-1, -1] = value
    states[0]["w"][-1, -1] = -3.4e38 if value == 3.4e38 else 1
    sources = save_sources(tmp_path, states)
    if value == 3.4e38 and options:
        assert average(sources, tmp_path, **options)["w"][-1, -1] == np.float32(0.5)
        return
    with pytest.raises(DifferenceError, match=f"w would not be finite in the average: .*{said}.*leave out the sources"):
        ckpt_tools.average(sources, tmp_path / "out.safetensors", **options)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in sources}
    assert average([sources[0], sources[2]], tmp_path, **options)["b"].tolist() == [1] * 4


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """Two steps of a model in safetensors, of tensors longer than a piece and with awkward shapes."""
    folder = tmp_path_factory.mktemp("states")
    random = np.random.default_rng(11)
    shapes = {"embed.weight": (1031, 517), "wide.weight": (3, 300_000), "bias": (17,)}
    made = [{n: random.standard_normal(s).astype(np.float32).reshape(s) for n, s in shapes.items()} for _ in range(3)]
    return save_sources(folder, made)


FORMATS = {"dcp": 3, "zero3": 4, "zero1": 2, "megatron": 2, "torch": 1, "sharded": 3, "universal": 1}


@pytest.mark.parametrize("options", [{}, {"decay": 0.25, "dtype": "bfloat16"}])
def test_the_bits_do_not_depend_on_formats_ranks_workers_or_cuts(options, states, tmp_path):
    wanted = average(states, tmp_path, **options)
    for number, (to, ranks) in enumerate(FORMATS.items()):
        others = list(states)
        others[number % 3] = tmp_path / f"other-{to}"
        ckpt_tools.convert(states[number % 3], others[number % 3], to=to, **for_ranks(to, ranks))
        found = average(others, tmp_path, workers=1 + number % 3, **options)
        assert {name: bits(array) for name, array in found.items()} == {n: bits(a) for n, a in wanted.items()}, to
    ckpt_tools.average(states, tmp_path / "cut", to="safetensors", max_shard_size="1MB", memory="90MB", **options)
    assert ckpt_tools.diff(tmp_path / "cut", tmp_path / "out.safetensors").equal


@pytest.mark.parametrize("to", ["dcp", "zero2", "torch", "megatron", "npz"])
def test_every_target_has_the_average(to, states, tmp_path):
    average(states, tmp_path)
    out = tmp_path / ("other.npz" if to == "npz" else "other")
    ckpt_tools.average(states, out, to=to, **for_ranks(to, 3))
    assert ckpt_tools.diff(out, tmp_path / "out.safetensors", state="model").equal


def test_the_master_is_averaged_and_a_mix_of_dtypes_is_named(checkpoint, tmp_path):
    """ZeRO-2 in bf16 keeps fp32 masters: the average is of them, as of the fp32 weights that they are."""
    runs = [checkpoint(kind, "plain", 2).checkpoint for kind in ("zero2-bf16", "zero3-bf16")]
    masters = [tmp_path / "m0.safetensors", tmp_path / "m1.safetensors"]
    for run, master in zip(runs, masters, strict=True):
        ckpt_tools.convert(run, master)
    ckpt_tools.average(runs, tmp_path / "a.safetensors")
    buffers = [each.name for each in ckpt_tools.inspect(runs[1]).tensors if each.kind == "buffer"]
    wanted = average(masters, tmp_path, buffers=buffers)
    weights = [name for name, array in wanted.items() if array.dtype == np.float32]
    assert weights
    assert ckpt_tools.diff(tmp_path / "a.safetensors", tmp_path / "out.safetensors").equal
    ckpt_tools.convert(masters[1], tmp_path / "half.safetensors", dtype="bfloat16")
    mixed_sources = [masters[0], tmp_path / "half.safetensors"]
    report = ckpt_tools.average(mixed_sources, tmp_path / "mixed.safetensors", buffers=buffers)
    assert any("dtypes differ" in note.why for note in report.notes)
    mixed = load_file(tmp_path / "mixed.safetensors")
    assert {mixed[name].dtype.name for name in weights} == {"bfloat16"}


def test_ties_are_kept_and_what_is_tied_in_the_last_must_be_equal_in_the_others(tmp_path):
    paths = [tmp_path / f"s{number}.pt" for number in range(3)]
    for number, path in enumerate(paths):
        weight = torch.full((2, 3), 1.0 + number)
        other = weight if number != 0 else weight.clone()
        torch.save({"embed.weight": weight, "head.weight": other}, path)
    report = ckpt_tools.average(paths, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt")
    assert report.plan.tied and found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
    assert torch.equal(found["head.weight"], torch.full((2, 3), 2.0))
    torch.save({"embed.weight": torch.ones(2, 3), "head.weight": torch.zeros(2, 3)}, paths[0])
    with pytest.raises(DifferenceError, match=r"of .*s0\.pt, which .*s2\.pt ties"):
        ckpt_tools.average(paths, tmp_path / "no.pt")
    assert not (tmp_path / "no.pt").exists()
    ckpt_tools.average(paths[::-1], tmp_path / "untied.pt")
    assert torch.load(tmp_path / "untied.pt")["head.weight"][0, 0].item() == pytest.approx(5 / 3)


def test_differences_are_named_before_anything_is_written(tmp_path):
    states = [
        {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32), "n": np.ones(1, np.int64)},
        {"a": np.ones((3, 2), np.float32), "c": np.ones(4, np.float32), "n": np.ones(1, np.int32)},
    ]
    sources = save_sources(tmp_path, states)
    with pytest.raises(UsageError) as raised:
        ckpt_tools.average(sources, tmp_path / "out.safetensors")
    for said in (
        "a is [2, 3] of float32 in",
        "[3, 2] of float32",
        "s0.safetensors lacks c",
        "lacks b of",
        "n is [1] of",
    ):
        assert said in str(raised.value)
    assert {path.name for path in tmp_path.iterdir()} == {"s0.safetensors", "s1.safetensors"}
    states[0] |= {"a": states[1]["a"] * 3, "n": states[1]["n"]}
    found = average(save_sources(tmp_path, states), tmp_path, exclude=["b", "c"])
    assert {name: array.ravel()[0] for name, array in found.items()} == {"a": 2, "n": 1}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"coefficients": [1]}, "has 1 numbers for 2 sources"),
    ({"coefficients": [1, 0]}, "not positive and finite"),
    ({"coefficients": [1, float("nan")]}, "not positive and finite"),
    ({"coefficients": [1e308, 1e308]}, "not positive and finite"),
    ({"coefficients": [1, 2], "decay": 0.5}, "contradict"),
    ({"decay": 1.0}, "not between 0 and 1"),
    ({"last": 2}, "of one run, and 2 sources"),
    ({"tag": "t"}, "is for DeepSpeed"),
    ({"buffers": ["bias"], "strip": "auto"}, "without recipe= or strip="),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_does_not_fit_is_refused(options, said, states, tmp_path):
    with pytest.raises(UsageError, match=said):
        ckpt_tools.average(states[:2], tmp_path / "out.safetensors", **options)


def test_sources_that_cannot_be_averaged_are_refused(states, tmp_path):
    out = tmp_path / "out.safetensors"
    for sources, said in (([states[0]], "here is one"), ([], "here are none"), ([states[0]] * 2, "is named twice")):
        with pytest.raises(UsageError, match=said):
            ckpt_tools.average(sources, out)
    with pytest.raises(DestinationExistsError, match="is the source itself"):
        ckpt_tools.average(states[:2], states[0], overwrite=True)
    quantized = {"q.weight": np.ones((4, 4), np.int8), "q.weight_scale": np.ones(4, np.float32)}
    save_file(quantized, tmp_path / "q1.safetensors")
    save_file(quantized, tmp_path / "q2.safetensors")
    with pytest.raises(UnsupportedError, match="is quantized"):
        ckpt_tools.average([tmp_path / "q1.safetensors", tmp_path / "q2.safetensors"], out)
    for number in (1, 2):
        complex_numbers = torch.full((2,), number, dtype=torch.complex64)
        torch.save({"w": torch.ones(2), "freqs": complex_numbers}, tmp_path / f"c{number}.pt")
    ckpt_tools.average([tmp_path / "c1.pt", tmp_path / "c2.pt"], out)
    assert load_torch_file(out)["freqs"][0] == 2


def test_a_run_is_averaged_in_the_order_of_its_steps(states, tmp_path):
    run = tmp_path / "run"
    for step, number in ((900, 0), (1000, 1), (2000, 2), (10000, 0)):
        ckpt_tools.convert(states[number], run / f"step-{step}", to="dcp", world_size=2)
    (run / "step-3000").mkdir()
    (run / "step-3000" / "__0_0.distcp").write_bytes(b"x")
    chosen = [run / f"step-{step}" for step in (1000, 2000, 10000)]
    ckpt_tools.average(chosen, tmp_path / "wanted.safetensors", decay=0.9)
    done = run_command("average", run, tmp_path / "a.safetensors", "--last", 3, "--every", 1000, "--decay", 0.9)
    assert done.code == 0 and "not averaged: step-3000" in done.err
    assert "averaged: 3 tensors (over 3 sources: " in " ".join(done.out.split())
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "wanted.safetensors").read_bytes()
    with pytest.raises(UsageError, match="has 3 complete checkpoints whose steps are multiples of 1,000"):
        ckpt_tools.average(run, tmp_path / "b.safetensors", last=4, every=1000)
    ckpt_tools.convert(states[0], run / "other-step-1000", to="dcp")
    with pytest.raises(UsageError, match="are both of step 1,000"):
        ckpt_tools.average(run, tmp_path / "b.safetensors", every=1000)


def test_an_average_is_resumed_and_continued_in_parts(states, tmp_path):
    wanted = average(states, tmp_path)
    for number in (2, 1):
        report = ckpt_tools.average(states, tmp_path / "parts", to="safetensors", part=f"{number}/2")
        assert report.missing_parts == (() if number == 1 else (1,))
    found = load_file(tmp_path / "parts" / "model.safetensors")
    assert {name: bits(array) for name, array in found.items()} == {n: bits(a) for n, a in wanted.items()}


def test_sources_of_several_formats_in_a_store_are_averaged_there(states, s3, tmp_path):
    wanted = average(states, tmp_path, decay=0.25)
    place = f"s3://{BUCKET}/{s3.new_prefix()}"
    ckpt_tools.convert(states[0], f"{place}first", to="dcp", world_size=3)
    ckpt_tools.convert(states[1], f"{place}second", to="zero3", world_size=2)
    ckpt_tools.convert(states[2], f"{place}run/step-3.pt")
    sources = [f"{place}first", states[1], f"{place}run@step=3"]
    for number, options in enumerate([{}, {"workers": 1}, {"max_shard_size": "1MB"}]):
        out = f"{place}out-{number}"
        ckpt_tools.average(
            [f"{place}first", f"{place}second", sources[2]], out, to="safetensors", decay=0.25, **options
        )
        assert ckpt_tools.diff(out, tmp_path / "out.safetensors").equal
    ckpt_tools.average(sources, tmp_path / "down.safetensors", decay=0.25)
    assert {name: bits(array) for name, array in load_file(tmp_path / "down.safetensors").items()} == {
        name: bits(array) for name, array in wanted.items()
    }
