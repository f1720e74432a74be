"""Checkpoints of verl's Megatron backend in parts, whose optimizer megatron-core trains and saves. The judge is the
same run saved whole."""

from __future__ import annotations

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
from ckpt_tools.errors import CkptError, UnsupportedError, UsageError
from fixtures import launch
from fixtures import megatron_models as mm

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.extended]

RECIPE: dict[str, Any] = {"recipe": "megatron_qwen3"}
HUB, CORE = "model/huggingface", "model/dist_ckpt"
FORMATS = {HUB: "huggingface", CORE: "megatron_dist_checkpoint"}
APART = (
    "weights in model/huggingface are under Hugging Face's names, and the optimizer in optimizer/dist_ckpt under "
    "Megatron-Core's names; join them with recipe=, or take the weights alone with state='model'"
)


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

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def hub(self) -> Path:
        return self.folder / "hub"

    @property
    def core(self) -> Path:
        return self.folder / "actor"


def _saved(folder: Path, dtype: str, **changes: Any) -> Saved:
    launch.pool(1).run(mm.produce_parts, "qwen3", changes, dtype, folder)
    found = Saved(folder)
    shutil.copytree(found.core, found.hub, ignore=shutil.ignore_patterns("model"))
    ckpt_tools.convert(
        found.run, folder / "weights", to="safetensors", config=folder / "config", weights="model", **RECIPE
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "weights", dtype="auto")
    model.save_pretrained(found.hub / HUB)
    describe(found.hub, HUB)
    describe(found.core, CORE)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """bf16, with fp32 masters; the vocabulary is padded."""
    return _saved(tmp_path_factory.mktemp("verl"), "bf16")


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return _saved(tmp_path_factory.mktemp("tied"), "fp32", tie_word_embeddings=True, vocab_size=128)


@pytest.fixture(params=["saved", "tied"])
def each(request):
    found: Saved = request.getfixturevalue(request.param)
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


@pytest.mark.parametrize("kind", ["hub", "core"])
def test_ls_lists_the_parts_as_one_checkpoint(kind, saved, tmp_path):
    actor: Path = getattr(saved, kind)
    shutil.copytree(actor, tmp_path / "run" / "actor")
    shutil.copytree(actor, tmp_path / "run" / "critic")
    for run, names in ((actor, {"."}), (tmp_path / "run", {"actor", "critic"})):
        found = ckpt_tools.ls(run).checkpoints
        assert {each.name for each in found} == names
        assert all(each.problem is None and each.step == mm.STEPS for each in found)
        assert {each.format for each in found} == {"megatron"}


class TestWeightsOfTheHub:
    def test_a_recipe_joins_them(self, each, tmp_path):
        ckpt_tools.convert(each.run, tmp_path / "whole", to="dcp", **RECIPE)
        report = ckpt_tools.convert(each.hub, tmp_path / "joined", to="dcp", **RECIPE)
        assert report.plan.recipe is not None and not report.plan.recipe.inverse
        assert_same(tmp_path / "whole", tmp_path / "joined")
        assert ckpt_tools.verify(each.hub, tmp_path / "joined", **RECIPE).equal
        assert not [d for d in ckpt_tools.diff(each.hub, tmp_path / "joined", **RECIPE).differences if d.key]

    def test_both_copies_of_the_weights(self, saved, tmp_path):
        """Zero-1 holds weights in bf16 and masters in fp32."""
        for name, source in (("whole", saved.run), ("joined", saved.hub)):
            ckpt_tools.convert(source, tmp_path / name, to="zero1", config=saved.folder / "config", **RECIPE)
        assert not [d for d in ckpt_tools.diff(tmp_path / "whole", tmp_path / "joined").differences if d.key]

    def test_megatron_resumes(self, each, tmp_path):
        out = tmp_path / "out"
        ckpt_tools.convert(each.hub, out, to="megatron", inverse=True, **RECIPE)
        changes = {} if each.folder.name.startswith("verl") else {"tie_word_embeddings": True, "vocab_size": 128}
        dtype = "fp32" if changes else "bf16"
        (path,) = each.run.glob("iter_*")
        ours, theirs = (
            launch.pool(1).run(mm.resume, "qwen3", changes, dtype, folder, tmp_path / f"{number}.pt")[0]
            for number, folder in enumerate((out, path.parent))
        )
        assert ours == theirs
        found, wanted = torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt")
        for name, tensor in found.items():
            rows = slice(mm.VOCABULARY) if "embedding" in name or "output_layer" in name else slice(None)
            assert torch.equal(tensor[rows], wanted[name][rows]), name

    def test_without_a_recipe(self, saved, tmp_path):
        with pytest.raises(UnsupportedError) as caught:
            ckpt_tools.convert(saved.hub, tmp_path / "no", to="dcp")
        assert caught.value.message == APART
        for to in ("dcp", "zero1", "megatron"):
            with pytest.raises(UnsupportedError, match="join them with"):
                ckpt_tools.convert(saved.hub, tmp_path / "no", to=to, strip="auto")
        assert not (tmp_path / "no").exists()
        ckpt_tools.convert(saved.hub, tmp_path / "out", to="safetensors", state="model")
        found, wanted = load_file(tmp_path / "out/model.safetensors"), load_file(saved.hub / HUB / "model.safetensors")
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert ckpt_tools.verify(saved.hub, tmp_path / "out", state="model").equal

    def test_inspect(self, saved):
        found = ckpt_tools.inspect(saved.hub)
        assert (found.step, found.format, {*found.optimizer_slots}) == (
            mm.STEPS,
            "megatron",
            {"master", "exp_avg", "exp_avg_sq", "step"},
        )
        assert [note.why for note in found.notes if note.what == "optimizer state"] == [APART]
        assert [note.what for note in found.notes if "random states" in note.why] == ["extra"]
        assert ckpt_tools.verify(saved.hub).equal
        assert not ckpt_tools.diff(saved.hub, saved.hub).differences

    def test_load_into(self, saved):
        model = AutoModelForCausalLM.from_config(mm.hub_config(mm.FAMILIES["qwen3"])).to(torch.bfloat16)
        ckpt_tools.load_into(model, None, saved.hub)
        wanted = load_file(saved.hub / HUB / "model.safetensors")
        assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
        groups = [
            [each for each in model.parameters() if (each.dim() == 1) is is_vector] for is_vector in (False, True)
        ]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups])
        with pytest.raises(CkptError, match="join them with"):
            ckpt_tools.load_into(model, optimizer, saved.hub)
        with pytest.raises(CkptError, match="join them with"):
            ckpt_tools.storage_reader(saved.hub)
        ckpt_tools.load_into(model, optimizer, saved.hub, **RECIPE)
        assert len(optimizer.state) == len(wanted)

    def test_another_recipe(self, saved, tmp_path):
        with pytest.raises(UsageError):
            ckpt_tools.convert(saved.hub, tmp_path / "no", to="dcp", recipe="megatron_gpt2")
        assert not (tmp_path / "no").exists()

    def test_recipes_check(self, saved):
        found = ckpt_tools.check_recipe("megatron_qwen3", saved.hub)
        assert "model.norm.weight" in {each.name for each in found.tensors}

    def test_weights_of_another_model(self, saved, tmp_path):
        other = tmp_path / "other"
        shutil.copytree(saved.hub, other)
        config = mm.hub_config(mm.FAMILIES["qwen3"].but(intermediate_size=40))
        AutoModelForCausalLM.from_config(config).save_pretrained(other / HUB)
        with pytest.raises(
            UnsupportedError, match=r"mlp\.down_proj.* are not in the weights under these names and shapes"
        ):
            ckpt_tools.convert(other, tmp_path / "no", to="dcp", **RECIPE)

    def test_adapters_are_refused(self, saved, tmp_path):
        shutil.copytree(saved.hub, tmp_path / "actor")
        describe(tmp_path / "actor", HUB, peft_adapters={"path": CORE})
        with pytest.raises(UnsupportedError, match="adapter of PEFT"):
            ckpt_tools.inspect(tmp_path / "actor")


class TestWeightsOfMegatron:
    def test_they_are_joined_when_read(self, each, tmp_path):
        ckpt_tools.convert(each.core, tmp_path / "joined", to="dcp")
        ckpt_tools.convert(each.run, tmp_path / "whole", to="dcp")
        assert_same(tmp_path / "whole", tmp_path / "joined")
        options = {"config": each.folder / "config", **RECIPE}
        ckpt_tools.convert(each.core, tmp_path / "hub", to="dcp", **options)
        ckpt_tools.convert(each.run, tmp_path / "of-run", to="dcp", **options)
        assert_same(tmp_path / "of-run", tmp_path / "hub")
