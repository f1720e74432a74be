"""What was converted verifies: no layout of the corpus gives a false alarm in a format that holds all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.core.option_names import WrittenFormat
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.verification.difference import Aspect
from fixtures.corpus import layouts, make

OPENED = [name for name, layout in layouts().items() if layout.opens_as is not None]
TARGETS: tuple[WrittenFormat, ...] = ("megatron", "dcp", "torch", "safetensors")

REFUSED = {("accelerate-ddp-safetensors", "dcp"), ("accelerate-ddp-safetensors", "torch")}
"""A reader would take the order of these weights for the model's, which it is not."""

ALWAYS = {*REFUSED, ("megatron", "dcp"), ("megatron-fsdp-weights", "megatron"), ("composer", "megatron")}
"""Each has a reason of its own to look different from its source."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every layout in every format in ``make soak``; in ``make test`` each in one, and the peculiar ones."""
    if "target" in metafunc.fixturenames:
        every = [(name, target) for name in OPENED for target in TARGETS]
        in_turn = {(name, TARGETS[number % len(TARGETS)]) for number, name in enumerate(OPENED)}
        is_soak = metafunc.config.getoption("--soak")
        metafunc.parametrize(("name", "target"), every if is_soak else sorted(in_turn | ALWAYS))


def test_what_was_converted_verifies(name: str, target: WrittenFormat, tmp_path: Path) -> None:
    whole: Any = {"state": "all"} if target in ("torch", "safetensors") else {}
    source = make(name).source
    if (name, target) in REFUSED:
        with pytest.raises(UnsupportedError, match=r"not proved to be the model's.*param_order"):
            ckpt_tools.convert(source, tmp_path / "out", to=target, **whole)
        return
    ckpt_tools.convert(source, tmp_path / "out", to=target, **whole)
    report = ckpt_tools.verify(source, tmp_path / "out", **whole)
    assert report.equal, [str(each) for each in report.differences[:4]]


def test_names_are_the_sources_or_the_bare_ones(tmp_path: Path) -> None:
    """All names of this layout begin with ``module.``, which only a conversion of weights takes away."""
    source = make("megatron-fsdp-weights").source
    bare: Any = {"state": "model"}
    ckpt_tools.convert(source, tmp_path / "whole", to="dcp", rename=r"module\.=wrapped.")
    assert ckpt_tools.verify(source, tmp_path / "whole", rename=r"module\.=wrapped.").equal
    ckpt_tools.convert(source, tmp_path / "weights", to="dcp", **bare)
    assert ckpt_tools.verify(source, tmp_path / "weights", **bare).equal
    assert ckpt_tools.verify(source, tmp_path / "weights").equal


def test_a_tensor_in_an_entry_is_compared_in_its_place(tmp_path: Path) -> None:
    """Megatron's own object has another name for it."""

    def save(seen: float) -> Path:
        state = {"model": {"weight": torch.ones(3, 2)}, "loader": {"seen": torch.tensor([seen])}}
        torch.save(state, tmp_path / "in.pt")
        return tmp_path / "in.pt"

    ckpt_tools.convert(save(1.0), tmp_path / "out", to="megatron")
    assert ckpt_tools.verify(save(1.0), tmp_path / "out").equal
    (found,) = ckpt_tools.verify(save(2.0), tmp_path / "out").differences
    assert found.aspect is Aspect.VALUES
