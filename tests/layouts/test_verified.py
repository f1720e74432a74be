"""Every layout of the corpus through every writer is whole, or refused, or a note names what is not the source's.

``verify`` judges: it gives no false alarm on what is whole, and it finds what a note says is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import ckpt_tools
from ckpt_tools.core.notes import Outcome
from ckpt_tools.core.option_names import WrittenFormat
from ckpt_tools.errors import CkptError
from ckpt_tools.formats.index import written_format
from ckpt_tools.verification.report import Aspect
from fixtures.corpus import layouts, make

pytestmark = pytest.mark.extended

OPENED = [name for name, layout in layouts().items() if layout.opens_as is not None]
TARGETS: tuple[WrittenFormat, ...] = tuple(each for each in get_args(WrittenFormat) if each != "peft")
"""A folder of PEFT holds an adapter alone."""

ALWAYS = {
    ("accelerate-ddp-safetensors", "dcp"),
    ("accelerate-ddp-safetensors", "torch"),
    ("megatron", "dcp"),
    ("megatron", "zero3"),
    ("megatron-fsdp-weights", "megatron"),
    ("composer", "megatron"),
    ("composer", "sharded"),
    ("deepspeed-muon-zero2-bf16", "zero3"),
    ("deepspeed-muon-zero2-bf16", "universal"),
    ("hf-trainer", "zero2"),
}
"""Each has a reason of its own to look different from its source, or to be refused."""

REFUSALS = (
    r"say which they are with param_order=.*state='model'",
    r"keeps an optimizer by the names of its parameters; .*or convert with state='model'",
    r"in one of float32, bfloat16 and float16.*choose one with dtype=",
    r"in one of float32, bfloat16 and float16.*dequantize the weights with dequantize=True",
    r"(GGUF does not support|numpy has no) \w+; .*exclude it",
    r"GGUF holds at most 4 dimensions",
    r"it is none of Llama's, so it is not known how ranks cut it",
)
"""The sentences by which a writer refuses a checkpoint that can be read. Each says what to do."""

NOTED = {
    Aspect.MISSING: Outcome.DROPPED,
    Aspect.UNEXPECTED: Outcome.DEFAULTED,
    Aspect.DTYPE: Outcome.CAST,
}
"""A difference that is no error, and the outcome that the report of the conversion must name for it."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every layout in every format in ``make soak``; in ``make test-all`` each in one, and the peculiar ones."""
    if "target" in metafunc.fixturenames:
        every = [(name, target) for name in OPENED for target in TARGETS]
        in_turn = {(name, TARGETS[number % len(TARGETS)]) for number, name in enumerate(OPENED)}
        is_soak = metafunc.config.getoption("--soak")
        metafunc.parametrize(("name", "target"), every if is_soak else sorted(in_turn | ALWAYS))


def test_what_was_converted_verifies(name, target, tmp_path):
    whole: Any = {"state": "all"} if "max_shard_size" in written_format(target).writing_options else {}
    source, out = make(name).source, tmp_path / "out"
    try:
        report = ckpt_tools.convert(source, out, to=target, **whole)
    except CkptError as error:
        check_refusal(error, tmp_path, lambda: ckpt_tools.plan(source, out, to=target, **whole))
        return
    compared: Any = {"state": "model"} if written_format(target).is_weights_alone else whole
    found = ckpt_tools.verify(source, out, **compared)
    outcomes = {note.outcome for note in report.plan.notes}
    for difference in found.differences:
        assert NOTED.get(difference.aspect) in outcomes, str(difference)


def check_refusal(error: CkptError, folder: Path, plan: Callable[[], object]) -> None:
    """The sentence says what to do, ``plan`` says the same, and nothing was written."""
    assert any(re.search(each, error.message) for each in REFUSALS), error.message
    assert error.exit_code == 4
    assert not list(folder.iterdir())
    with pytest.raises(type(error), match=re.escape(error.message)):
        plan()


@pytest.mark.parametrize("name", OPENED)
def test_it_verifies_by_itself(name):
    """No archive is looked for where a file holds several, or none."""
    report = ckpt_tools.verify(make(name).source)
    assert report.equal, [str(each) for each in report.differences[:4]]


def test_names_are_the_sources_or_the_bare_ones(tmp_path):
    """All names of this layout begin with ``module.``, which only a conversion of weights takes away."""
    source = make("megatron-fsdp-weights").source
    bare: Any = {"state": "model"}
    ckpt_tools.convert(source, tmp_path / "whole", to="dcp", rename=r"module\.=wrapped.")
    assert ckpt_tools.verify(source, tmp_path / "whole", rename=r"module\.=wrapped.").equal
    ckpt_tools.convert(source, tmp_path / "weights", to="dcp", **bare)
    assert ckpt_tools.verify(source, tmp_path / "weights", **bare).equal
    assert ckpt_tools.verify(source, tmp_path / "weights").equal


def test_a_tensor_in_an_entry_is_compared_in_its_place(tmp_path):
    """Megatron's own object has another name for it."""

    def save(seen: float) -> Path:
        state = {"model": {"weight": torch.ones(3, 2)}, "loader": {"seen": torch.tensor([seen])}}
        torch.save(state, tmp_path / "in.pt")
        return tmp_path / "in.pt"

    ckpt_tools.convert(save(1.0), tmp_path / "out", to="megatron")
    assert ckpt_tools.verify(save(1.0), tmp_path / "out").equal
    (found,) = ckpt_tools.verify(save(2.0), tmp_path / "out").differences
    assert found.aspect is Aspect.VALUES
