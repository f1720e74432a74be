"""Layers of a pipeline without ZeRO whose file is missing, as far as the optimizers of the stages show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from ckpt_tools.core.boxes import Shape
from ckpt_tools.errors import IncompleteError
from ckpt_tools.formats.deepspeed.zero_reader.missing_layers import Layer, Parameter, check
from fixtures.corpus import deepspeed_pipeline
from tests.layouts.contents import contents
from tests.support.damage import assert_is_named, copied_run, unlink

A, B, V = (4, 4), (4,), (16, 4)

UNKNOWN = Parameter(None, 0, b"")


def of(*shapes: Shape, tied: Mapping[Shape, bytes] | None = None) -> list[Parameter]:
    """Parameters with moments of their own, but for tied ones."""
    return [
        Parameter(shape, 4, (tied or {}).get(shape, f"{id(shapes)} {number}".encode()))
        for number, shape in enumerate(shapes)
    ]


def flat(numel: int, head: bytes) -> Parameter:
    return Parameter(None, numel, head)


def layers(shapes: Mapping[int, Sequence[Shape]], pins: Mapping[int, int] | None = None) -> list[Layer]:
    return [Layer(number, Counter(each), (pins or {}).get(number)) for number, each in shapes.items()]


TIED = {V: b"tied"}

FITTING: dict[str, tuple[list[Layer], list[list[Parameter]]]] = {
    "two stages": (layers({0: [A, B], 1: [A, B], 2: [A]}), [of(A, B, A, B), of(A)]),
    "functions between": (layers({1: [A], 5: [B]}), [of(A), of(B)]),
    "frozen layers": (layers({0: [A], 1: [A], 2: [A], 3: [A]}), [of(A), of(A)]),
    "a stage without layers": (layers({0: [A]}), [of(A), []]),
    "an optimizer of nothing": (layers({0: [A]}), [[], []]),
    "tied, with two files": (layers({0: [V], 1: [A], 2: [V]}), [of(V, tied=TIED), of(V, A, tied=TIED)]),
    "tied, with the first file": (layers({0: [V], 1: [A]}), [of(V, tied=TIED), of(V, A, tied=TIED)]),
    "tied, with the last file": (layers({0: [A], 1: [V]}), [of(V, A, tied=TIED), of(V, tied=TIED)]),
    "states that are not there": (layers({0: [A, B], 1: [A]}), [[*of(A), UNKNOWN], [UNKNOWN]]),
    "flat groups": (layers({0: [A], 1: [B]}), [[flat(16, b"0")], [flat(4, b"1")]]),
    "flat groups that begin with a tied one": (layers({0: [V], 1: [B]}), [[flat(64, b"0")], [flat(68, b"0")]]),
    "buffers say the stage": (layers({0: [A], 1: [A], 2: [A]}, {1: 0}), [of(A), of(A)]),
}

MISSING: dict[str, tuple[list[Layer], list[list[Parameter]], str]] = {
    "the first": (layers({1: [B], 2: [A]}), [of(A, B), of(A)], r"1 parameter of shape \[4, 4\].*layer 0"),
    "one between": (layers({0: [A], 2: [A]}), [of(A, A), of(A)], r"shape \[4, 4\].*none of layer 1 and after layer 2$"),
    "the last": (layers({0: [A], 1: [A]}), [of(A, A), of(A, B)], r"shape \[4\].*none after layer 1$"),
    "both tied ones": (
        layers({1: [A], 2: [B]}),
        [of(V, A, tied=TIED), of(V, B, tied=TIED)],
        r"1 parameter of shape \[16, 4\]",
    ),
    "a tied one whose shape another layer has": (
        layers({1: [V], 2: [B]}),
        [of(V, tied=TIED) + of(V), of(V, B, tied=TIED)],
        r"1 parameter of shape \[16, 4\]",
    ),
    "one of the stage, and frozen ones lie in another": (
        layers({1: [B], 2: [A], 3: [A]}, {2: 1}),
        [of(A, B), of(A)],
        r"shape \[4, 4\].*none of layer 0$",
    ),
    "states that are not there": (layers({0: [A]}), [[UNKNOWN, UNKNOWN], []], "1 parameter more"),
    "flat groups": (layers({0: [A]}), [[flat(16, b"0")], [flat(4, b"1")]], "4 elements more"),
    "tensors of a layer": (layers({0: [A], 1: [B]}, {1: 1}), [of(A, A), of(B)], "or one of them lacks tensors"),
}


def named(stages: list[list[Parameter]]) -> list[tuple[str, list[Parameter]]]:
    return [(f"mp_rank_{stage:02d}", own) for stage, own in enumerate(stages)]


@pytest.mark.parametrize("name", FITTING)
def test_layers_that_fit(name):
    have, stages = FITTING[name]
    check(have, named(stages))


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_layer_is_an_error(name):
    have, stages, text = MISSING[name]
    with pytest.raises(IncompleteError, match=text):
        check(have, named(stages))


@pytest.mark.parametrize(("layer", "stage"), [(0, 0), (3, 0), (6, 1)])
def test_a_file_that_is_missing(layer, stage, tmp_path):
    """Layer 3 has two vectors, and a frozen one of their shape lies in its stage."""
    damage = unlink(f"layer_0{layer}-model_states.pt")
    run = copied_run("deepspeed-pipeline-fp32", tmp_path)
    assert_is_named((damage, IncompleteError, rf"mp_rank_0{stage}_model_states.pt.*file of a layer is missing"), run)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_tied_layer_needs_one_file(dtype, tmp_path):
    """The last stage has the parameter in its optimizer, and a function instead of a file."""
    state, _ = deepspeed_pipeline.run_pipeline(tmp_path, 2, 0, dtype, "first")
    manifest, found = contents(tmp_path)
    assert {key.fqn for key in found if key.slot == "weight"} == {
        name.replace("tied_modules.embed", "0") for name in state.weights
    }
    assert any("which layers the model has, and there are files of layers 0, 1, 3" in n.why for n in manifest.notes)
    (tmp_path / "global_step4" / "layer_00-model_states.pt").unlink()
    with pytest.raises(IncompleteError, match=r"1 parameter of shape \[16, 7\]"):
        contents(tmp_path)
