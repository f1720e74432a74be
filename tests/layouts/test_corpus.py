"""Every layout of the corpus is opened whole and exactly, or refused with its sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.errors import CkptError
from fixtures.corpus import layouts, make
from inference.models.loading import load_model
from tests.layouts.contents import contents, of_tensor

OPENED = [name for name, layout in layouts().items() if layout.opens_as is not None]
REFUSED = [name for name, layout in layouts().items() if layout.refusal is not None]
SAMPLE = {(layout.family, layout.opens_as): name for name, layout in reversed(layouts().items())}.values()
"""The first layout of each family and format, which ``make test`` opens."""


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.extended) for name in names]


@pytest.mark.parametrize("name", marked(OPENED))
def test_it_is_opened_whole(name):
    made = make(name)
    manifest, found = contents(made.source)
    assert manifest.format == made.layout.opens_as
    told = [f"{note.what}: {note.why}" for note in manifest.notes]
    for text in made.layout.notes:
        assert any(text in each for each in told), told
    truth = {StateKey(fqn): of_tensor(tensor) for fqn, tensor in made.state.weights.items()}
    truth |= {StateKey(fqn, slot): of_tensor(tensor) for (fqn, slot), tensor in made.state.optimizer.items()}
    assert truth, "a layout that is opened has a truth"
    assert found == truth


VERBS: Mapping[str, Callable[[Path, Path], object]] = {
    "inspect": lambda source, out: ckpt_tools.inspect(source),
    "open": lambda source, out: ckpt_tools.open(source),
    "plan": lambda source, out: ckpt_tools.plan(source, out, to="dcp"),
    "convert": lambda source, out: ckpt_tools.convert(source, out, to="dcp"),
    "convert to one file": lambda source, out: ckpt_tools.convert(source, out.with_suffix(".safetensors")),
    "reshard": lambda source, out: ckpt_tools.reshard(source, out, world_size=3),
    "consolidate": lambda source, out: ckpt_tools.consolidate(source, out),
    "verify": lambda source, out: ckpt_tools.verify(source),
    "verify with a copy": lambda source, out: ckpt_tools.verify(source, source),
    "verify a copy": lambda source, out: ckpt_tools.verify(make("torch-full").source, source),
    "diff": lambda source, out: ckpt_tools.diff(source, source),
    "diff with another": lambda source, out: ckpt_tools.diff(make("torch-full").source, source),
    "checksum": lambda source, out: ckpt_tools.checksum(source, output="-"),
    "load_into": lambda source, out: ckpt_tools.load_into(torch.nn.Linear(2, 2), None, source),
    "storage_reader": lambda source, out: ckpt_tools.storage_reader(source),
    "load_model": lambda source, out: load_model(source, model=torch.nn.Linear(2, 2)),
}
"""Every way to read a checkpoint."""

OF_WEIGHTS = ("convert to one file", "consolidate", "load_into", "load_model")
"""Those that take weights alone."""


@pytest.mark.parametrize("name", marked(REFUSED))
def test_it_is_refused_by_name(name, tmp_path):
    """In the same words by every command and function, and nothing is written. Of models with an optimizer each,
    who takes weights alone has to choose a model."""
    made = make(name)
    assert made.layout.refusal is not None
    with pytest.raises(CkptError) as inspected:
        ckpt_tools.inspect(made.source)
    assert made.layout.refusal in str(inspected.value)
    assert inspected.value.exit_code in (2, 4)
    for verb_name, verb in VERBS.items():
        with pytest.raises(type(inspected.value)) as refused:
            verb(made.source, tmp_path / "out")
        asks_model = verb_name in OF_WEIGHTS and "several optimizers" in made.layout.refusal
        assert ("there are several models" if asks_model else str(inspected.value)) in str(refused.value), verb_name
    assert not list(tmp_path.iterdir())
