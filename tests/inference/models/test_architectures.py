"""Where the architecture comes from, judged by the libraries' own models and their own answers: named, in config.json,
known by its run, described by --config, or assumed aloud."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.errors import SourceNotFoundError, UsageError
from inference.models.architectures import Architecture, find_architecture
from inference.models.loading import load_model
from inference.models.predictor import load_predictor
from inference.models.task import import_model_source
from inference.serving.__main__ import ServeOptions
from inference.serving.settings import ServiceSettings
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


def test_a_file_of_the_user_builds_the_model_with_arguments(tmp_path):
    """As for training: the function may return a dictionary, and the file finds the modules beside it."""
    file = tmp_path / "my-models.py"
    (tmp_path / "beside_it.py").write_text("from torch import nn\n")
    file.write_text("from beside_it import nn\n\ndef net(width):\n    return {'model': nn.Linear(width, 2)}\n")
    own = torch.nn.Linear(5, 2)
    save_file(own.state_dict(), tmp_path / "net.safetensors")
    loaded = load_model(tmp_path / "net.safetensors", model=f"{file}:net?width=5")
    assert torch.equal(loaded.weight, own.weight)
    again = load_model(tmp_path / "net.safetensors", architecture=f"{file}:net?width=5")
    assert torch.equal(again.weight, own.weight)
    with pytest.raises(UsageError, match="give either model or architecture"):
        load_model(tmp_path / "net.safetensors", model=own, architecture="ours")
    with pytest.raises(UsageError, match=r"cannot build the model: TypeError: .*\(my-models.py, line 4\)"):
        load_model(tmp_path / "net.safetensors", model=f"{file}:net?width='a'")


def test_an_argument_is_toml_or_python_or_text():
    """``--model-arg bias=false`` of a run is in TOML."""
    text = "timm:vit?a=false&b=False&c=None&d=10&e='10'&f=gelu&g=[1, 2]&h=(1, 2)&i=1e-3"
    expected = {"a": False, "b": False, "c": None, "d": 10, "e": "10", "f": "gelu", "g": [1, 2], "h": (1, 2), "i": 1e-3}
    assert Architecture.parse(text).arguments == expected


def parsed(text: str) -> Callable[[Path], object]:
    return lambda _: Architecture.parse(text)


def built(text: str) -> Callable[[Path], object]:
    architecture = Architecture.parse(text)
    return lambda _: import_model_source(architecture).build_model(architecture, None, None)


NONE = "not an architecture"
NO_PAIR = "'{}' is not NAME=VALUE"
WORDS = (
    ("resnet18", parsed, f"{NONE}; write ours, ours:NAME, hf"),
    ("my-module:f", parsed, NONE),
    ("torchvision:resnet18?classes", parsed, NO_PAIR.format("classes")),
    ("torchvision:resnet19", built, "torchvision cannot build resnet19"),
    ("no_such_module:f", built, "the module no_such_module cannot be imported: ModuleNotFoundError"),
    ("math:tau", built, "has no function tau"),
    ("math:gcd", built, "returned a int, not a torch.nn.Module"),
)
test_what_cannot_be_built_is_one_sentence = refusal_test(
    *((text, call(text), UsageError, words) for text, call, words in WORDS)
)


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
    ServeOptions([str(model)], ServiceSettings()).check()
    assert SAID in capsys.readouterr().err


def test_a_run_of_a_built_in_model_is_known_by_its_settings(tmp_path):
    lm = saved(tmp_path / "lm", {"w": torch.zeros(2)}, model="lm", model_arg="layers=2; width=64")
    found = find_architecture(None, None, lm, None)
    assert (found.library, found.name, found.arguments) == ("ours", "lm", {"layers": 2, "width": 64})
    assert not found.is_assumed
    vit = saved(tmp_path / "vit", build_model().state_dict(), model="vit")
    assert load_predictor(vit).inputs[0].name == "image"


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
