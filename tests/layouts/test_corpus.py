"""Every layout of the corpus is opened whole and exactly, or refused with its sentence."""

from __future__ import annotations

import pytest

import ckpt_tools
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.errors import CkptError
from fixtures.corpus import layouts, make
from tests.layouts.contents import contents, of_tensor

OPENED = [name for name, layout in layouts().items() if layout.opens_as is not None]
REFUSED = [name for name, layout in layouts().items() if layout.refusal is not None]


@pytest.mark.parametrize("name", OPENED)
def test_it_is_opened_whole(name: str) -> None:
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


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name: str) -> None:
    made = make(name)
    assert made.layout.refusal is not None
    with pytest.raises(CkptError) as inspected:
        ckpt_tools.inspect(made.source)
    assert made.layout.refusal in str(inspected.value)
    assert inspected.value.exit_code in (2, 4)
