"""Where the architecture comes from, judged by the libraries' own models and their own answers: named, in config.json,
known by its run, described by --config, or assumed aloud."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
import transformers
from safetensors.torch import save_file
from torch import nn

import ckpt_tools
from ckpt_tools.errors import FormatError, SourceNotFoundError, UsageError
from inference.models.architectures import Architecture, architecture_of
from inference.models.loading import load_model
from inference.models.predictor import load_predictor
from inference.serving.__main__ import Options
from inference.serving.settings import Settings
from tests.inference.commands import predict, predicted
from tests.inference.tiny_models import save_text_model
from tests.support.refusals import refusal_test
from training.models.image_models import build_model

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


def parsed(text: str) -> Callable[[Path], object]:
    return lambda _: Architecture.parse(text)


def built(text: str) -> Callable[[Path], object]:
    return lambda _: Architecture.parse(text).build(None)


NONE = "not an architecture"
NO_PAIR = "'{}' is not NAME=VALUE"
WORDS = (
    ("resnet18", parsed, f"{NONE}; write ours, ours:NAME, hf"),
    ("torchvision:", parsed, NONE),
    ("my-module:f", parsed, NONE),
    ("my-file.py:", parsed, NONE),
    ("torchvision:resnet18?classes", parsed, NO_PAIR.format("classes")),
    ("my_module:f?a", parsed, NO_PAIR.format("a")),
    ("torchvision:resnet19", built, "torchvision cannot build resnet19"),
    ("torchvision:resnet18?colour=1", built, "torchvision cannot build resnet18"),
    ("no_such_module:f", built, "the module no_such_module cannot be imported: ModuleNotFoundError"),
    ("math:tau", built, "has no function tau"),
    ("math:gcd", built, "returned a int, not a torch.nn.Module"),
)
test_what_cannot_be_built_is_one_sentence = refusal_test(
    *((text, call(text), UsageError, words) for text, call, words in WORDS)
)


@pytest.mark.parametrize(
    ("config", "asked", "sentence"),
    [
        ({"model_type": "gpt2"}, {}, "does not name one class"),
        ({"model_type": "gpt2", "architectures": ["os.system"]}, {}, "does not have"),
        ({"model_type": "gpt2", "architectures": ["AutoConfig"]}, {}, "does not have"),
        ({"model_type": "nothing", "architectures": ["GPT2LMHeadModel"]}, {}, "is not usable"),
        (None, {"model": "hf"}, r"no config\.json"),
        (None, {}, "not in the checkpoint: "),
    ],
)
def test_a_config_that_is_not_usable_is_named(config, asked, sentence, gpt2, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((gpt2 / "model.safetensors").read_bytes())
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=sentence):
        load_model(tmp_path, **asked)


# --- without config.json

SAID = "nothing says what the model is, so it is taken for ours, the built-in Vision Transformer"


def saved(path: Path, weights: dict[str, Any], *, model: str | None = None, model_arg: str | None = None) -> Path:
    """A DCP with the settings of a run, as training saves them, or without."""
    settings = {} if model is None else {"settings": {"model": model, "model_arg": model_arg}}
    torch.save({"model": weights, **settings}, path.with_suffix(".pt"))
    ckpt_tools.convert(path.with_suffix(".pt"), path, to="dcp", state="all")
    path.with_suffix(".pt").unlink()
    return path


def run(model: Path, *more: str) -> Any:
    (model.parent / "in.txt").write_text("one.png\n")
    return predict(model, model.parent / "in.txt", model.with_name("rows.jsonl"), *more)


def test_what_is_assumed_is_printed(image_folder, tmp_path, capsys):
    model, image = tmp_path / "vit.pt", image_folder / "000.png"
    torch.save(build_model().state_dict(), model)
    done = predict(model, image, tmp_path / "rows.jsonl")
    assert done.exit_code == 0 and SAID in done.stderr and "--architecture" in done.stderr, done.output
    assert SAID not in predict(model, image, tmp_path / "rows.jsonl", "--overwrite", "--architecture", "ours").stderr
    Options([str(model)], Settings()).check()
    assert SAID in capsys.readouterr().err


def test_a_mismatch_names_the_way_out(tmp_path):
    torch.save(nn.Conv2d(3, 8, 3).state_dict(), tmp_path / "conv.pt")
    done = run(tmp_path / "conv.pt")
    assert done.exit_code == 4
    assert "name its architecture with --architecture (write ours, ours:NAME, hf, torchvision:NAME" in done.stderr
    with pytest.raises(FormatError) as named:
        load_predictor(tmp_path / "conv.pt", architecture="ours")
    assert "nothing says" not in str(named.value)


def test_a_run_of_a_built_in_model_is_known_by_its_settings(tmp_path):
    lm = saved(tmp_path / "lm", {"w": torch.zeros(2)}, model="lm", model_arg="layers=2; width=64")
    found = architecture_of(None, None, lm, None)
    assert (found.library, found.name, found.arguments) == ("ours", "lm", {"layers": 2, "width": 64})
    assert not found.is_assumed
    vit = saved(tmp_path / "vit", build_model().state_dict(), model="vit")
    assert load_predictor(vit).inputs[0].name == "image"


@pytest.mark.parametrize(
    ("model", "model_arg", "advice"),
    [
        ("unet:net", None, "--architecture unet:net, or with its file in the place of the module: unet.py:net"),
        ("unet:net", "width=8; depth=2", "--architecture unet:net?width=8&depth=2, or"),
        ("hf:/models/llama", None, "give --config /models/llama"),
    ],
)
def test_a_run_of_code_of_the_users_says_what_to_pass(model, model_arg, advice, tmp_path):
    place = saved(tmp_path / "run", {"w": torch.zeros(2)}, model=model, model_arg=model_arg)
    done = run(place)
    assert done.exit_code == 2 and model in done.stderr and advice in done.stderr
    with pytest.raises(UsageError, match="of a run with"):
        load_predictor(place)


def test_config_describes_a_checkpoint_that_has_none(tmp_path):
    hub = save_text_model(tmp_path / "hub")
    ckpt_tools.convert(hub, tmp_path / "dcp", to="dcp", world_size=2)
    for path in tmp_path.joinpath("dcp").glob("*.json"):
        path.unlink()
    (tmp_path / "texts.txt").write_text("the film was very good\n")
    expected = [each.probabilities for each in _texts(load_predictor(hub))]
    found = [each.probabilities for each in _texts(load_predictor(tmp_path / "dcp", config=hub))]
    assert np.array_equal(np.array(found), np.array(expected))
    [row] = predicted(tmp_path / "dcp", tmp_path / "texts.txt", tmp_path / "rows.jsonl", "--config", hub)
    assert row["probabilities"] == list(expected[0])
    shutil.rmtree(hub)
    with pytest.raises(SourceNotFoundError, match=r"is not a folder with config\.json"):
        load_predictor(tmp_path / "dcp", config=hub)


def _texts(predictor: Any) -> Any:
    return predictor.predict([predictor.decode(b"the film was very good", "a text")])
