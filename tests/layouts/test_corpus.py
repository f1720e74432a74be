"""Every layout of the corpus is opened whole and exactly, or refused with its sentence."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.errors import CkptError
from fixtures.corpus import make
from inference.models.loading import load_model
from tests.layouts.contents import contents, of_tensor
from tests.layouts.sample import COSTLY, OPENED, REFUSED, TEST
from tests.support.every_verb import READING, USING, Verb
from tests.support.sweep import tiered


def in_tiers(names: Sequence[str]) -> list[Any]:
    return tiered(names, test={*TEST} & {*names}, extended={*names} - {*TEST, *COSTLY})


@pytest.mark.judges
@pytest.mark.parametrize("name", in_tiers(OPENED))
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


def torch_file() -> Path:
    return make("torch-full").source


VERBS: Mapping[str, Verb] = {
    **READING,
    **USING,
    "convert to one file": lambda source, out, _: ckpt_tools.convert(source, out.with_suffix(".safetensors")),
    "verify a copy": lambda source, _, __: ckpt_tools.verify(torch_file(), source),
    "diff with another": lambda source, _, __: ckpt_tools.diff(torch_file(), source),
    "storage_reader": lambda source, _, __: ckpt_tools.storage_reader(source),
    "load_model": lambda source, _, __: load_model(source, model=torch.nn.Linear(2, 2)),
}
"""Every way to read a checkpoint."""

OF_WEIGHTS = ("plan, strict", "convert to one file", "consolidate", "load_into", "load_model")
"""Those that take weights alone."""


@pytest.mark.parametrize("name", in_tiers(REFUSED))
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
            verb(made.source, tmp_path / "out", {})
        asks_model = verb_name in OF_WEIGHTS and "several optimizers" in made.layout.refusal
        assert ("there are several models" if asks_model else str(inspected.value)) in str(refused.value), verb_name
    assert not list(tmp_path.iterdir())
