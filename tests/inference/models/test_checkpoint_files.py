"""A checkpoint that is replaced while it is read is read again, or refused; what is loaded was saved so."""

import itertools
import json
import shutil
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckpt_tools
import inference
from ckpt_tools.errors import FormatError, StoreError
from inference.models import checkpoint_files
from inference.models.predictor import load_predictor
from tests.inference.conftest import write_sharded

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_two(folder: Path, value: float) -> Path:
    """Two shards of a tensor each, and their index."""
    folder.mkdir(exist_ok=True)
    for name, shard in zip(("a", "b"), SHARDS, strict=True):
        save_file({f"{name}.weight": torch.full((4, 4), value)}, folder / shard)
    index = {"weight_map": {"a.weight": SHARDS[0], "b.weight": SHARDS[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def architecture(monkeypatch):
    """Names an architecture which calls a function with the number of the reading, before weights are read."""

    def made(on_reading: Callable[[int], None]) -> str:
        readings = itertools.count(1)

        def build() -> nn.Module:
            on_reading(next(readings))
            return nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("a", "b")})

        module = types.ModuleType("architecture_of_this_test")
        module.build = build  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return f"{module.__name__}:build"

    return made


def test_a_checkpoint_that_is_replaced_meanwhile_is_read_again(tmp_path, architecture):
    """The first reading is of one new shard, the second of both."""
    model, new = write_two(tmp_path / "model", 1), write_two(tmp_path / "new", 2)

    def replace(reading: int) -> None:
        if reading <= 2:
            shutil.copy2(new / SHARDS[reading - 1], model / SHARDS[reading - 1])

    loaded = inference.load_model(model, model=architecture(replace))
    assert {tensor.unique().item() for tensor in loaded.state_dict().values()} == {2.0}


def test_a_checkpoint_that_keeps_changing_is_refused(tmp_path, architecture, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "PAUSE_SECONDS", (0.0, 0.0, 0.0))
    model, readings = write_two(tmp_path / "model", 1), list[int]()

    def replace(reading: int) -> None:
        readings.append(reading)
        write_two(model, reading)

    with pytest.raises(StoreError) as refused:
        inference.load_model(model, model=architecture(replace))
    told = "files changed while they were read, 4 times in a row; try again when it is written"
    assert str(refused.value) == f"{model}: {told}"
    assert (readings, refused.value.exit_code) == ([1, 2, 3, 4], 5)


def test_an_error_of_a_half_written_file_is_no_answer(tmp_path, architecture, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "PAUSE_SECONDS", (0.4, 0.0, 0.0))
    model = write_two(tmp_path / "model", 1)
    whole = (model / SHARDS[1]).read_bytes()

    def write(reading: int) -> None:
        if reading == 1:
            (model / SHARDS[1]).write_bytes(whole[:20])

    def sleep_and_write(seconds: float) -> None:
        """The rest is written in the pause after the first reading."""
        sleep(seconds)
        if seconds == checkpoint_files.PAUSE_SECONDS[0]:
            (model / SHARDS[1]).write_bytes(whole)

    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", sleep_and_write)
    loaded = inference.load_model(model, model=architecture(write))
    assert loaded.state_dict()["b.weight"].unique().tolist() == [1.0]
    (model / SHARDS[1]).write_bytes(whole[:20])
    with pytest.raises(FormatError, match="model-00002-of-00002"):
        inference.load_model(model, model=architecture(lambda _: None))


def test_config_json_belongs_to_the_checkpoint(tmp_path):
    """In the folder above, which is not the checkpoint's own."""
    (tmp_path / "run").mkdir()
    weights = write_two(tmp_path / "run" / "step-1", 1)
    (tmp_path / "run" / "config.json").write_text('{"labels": ["one"]}')
    before = checkpoint_files.CheckpointFiles.from_url(weights)
    assert before.is_unchanged(None)
    (tmp_path / "run" / "notes.md").write_text("no file of the model")
    assert before.is_unchanged(None)
    (tmp_path / "run" / "config.json").write_text('{"labels": ["two"]}')
    assert not before.is_unchanged(None)


def test_weights_that_are_not_those_of_the_list_of_digests_are_refused(weights, tmp_path):
    """A copy over the folder stopped in the middle: half of the weights are old, and nothing changes any more."""
    model, new = tmp_path / "model", tmp_path / "new"
    write_sharded(model, weights)
    write_sharded(new, {name: tensor + 1 for name, tensor in weights.items()})
    for folder in (model, new):
        ckpt_tools.checksum(folder)
    load_predictor(model)
    shutil.copy2(new / SHARDS[1], model / SHARDS[1])
    with pytest.raises(FormatError) as refused:
        load_predictor(model)
    name = next(name for name in weights if name >= sorted(weights)[len(weights) // 2])
    assert str(refused.value) == (
        f"{model}: {name} is not as the list of digests says that lies with it; ckpt-tools verify compares all"
    )
    for file in (SHARDS[0], "ckpt-tools.digests.json"):
        shutil.copy2(new / file, model / file)
    load_predictor(model)
