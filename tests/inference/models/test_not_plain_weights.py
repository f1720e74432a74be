"""Quantized weights and adapters: the bits of transformers, or an error that names the command that helps."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

import inference
from ckpt_tools.cli.main import group
from ckpt_tools.errors import FormatError, UnsupportedError
from tests.inference.commands import predict, predicted
from tests.inference.tiny_models import save_writer
from tests.support.quantized import fp8_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def change(folder: Path, **changed: Any) -> Path:
    """Change ``config.json``; a key that becomes None is removed."""
    config = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """A writer with the tokenizer of another, quantized by transformers' own code."""
    folder = fp8_model(tmp_path_factory.mktemp("fp8") / "qwen3")
    writer = save_writer(tmp_path_factory.mktemp("writer"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(writer / name, folder)
    return folder


@pytest.fixture
def copied(fp8, tmp_path):
    return shutil.copytree(fp8, tmp_path / "copy")


def test_quantized_weights_are_dequantized_as_transformers_does(fp8):
    loaded = inference.load_model(fp8, dequantize=True).state_dict()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(fp8, dtype=torch.bfloat16, device_map="cpu").state_dict()
    assert loaded.keys() == theirs.keys()
    assert all(loaded[name].view(torch.int16).equal(theirs[name].view(torch.int16)) for name in theirs)


def test_they_are_refused_unless_that_is_asked_for(fp8, tmp_path):
    told = r"^quantization_config in config\.json .*quantized; load them with --dequantize, or .*ckpt-tools convert SRC"
    for load in (inference.load_model, inference.load_predictor):
        with pytest.raises(UnsupportedError, match=told):
            load(fp8)
    (tmp_path / "in.txt").write_text("a\n")
    refused = predict(fp8, tmp_path / "in.txt", tmp_path / "out.jsonl")
    assert refused.exit_code == 4
    assert "load them with --dequantize" in refused.output
    assert predicted(fp8, tmp_path / "in.txt", tmp_path / "out.jsonl", "--dequantize", "--max-new-tokens=3")


def test_what_only_the_weights_say_is_refused_too(copied):
    change(copied, quantization_config=None)
    with pytest.raises(FormatError, match=r"weight_scale_inv.*quantized weights; load them with --dequantize$"):
        inference.load_model(copied)
    weights = load_file(copied / "model.safetensors")
    plain = {name: tensor for name, tensor in weights.items() if "scale" not in name}
    save_file(plain, copied / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"stored as float8_e4m3fn, which cannot be cast to torch\.bfloat16"):
        inference.load_model(copied)


def test_weights_with_the_old_names_of_bert_are_renamed_by_transformers(tmp_path):
    model = transformers.BertModel(
        transformers.BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in weights.items()}
    old = {name.replace("LayerNorm.bias", "LayerNorm.beta"): tensor for name, tensor in old.items()}
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert inference.load_model(tmp_path).embeddings.LayerNorm.weight.equal(weights["embeddings.LayerNorm.weight"])


# --- adapters


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A folder ``base`` and a folder of PEFT's, ``an adapter``, which changes what the base model says."""
    folder = tmp_path_factory.mktemp("adapted")
    save_writer(folder / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    peft.get_peft_model(base, settings).save_pretrained(folder / "an adapter")
    return folder


def test_an_adapter_is_refused_with_the_command_that_merges_it(adapted, tmp_path):
    base, adapter = adapted / "base", adapted / "an adapter"
    command = f"ckpt-tools merge-lora {base} '{adapter}' OUT --to safetensors"
    for what in (adapter, adapter / "adapter_model.safetensors"):
        for load in (inference.load_model, inference.load_predictor):
            with pytest.raises(UnsupportedError) as caught:
                load(what)
            assert str(caught.value) == f"{what} is an adapter of {base} (PEFT LORA); merge it first: {command}"
    # The command does what the sentence says.
    words = shlex.split(command.replace("OUT", str(tmp_path / "out")))
    assert CliRunner().invoke(group, words[1:]).exit_code == 0
    expected = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), adapter)
    merged = expected.merge_and_unload().state_dict()
    loaded = inference.load_model(tmp_path / "out").state_dict()
    assert all(loaded[name].allclose(tensor, atol=1e-6) for name, tensor in merged.items())


def test_a_state_with_an_adapter_is_told_apart_from_another_model(adapted, tmp_path):
    adapter = load_file(adapted / "an adapter" / "adapter_model.safetensors")
    torch.save({"model": adapter}, tmp_path / "state.pt")
    with pytest.raises(FormatError, match="those of an adapter of PEFT, which ckpt-tools merge-lora merges"):
        inference.load_model(tmp_path / "state.pt", model=nn.Linear(3, 2))


def test_an_adapter_beside_a_whole_model_does_not_refuse_it(adapted, tmp_path):
    both = shutil.copytree(adapted / "base", tmp_path / "both")
    shutil.copytree(adapted / "an adapter", both, dirs_exist_ok=True)
    assert inference.load_model(both / "model.safetensors")
