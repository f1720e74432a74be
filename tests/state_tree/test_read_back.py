"""A whole state that is written is read back with the same weights, whatever the user's own entries look like."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tools
from ckpt_tools.core.manifest import Kind
from ckpt_tools.core.option_names import WrittenFormat
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.runs.opening import open_checkpoint
from tests.support.sweep import extended

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def weights(path: Path, model_key: str | None = None) -> set[str]:
    manifest = open_checkpoint(path, ReadOptions(model_key=model_key)).manifest
    return {key.fqn for key in manifest.select_kinds(Kind.PARAMETER, Kind.BUFFER)}


def trained() -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


BIG = {"z": torch.ones(99)}
OWN: Mapping[str, Mapping[str, Any]] = {
    "at the top": {"mean": torch.ones(99), "weight_scale": torch.ones(2)},
    "of the weights' names": {"ema": {"weight": torch.ones(2, 3), "bias": torch.ones(2)}},
    "larger": {"ema": BIG, "list": [torch.ones(99), {"z": torch.ones(99)}]},
    "called a model": {"ema": {"module": {"weight": torch.ones(2)}}, "state_dict": {"z": torch.ones(1)}},
}
TARGETS: tuple[WrittenFormat, ...] = ("dcp", "safetensors", "torch", "sharded", "universal", "zero2")


@pytest.mark.parametrize(
    ("own", "has_optimizer"),
    [
        ("at the top", True),
        ("larger", False),
        *extended(*product(("of the weights' names", "called a model"), (True, False))),
    ],
)
def test_the_weights_stay_the_same_on_every_way(own, has_optimizer, tmp_path):
    state = trained() if has_optimizer else {"model": trained()["model"]}
    torch.save(state | OWN[own], tmp_path / "in.pt")
    for first in TARGETS:
        whole: Any = {"state": "all"} if first in ("safetensors", "torch") else {}
        ckpt_tools.convert(tmp_path / "in.pt", tmp_path / first, to=first, **whole)
        assert weights(tmp_path / first) == {"weight", "bias"}, first
        ckpt_tools.convert(tmp_path / first, tmp_path / f"{first}-dcp", to="dcp")
        assert weights(tmp_path / f"{first}-dcp") == {"weight", "bias"}, first


def test_what_would_be_read_as_the_model_is_refused(tmp_path):
    """What is left of the model is a single number, so that the user's entry of a model's name is the only one that
    could be a model."""
    state = {"w": torch.ones(9), "v": torch.ones(1)}
    torch.save({"model": state, "state_dict": {"q": torch.ones(3)}}, tmp_path / "in.pt")
    with pytest.raises(UnsupportedError, match=r"several models \(model, state_dict\)"):
        weights(tmp_path / "in.pt")
    with pytest.raises(UnsupportedError, match=r"tensors in (app\.)?state_dict would be read as the model's weights"):
        ckpt_tools.convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", include=["v"], model_key="model")
    for to in ("dcp", "torch"):
        out = tmp_path / f"model-{to}"
        ckpt_tools.convert(tmp_path / "in.pt", out, to=to, state="model", include=["v"], model_key="model")  # type: ignore[arg-type]
        assert weights(out) == {"v"}
    options: Any = {"state": "all", "include": ["v"], "model_key": "model"}
    report = ckpt_tools.convert(tmp_path / "in.pt", tmp_path / "out.pt", **options)
    assert any("read it with model_key='model'" in note.why for note in report.notes)
    assert set(torch.load(tmp_path / "out.pt", weights_only=True)) == {"model", "state_dict"}


def test_a_second_entry_of_a_models_name_is_told(tmp_path):
    """No optimizer says which of the two is the model, and one is a single number."""
    torch.save({"model": {"w": torch.ones(1)}, "state_dict": {"q": torch.ones(3)}}, tmp_path / "in.pt")
    assert weights(tmp_path / "in.pt") == {"q"}
    (note,) = open_checkpoint(tmp_path / "in.pt", ReadOptions()).manifest.notes
    assert note.what == "tensors in model"
    assert "the model is state_dict, and this is carried along" in note.why
    assert "model_key='model'" in note.why
    assert weights(tmp_path / "in.pt", "model") == {"w"}
    assert not open_checkpoint(tmp_path / "in.pt", ReadOptions(model_key="model")).manifest.notes


def test_a_model_at_the_root_gets_a_place_of_its_own(tmp_path):
    """A DCP of the bare model, and a scheduler with tensors in a file beside it."""
    source = tmp_path / "in"
    dcp.save({"w": torch.ones(3), "b": torch.ones(1)}, checkpoint_id=str(source), no_dist=True)
    torch.save({"last_lr": torch.ones(9), "w": torch.ones(99)}, source / "scheduler.pt")
    done = ckpt_tools.convert(source, tmp_path / "out", to="dcp")
    assert weights(source) == weights(tmp_path / "out") == {"w", "b"}
    assert any("app.model" in note.what for note in done.plan.notes)
    found = ckpt_tools.inspect(tmp_path / "out").extras["lr_scheduler"]
    assert found == {"last_lr": {"$tensor": "float32 [9]"}, "w": {"$tensor": "float32 [99]"}}
