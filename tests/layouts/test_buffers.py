"""Buffers that nothing tells from frozen parameters: 0-d ones by themselves, the others if the user says so."""

from __future__ import annotations

import numpy as np
import pytest

import ckpt_tools
from ckpt_tools.core.options import ConvertOptions
from ckpt_tools.errors import UsageError
from fixtures import buffers, launch

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    file = tmp_path_factory.mktemp("buffers") / "run.pt"
    return file, buffers.save(file)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_goes_on(stage, saved, tmp_path):
    file, losses = saved
    report = ckpt_tools.convert(file, tmp_path / "out", to=f"zero{stage}", world_size=2, buffers="shift.*")  # type: ignore[arg-type]
    assert not [note for note in report.plan.notes if "scale" in note.what or "shift" in note.what]
    found = launch.pool(2).run(buffers.resume, stage, str(tmp_path / "out"))
    np.testing.assert_allclose(found[0], losses, rtol=1e-6, atol=0)


def test_a_guess_is_noted(saved, tmp_path):
    notes = ckpt_tools.plan(saved[0], tmp_path / "out", to="zero3", world_size=2).notes
    (guess,) = [note for note in notes if "guessed" in note.why]
    assert "shift.held" in guess.what and "scale" not in guess.what
    assert "buffers=" in guess.why


def test_a_buffer_is_not_cast(saved, tmp_path):
    ckpt_tools.convert(saved[0], tmp_path / "m.safetensors", dtype="bfloat16", buffers=["shift.held", "scale"])
    with ckpt_tools.open(tmp_path / "m.safetensors") as written:
        assert {name: written[name].numpy().dtype.name for name in ("scale", "shift.held", "first.weight")} == {
            "scale": "float32",
            "shift.held": "float32",
            "first.weight": "bfloat16",
        }
    again = ckpt_tools.verify(saved[0], tmp_path / "m.safetensors", dtype="bfloat16", buffers=["shift.held", "scale"])
    assert again.equal


@pytest.mark.parametrize(
    ("glob", "reason"), [("shift.hold", "matches no tensor.*shift.held"), ("first.*", "first.weight.*trains")]
)
def test_a_glob_that_cannot_be_is_an_error(glob, reason, saved, tmp_path):
    with pytest.raises(UsageError, match=reason):
        ckpt_tools.convert(saved[0], tmp_path / "out", to="zero3", buffers=[glob])
    assert ConvertOptions(buffers=glob).buffers == (glob,)
