"""Checkpoints of verl's Megatron backend in parts, whose optimizer megatron-core trains and saves. The judge is the
same run saved whole."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM

import ckpt_tools
from ckpt_tools.errors import UnsupportedError, UsageError
from fixtures import launch
from fixtures import megatron_models as mm

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.extended]

RECIPE: dict[str, Any] = {"recipe": "megatron_qwen3"}
HUB, CORE = "model/huggingface", "model/dist_ckpt"
FORMATS = {HUB: "huggingface", CORE: "megatron_dist_checkpoint"}


def describe(actor: Path, weights: str, **more: Any) -> None:
    """`ckpt_contents.json` as verl writes it."""
    optimizer = {"path": "optimizer/dist_ckpt", "format": "megatron_dist_checkpoint"}
    contents = {"model": {"path": weights, "format": FORMATS[weights]}, "optimizer": optimizer, **more}
    about = {"schema_version": 2, "framework": "megatron", "global_step": mm.STEPS, "contents": contents}
    (actor / "ckpt_contents.json").write_text(json.dumps(about, indent=2, sort_keys=True))


@dataclass(frozen=True, slots=True)
class Saved:
    """One run: whole in `run`, with weights under the names of the hub in `hub`, and under Megatron's in `core`."""

    folder: Path
    dtype: str
    changes: dict[str, Any]

    run = property(lambda self: self.folder / "run")
    hub = property(lambda self: self.folder / "hub")
    core = property(lambda self: self.folder / "actor")
    config = property(lambda self: self.folder / "config")


RUNS = [("bf16", {}), ("fp32", {"tie_word_embeddings": True, "vocab_size": 128})]
"""bf16, with fp32 masters and a padded vocabulary; and fp32 with tied embeddings."""
BOTH = pytest.mark.parametrize("saved", RUNS, ids=["bf16", "fp32-tied"], indirect=True)
ONE = pytest.mark.parametrize("saved", RUNS[:1], ids=["bf16"], indirect=True)


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    dtype, changes = request.param
    found = Saved(tmp_path_factory.mktemp("verl"), dtype, changes)
    launch.pool(1).run(mm.produce_parts, "qwen3", changes, dtype, found.folder)
    shutil.copytree(found.core, found.hub, ignore=shutil.ignore_patterns("model"))
    weights = found.folder / "weights"
    ckpt_tools.convert(found.run, weights, to="safetensors", config=found.config, weights="model", **RECIPE)
    AutoModelForCausalLM.from_pretrained(weights, dtype="auto").save_pretrained(found.hub / HUB)
    describe(found.hub, HUB)
    describe(found.core, CORE)
    return found


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """The bytes of every tensor of a DCP, by torch's own loader."""
    about = FileSystemReader(path).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in about.items()
        if isinstance(each, TensorStorageMetadata)
    }
    load(found, checkpoint_id=path)
    return {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in found.items()}


def assert_same(one: Path, other: Path) -> None:
    left, right = tensors_of(one), tensors_of(other)
    assert left.keys() == right.keys() and len(left) >= 40
    assert [name for name, tensor in left.items() if not torch.equal(tensor, right[name])] == []


@BOTH
def test_a_recipe_joins_weights_of_the_hub(saved, tmp_path):
    ckpt_tools.convert(saved.run, tmp_path / "whole", to="dcp", **RECIPE)
    report = ckpt_tools.convert(saved.hub, tmp_path / "joined", to="dcp", **RECIPE)
    assert report.plan.recipe is not None and not report.plan.recipe.inverse
    assert_same(tmp_path / "whole", tmp_path / "joined")
    assert ckpt_tools.verify(saved.hub, tmp_path / "joined", **RECIPE).equal
    assert not [d for d in ckpt_tools.diff(saved.hub, tmp_path / "joined", **RECIPE).differences if d.key]


@BOTH
def test_weights_of_megatron_are_joined_when_read(saved, tmp_path):
    options = {"config": saved.config, **RECIPE}
    for more in ({}, options):
        for name, source in (("whole", saved.run), ("joined", saved.core)):
            ckpt_tools.convert(source, tmp_path / name, to="dcp", overwrite=True, **more)
        assert_same(tmp_path / "whole", tmp_path / "joined")


@BOTH
def test_megatron_resumes(saved, tmp_path):
    ckpt_tools.convert(saved.hub, tmp_path / "out", to="megatron", inverse=True, **RECIPE)
    (path,) = saved.run.glob("iter_*")
    ours, theirs = (
        launch.pool(1).run(mm.resume, "qwen3", saved.changes, saved.dtype, folder, tmp_path / f"{number}.pt")[0]
        for number, folder in enumerate((tmp_path / "out", path.parent))
    )
    assert ours == theirs
    found, wanted = torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt")
    for name, tensor in found.items():
        rows = slice(mm.VOCABULARY) if "embedding" in name or "output_layer" in name else slice(None)
        assert torch.equal(tensor[rows], wanted[name][rows]), name


@ONE
@pytest.mark.parametrize("kind", ["hub", "core"])
def test_ls_lists_the_parts_as_one_checkpoint(kind, saved, tmp_path):
    actor = getattr(saved, kind)
    for name in ("actor", "critic"):
        shutil.copytree(actor, tmp_path / "run" / name)
    found = ckpt_tools.ls(tmp_path / "run").checkpoints
    assert {each.name for each in found} == {"actor", "critic"}
    assert {(each.problem, each.step, each.format) for each in found} == {(None, mm.STEPS, "megatron")}


@ONE
def test_without_a_recipe(saved, tmp_path):
    for to in ("dcp", "zero1"):
        with pytest.raises(UnsupportedError, match="join them with"):
            ckpt_tools.convert(saved.hub, tmp_path / "no", to=to, strip="auto")
    with pytest.raises(UnsupportedError, match="join them with"):
        ckpt_tools.storage_reader(saved.hub)
    ckpt_tools.convert(saved.hub, tmp_path / "out", to="safetensors", state="model")
    found, wanted = load_file(tmp_path / "out/model.safetensors"), load_file(saved.hub / HUB / "model.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert ckpt_tools.verify(saved.hub, tmp_path / "out", state="model").equal
    with pytest.raises(UsageError):
        ckpt_tools.convert(saved.hub, tmp_path / "no", to="dcp", recipe="megatron_gpt2")
    assert not (tmp_path / "no").exists()


@ONE
def test_inspect_and_a_check_of_the_recipe(saved):
    found = ckpt_tools.inspect(saved.hub)
    slots = {"master", "exp_avg", "exp_avg_sq", "step"}
    assert (found.step, found.format, {*found.optimizer_slots}) == (mm.STEPS, "megatron", slots)
    (why,) = (note.why for note in found.notes if note.what == "optimizer state")
    assert "Hugging Face's names, and the optimizer in optimizer/dist_ckpt under Megatron-Core's names" in why
    assert [note.what for note in found.notes if "random states" in note.why] == ["extra"]
    checked = ckpt_tools.check_recipe("megatron_qwen3", saved.hub)
    assert "model.norm.weight" in {each.name for each in checked.tensors}


@ONE
def test_weights_of_another_model_and_adapters_are_refused(saved, tmp_path):
    for name in ("other", "actor"):
        shutil.copytree(saved.hub, tmp_path / name)
    config = mm.hub_config(mm.FAMILIES["qwen3"].but(intermediate_size=40))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other" / HUB)
    said = r"mlp\.down_proj.* are not in the weights under these names and shapes"
    with pytest.raises(UnsupportedError, match=said):
        ckpt_tools.convert(tmp_path / "other", tmp_path / "no", to="dcp", **RECIPE)
    describe(tmp_path / "actor", HUB, peft_adapters={"path": CORE})
    with pytest.raises(UnsupportedError, match="adapter of PEFT"):
        ckpt_tools.inspect(tmp_path / "actor")
