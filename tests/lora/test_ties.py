"""Ties: config.json says whether head and embeddings are one tensor, and where that is untrue nothing is written unless
``untie`` writes both. transformers is the judge of what was written."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ckpt_tools
from ckpt_tools.core.ties import TIED_BY_DEFAULT
from ckpt_tools.errors import CkptError, DifferenceError, UnsupportedError, UsageError
from tests.support.refusals import refusal_test

SIZES: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
TOKENS = torch.arange(12).reshape(2, 6)


def llama(vocab: int = 24) -> PreTrainedModel:
    """Embeddings, gate and up projection have one shape if the vocabulary has 24 tokens."""
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, intermediate_size=24, tie_word_embeddings=True, **SIZES))


def gemma() -> PreTrainedModel:
    return Gemma2ForCausalLM(Gemma2Config(vocab_size=24, intermediate_size=24, head_dim=8, **SIZES))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=24, n_embd=16, n_layer=1, n_head=2, n_positions=8))


def moe() -> PreTrainedModel:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "head_dim": 8}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=24, intermediate_size=24, tie_word_embeddings=True, **experts, **SIZES)
    )


def config_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


@pytest.fixture(autouse=True)
def quiet():
    """PEFT and transformers warn of ties."""
    with warnings.catch_warnings(action="ignore"):
        yield


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS).logits
    return found


def trained_apart(model: PreTrainedModel, folder: Path) -> torch.Tensor:
    """A base folder, and a run whose head is another tensor now."""
    torch.manual_seed(0)
    model.save_pretrained(folder / "base")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 0.1)
    torch.save({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "run.pt")
    return logits(model)


WAYS: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, Any]]] = {
    "stated": (llama, {}),
    "the default of the class": (gemma, {}),
    "another name": (gpt2, {}),
    "a recipe": (moe, {"recipe": "qwen3_moe"}),
}


@pytest.mark.parametrize("name", WAYS)
def test_head_and_embeddings_that_were_trained_apart(name, tmp_path):
    model, options = WAYS[name]
    wanted = trained_apart(model(), tmp_path)
    if name == "the default of the class":
        # As older versions write config.json: what is the default of the class is left out.
        config = config_in(tmp_path / "base")
        del config["tie_word_embeddings"]
        (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    given: dict[str, Any] = {"to": "safetensors", "config": tmp_path / "base", **options}
    with pytest.raises(DifferenceError, match=r"which config.json ties: their bits differ.*untie=True.*exclude="):
        ckpt_tools.convert(tmp_path / "run.pt", tmp_path / "out", **given)
    report = ckpt_tools.convert(tmp_path / "run.pt", tmp_path / "out", untie=True, **given)
    assert "tie_word_embeddings in config.json" in [note.what for note in report.notes]
    assert config_in(tmp_path / "out")["tie_word_embeddings"] is False
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), wanted)


def test_both_tensors_that_are_the_same(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "base")
    torch.save({name: tensor.clone() for name, tensor in model.state_dict().items()}, tmp_path / "run.pt")
    for untie in (False, True):
        out = tmp_path / f"out-{untie}"
        ckpt_tools.convert(tmp_path / "run.pt", out, to="safetensors", config=tmp_path / "base", untie=untie)
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(model))
        assert ckpt_tools.verify(tmp_path / "run.pt", out, config=tmp_path / "base", untie=untie).equal


def test_a_head_of_another_vocabulary_is_refused_too(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "base")
    hidden = model.get_input_embeddings().weight.shape[1]
    torch.save({**model.state_dict(), "lm_head.weight": torch.ones(20, hidden)}, tmp_path / "run.pt")
    given: dict[str, Any] = {"to": "safetensors", "config": tmp_path / "base"}
    with pytest.raises(UnsupportedError, match=r"which config.json ties, are \[20, \d+\] and \[24, .*untie=True"):
        ckpt_tools.convert(tmp_path / "run.pt", tmp_path / "out", **given)
    ckpt_tools.convert(tmp_path / "run.pt", tmp_path / "out", untie=True, **given)
    assert config_in(tmp_path / "out")["tie_word_embeddings"] is False


@pytest.mark.parametrize("is_stated_false", [False, True])
def test_one_tensor_that_becomes_two(is_stated_false, tmp_path):
    """Shared storage, and a config.json that says that they are two: without a copy the head would be drawn anew."""
    model = llama()
    model.save_pretrained(tmp_path / "base")
    torch.save(model.state_dict(), tmp_path / "run.pt")
    if is_stated_false:
        config = config_in(tmp_path / "base")
        (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    options: dict[str, Any] = {"untie": not is_stated_false, "config": tmp_path / "base"}
    ckpt_tools.convert(tmp_path / "run.pt", tmp_path / "out", to="safetensors", **options)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= {*load_file(tmp_path / "out" / "model.safetensors")}
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


ADAPTERS: dict[str, dict[str, Any]] = {
    "embeddings saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "head": {"target_modules": ["lm_head"]},
    "both": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "both saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize(("name", "vocab"), [*((name, 24) for name in ADAPTERS), ("both", 30), ("head", 30)])
def test_adapters_of_tied_models(name, vocab, tmp_path):
    """Whatever else has the shape of the embeddings: refused, or with ``untie`` the model that the adapter makes."""
    torch.manual_seed(0)
    base = llama(vocab)
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(r=2, **ADAPTERS[name]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape) * 0.1
    wanted = logits(model)
    model.save_pretrained(str(tmp_path / "adapter"))
    places = tmp_path / "base", tmp_path / "adapter", tmp_path / "out"
    with pytest.raises(CkptError, match=r"the base model ties.*untie=True"):
        ckpt_tools.merge_lora(*places)
    ckpt_tools.merge_lora(*places, untie=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(merged), wanted, rtol=1e-5, atol=1e-5)


def like_a_reference(**options: Any) -> Callable[[Path], object]:
    def call(folder: Path) -> None:
        trained_apart(llama(30), folder)
        ckpt_tools.convert(folder / "run.pt", folder / "out", like=folder / "base", **options)

    return call


def a_base_that_holds_both(folder: Path) -> None:
    model = llama()
    model.save_pretrained(folder / "base")
    file = folder / "base" / "model.safetensors"
    whole = load_file(file)
    save_file(whole | {"lm_head.weight": whole["model.embed_tokens.weight"].clone()}, file, metadata={"format": "pt"})
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    get_peft_model(model, config).save_pretrained(str(folder / "adapter"))
    ckpt_tools.merge_lora(folder / "base", folder / "adapter", folder / "out.safetensors")


def one_file(folder: Path, verb: Callable[..., object] = ckpt_tools.convert) -> None:
    llama().save_pretrained(folder / "base")
    ckpt_tools.convert(folder / "base", folder / "one.safetensors")
    verb(folder / "base", folder / ("one.safetensors" if verb is ckpt_tools.verify else "out.safetensors"), untie=True)


def another_model(folder: Path) -> None:
    llama().save_pretrained(folder / "t5")
    (folder / "t5" / "config.json").write_text('{"model_type": "t5", "tie_word_embeddings": true}')
    ckpt_tools.convert(folder / "t5", folder / "out", to="safetensors", untie=True)


NO_FOLDER = r"untie=True is for folders with a config\.json"

test_what_cannot_be_untied_is_refused = refusal_test(
    ("a reference that ties", like_a_reference(), DifferenceError,
        r"which the reference ties: .* config= and untie= instead of like="),
    ("a reference beside untie", like_a_reference(untie=True), UsageError,
        r"untie= contradicts like=, which says what is tied"),
    ("a base of both", a_base_that_holds_both, UnsupportedError, r"ties lm_head.weight to the embeddings"),
    ("one file", one_file, UsageError, NO_FOLDER),
    ("one file to verify", lambda folder: one_file(folder, ckpt_tools.verify), UsageError, NO_FOLDER),
    ("t5", another_model, UnsupportedError, "untie=True would change what a t5 computes"),
)  # fmt: skip


def test_defaults_are_those_of_transformers():
    for kind in TIED_BY_DEFAULT:
        assert CONFIG_MAPPING[kind]().tie_word_embeddings is True, kind
