"""Adapters in training states: merged, and written alone as PEFT writes them."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ckpt_tools
from ckpt_tools.errors import UsageError
from fixtures import launch
from tests.lora import models, runs
from tests.lora.models import CASES, Case
from tests.support.sweep import tiered
from tests.support.trees import assert_same_tree

FILE = "adapter_model.safetensors"


def assert_same(one: Path, other: Path) -> None:
    assert_same_tree(load_file(other), load_file(one))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(8)[None]).logits
    return found


SAVED = {
    **CASES,
    "DoRA": Case(models.llama, {"target_modules": ["q_proj"], "r": 4, "use_dora": True}),
    "biases of all": Case(models.llama, {"target_modules": ["q_proj"], "bias": "all"}, {"attention_bias": True}),
}


def test_an_adapter_has_no_place_for_the_files_of_a_model(tmp_path):
    (tmp_path / "run").mkdir()
    with warnings.catch_warnings(action="ignore"):
        model = models.adapted(Case(models.llama, {"target_modules": ["q_proj"]}), tmp_path)
        model.peft_config["default"].save_pretrained(tmp_path / "run")
    torch.save(model.state_dict(), tmp_path / "run" / "pytorch_model.bin")
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    notes = ckpt_tools.plan(tmp_path / "run", tmp_path / "out", to="peft", strict=True).notes
    assert not any("config.json" in note.what + note.why for note in notes)
    assert any(note.what == "tokenizer.json" and note.asked for note in notes)


IN_TEST = ("patterns", "biases", "saved", "embeddings", "conv1d", "experts, transposed", "DoRA")


@pytest.mark.parametrize("name", tiered(SAVED, test=IN_TEST, extended=SAVED.keys() - {*IN_TEST}))
def test_the_adapter_is_written_as_peft_writes_it(name, tmp_path):
    case = SAVED[name]
    with warnings.catch_warnings(action="ignore"):
        model = models.adapted(case, tmp_path)
        model.save_pretrained(tmp_path / "adapter")
    torch.save({"module": model.state_dict()}, tmp_path / "run.pt")
    report = ckpt_tools.convert(tmp_path / "run.pt", tmp_path / "out", to="peft", config=tmp_path / "adapter")
    assert_same(tmp_path / "out" / FILE, tmp_path / "adapter" / FILE)
    with warnings.catch_warnings(action="ignore"):
        names = {"base_model": AutoModelForCausalLM.from_pretrained(tmp_path / "base")}
        exec(report.loading, names)
    assert isinstance(names["model"], PeftModel)
    assert torch.equal(logits(names["model"]), logits(model))


MERGED = [name for name in CASES if name != "experts, square"]
"""A file of a state has no config.json, which says how square matrices of experts lie: merging is refused there."""


@pytest.mark.parametrize(
    "name", tiered(MERGED, test=("linear", "saved", "experts"), extended=("biases", "embeddings", "conv1d"))
)
def test_a_state_is_merged_into_its_own_base(name, tmp_path):
    case = CASES[name]
    with warnings.catch_warnings(action="ignore"):
        model = models.adapted(case, tmp_path)
        model.save_pretrained(tmp_path / "adapter")
    run, once = tmp_path / "run.pt", tmp_path / "once.safetensors"
    torch.save(model.state_dict(), run)
    recipe: dict[str, Any] = (
        {"recipe": "qwen3_moe", "inverse": True} if name in ("experts", "experts of one kind") else {}
    )
    ckpt_tools.merge_lora(tmp_path / "base", tmp_path / "adapter", once, **recipe)
    ckpt_tools.merge_lora(tmp_path / "base", run, tmp_path / "a.safetensors", config=tmp_path / "adapter", **recipe)
    ckpt_tools.merge_lora(run, run, tmp_path / "b.safetensors", config=tmp_path / "adapter")
    assert ckpt_tools.verify(tmp_path / "a.safetensors", once).equal
    names = {*load_file(once)}
    assert {*load_file(tmp_path / "b.safetensors")} >= names
    assert ckpt_tools.verify(tmp_path / "b.safetensors", once, include=sorted(names)).equal


def test_one_of_several_adapters(tmp_path):
    model = models.adapted(CASES["linear"], tmp_path)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(str(tmp_path / "adapter"))
    torch.save(model.state_dict(), tmp_path / "run.pt")
    base, run = tmp_path / "base", tmp_path / "run.pt"
    config = {"config": tmp_path / "adapter"}
    with pytest.raises(UsageError, match=r"several adapters \(default, other\); leave out the others"):
        ckpt_tools.convert(run, tmp_path / "out", to="peft", **config)
    ckpt_tools.convert(run, tmp_path / "out", to="peft", exclude=["*.other.*"], **config)
    assert_same(tmp_path / "out" / FILE, tmp_path / "adapter" / FILE)
    ckpt_tools.merge_lora(base, run, tmp_path / "a.safetensors", adapter_name="default", **config)
    ckpt_tools.merge_lora(base, tmp_path / "adapter", tmp_path / "b.safetensors")
    assert ckpt_tools.verify(tmp_path / "a.safetensors", tmp_path / "b.safetensors").equal


def test_a_state_without_an_adapter(tmp_path):
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "run.pt")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UsageError, match="holds no adapter"):
        ckpt_tools.convert(tmp_path / "run.pt", tmp_path / "out", to="peft")
    assert not (tmp_path / "out").exists()


def test_a_model_with_layers_injected_by_transformers(tmp_path):
    """``add_adapter`` of transformers puts no prefix before names. The folder is replaced with its digests."""
    torch.manual_seed(0)
    model = models.llama()
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    torch.save(model.state_dict(), tmp_path / "run.pt")
    options: dict[str, Any] = {"to": "peft", "config": tmp_path / "adapter", "checksum": True, "overwrite": True}
    for _ in range(2):
        ckpt_tools.convert(tmp_path / "run.pt", tmp_path / "out", **options)
    assert_same(tmp_path / "out" / FILE, tmp_path / "adapter" / FILE)
    assert ckpt_tools.verify(tmp_path / "out").equal
    assert ckpt_tools.inspect(tmp_path / "out", from_="peft").num_tensors == 4


@pytest.mark.parametrize("job", [runs.save_fsdp2, pytest.param(runs.save_zero3, marks=pytest.mark.extended)])
def test_two_ranks_that_trained_an_adapter(job, tmp_path):
    """PEFT loads the adapter that is taken out of the whole state, and merges it as it is merged here."""
    launch.pool(2).run(job, str(tmp_path))
    base, run = tmp_path / "base", tmp_path / "run"
    ckpt_tools.convert(run, tmp_path / "out", to="peft", config=tmp_path / "settings")
    assert_same(tmp_path / "out" / FILE, tmp_path / "wanted.safetensors")
    assert any(bool(tensor.any()) for name, tensor in load_file(tmp_path / "out" / FILE).items() if "lora_B" in name)
    with warnings.catch_warnings(action="ignore"):
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
    trained = logits(model)
    ckpt_tools.merge_lora(base, run, tmp_path / "merged", to="safetensors", config=tmp_path / "settings")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), trained, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(model.merge_and_unload()), trained, rtol=1e-5, atol=1e-5)
