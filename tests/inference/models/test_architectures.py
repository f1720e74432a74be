"""Where the architecture comes from, judged by the libraries' own models and their own answers."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torchvision
import transformers
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.errors import FormatError, UsageError
from inference.models.architectures import Architecture
from inference.models.loading import load_model

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A small text model of transformers with tied embeddings, saved by transformers."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=61, n_positions=16, n_embd=12, n_layer=2, n_head=2)
    folder = tmp_path_factory.mktemp("gpt2")
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.arange(12).reshape(2, 6)).logits


def test_a_folder_of_transformers_says_what_it_is(gpt2):
    own = transformers.AutoModelForCausalLM.from_pretrained(gpt2)
    loaded = load_model(gpt2)
    assert type(loaded) is type(own)
    assert torch.equal(logits_of(loaded), logits_of(own))
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_its_config_is_enough_for_a_sharded_checkpoint_in_the_same_folder(gpt2, tmp_path):
    ckpt_tools.convert(gpt2 / "model.safetensors", tmp_path / "run", to="zero3", world_size=2)
    (tmp_path / "run" / "config.json").write_bytes((gpt2 / "config.json").read_bytes())
    assert torch.equal(logits_of(load_model(tmp_path / "run")), logits_of(load_model(gpt2)))


def test_a_dtype_is_cast_to(gpt2):
    own = transformers.AutoModelForCausalLM.from_pretrained(gpt2, dtype=torch.bfloat16)
    loaded = load_model(gpt2, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(logits_of(loaded), logits_of(own))


@torch.no_grad()
def test_a_model_of_torchvision_is_built_with_its_arguments(tmp_path):
    torch.manual_seed(0)
    own = torchvision.models.resnet18(num_classes=7).eval()
    torch.save(own.state_dict(), tmp_path / "resnet.pt")
    loaded = load_model(tmp_path / "resnet.pt", model="torchvision:resnet18?num_classes=7")
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded(images), own(images))


def test_a_function_of_the_user_builds_the_model(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text("import torch\n\ndef tiny():\n    return torch.nn.Linear(3, 2)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = torch.nn.Linear(3, 2)
    save_file(own.state_dict(), tmp_path / "tiny.safetensors")
    loaded = load_model(tmp_path / "tiny.safetensors", model="my_models:tiny")
    assert torch.equal(loaded.weight, own.weight)
    sys.modules.pop("my_models")


def test_a_file_of_the_user_builds_the_model_with_arguments(tmp_path):
    """As for training: the function may return a dictionary, and the file finds the modules beside it."""
    file = tmp_path / "my-models.py"
    (tmp_path / "beside_it.py").write_text("from torch import nn\n")
    file.write_text("from beside_it import nn\n\ndef net(width):\n    return {'model': nn.Linear(width, 2)}\n")
    own = torch.nn.Linear(5, 2)
    save_file(own.state_dict(), tmp_path / "net.safetensors")
    loaded = load_model(tmp_path / "net.safetensors", model=f"{file}:net?width=5")
    assert torch.equal(loaded.weight, own.weight)
    with pytest.raises(UsageError, match=r"cannot build the model: TypeError: .*\(my-models.py, line 4\)"):
        load_model(tmp_path / "net.safetensors", model=f"{file}:net?width='a'")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("resnet18", "not an architecture; write ours, ours:NAME, hf"),
        ("torchvision:", "not an architecture"),
        ("my-module:f", "not an architecture"),
        ("torchvision:resnet18?classes", "'classes' is not NAME=VALUE"),
        ("my_module:f?a", "'a' is not NAME=VALUE"),
        ("my-file.py:", "not an architecture"),
    ],
)
def test_words_that_are_no_architecture_are_refused(text, sentence):
    with pytest.raises(UsageError, match=sentence):
        Architecture.parse(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("torchvision:resnet19", "torchvision cannot build resnet19"),
        ("torchvision:resnet18?colour=1", "torchvision cannot build resnet18"),
        ("no_such_module:f", "the module no_such_module cannot be imported: ModuleNotFoundError"),
        ("math:tau", "has no function tau"),
        ("math:gcd", "returned a int, not a torch.nn.Module"),
    ],
)
def test_what_cannot_be_built_is_one_sentence(text, sentence):
    with pytest.raises(UsageError, match=sentence):
        Architecture.parse(text).build(None)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "gpt2"}, "does not name one class"),
        ({"model_type": "gpt2", "architectures": ["os.system"]}, "does not have"),
        ({"model_type": "gpt2", "architectures": ["AutoConfig"]}, "does not have"),
        ({"model_type": "nothing", "architectures": ["GPT2LMHeadModel"]}, "is not usable"),
    ],
)
def test_a_config_that_is_not_usable_is_named(config, sentence, gpt2, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((gpt2 / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=sentence):
        load_model(tmp_path)


def test_a_folder_without_a_config_is_not_taken_for_one_of_transformers(gpt2, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((gpt2 / "model.safetensors").read_bytes())
    with pytest.raises(FormatError, match=r"no config\.json"):
        load_model(tmp_path, model="hf")
    with pytest.raises(FormatError, match="not in the checkpoint: "):
        load_model(tmp_path)
