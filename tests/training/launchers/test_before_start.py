"""What every worker would fail at is one sentence with the documented exit code, before any of them starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools.errors import CkptError
from tests.training.jobs import small_config
from training.config.model_names import MODELS
from training.config.train_config import TrainConfig
from training.launchers.checks import check_before_start
from training.models.zoo import our_model

TEXT = {"model": "lm", "dataset": "text"}
LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}


def refused(tmp_path: Path, **values: Any) -> tuple[int, str]:
    """Exit code and sentence; nothing is made."""
    out = tmp_path / "run"
    with pytest.raises(CkptError) as caught:
        check_before_start(TrainConfig(**{"out": out, "engine": "fsdp2", "launcher": "torchrun"} | values))
    assert not out.exists()
    return caught.value.exit_code, str(caught.value)


def text_of(folder: Path, files: dict[str, str]) -> Path:
    for name, words in files.items():
        (folder / name).write_text(words)
    return folder


@pytest.mark.parametrize(
    ("files", "batch_size", "sentence"),
    [
        ({}, 64, "--data-root {} holds no .txt file"),
        ({"a.md": "words"}, 64, "--data-root {} holds no .txt file"),
        ({"a.txt": "", "b.txt": ""}, 64, "--data-root {} holds only empty .txt files, such as a.txt"),
        ({"a.txt": "words"}, 64, "--data-root {} has 5 bytes of text, too few to learn from"),
        ({"a.txt": "words " * 200}, 64, "16 training samples do not fill one batch; --batch-size is 64"),
    ],
)
def test_too_little_text(files, batch_size, sentence, tmp_path):
    root = tmp_path / "texts"
    root.mkdir()
    assert refused(tmp_path, **TEXT, data_root=text_of(root, files), batch_size=batch_size) == (
        2,
        sentence.format(root),
    )


def test_a_text_is_a_folder(tmp_path):
    file = text_of(tmp_path, {"a.txt": "words"}) / "a.txt"
    assert refused(tmp_path, **TEXT, data_root=file) == (
        2,
        f"--data-root {file} is not a folder that can be read: Not a directory",
    )


@pytest.mark.parametrize("model", MODELS)
def test_first_weights_of_another_model(model, tmp_path):
    """Those of the model itself are taken."""
    other, weights = tmp_path / "other.pt", tmp_path / "weights.pt"
    torch.save({"w": torch.zeros(2)}, other)
    torch.save(our_model(model).state_dict(), weights)
    data = {"model": model, "dataset": "text" if MODELS[model].task == "text" else "digits"}
    code, sentence = refused(tmp_path, **data, init_from=str(other))
    assert (code, sentence[:60]) == (2, "the checkpoint does not fit the model: not in the checkpoint"[:60])
    assert sentence.endswith("; not in the model: w") and "meta" not in sentence
    fits = TrainConfig(out=tmp_path / "run", engine="fsdp2", launcher="torchrun", **data, init_from=str(weights))
    check_before_start(fits)


def test_first_weights_of_another_shape(tmp_path):
    weights = tmp_path / "weights.pt"
    state = our_model("cnn").state_dict() | {"hidden.bias": torch.zeros(3)}
    torch.save(state, weights)
    sentence = "the checkpoint does not fit the model: shape mismatch: hidden.bias (checkpoint [3], model [64])"
    assert refused(tmp_path, model="cnn", init_from=str(weights)) == (2, sentence)
    assert refused(tmp_path, model="cnn", init_from=str(tmp_path / "none.pt"))[0] == 3


@pytest.mark.parametrize("engine", ["fsdp2", "zero1", "zero3"])
def test_a_checkpoint_of_every_engine_fits(engine, small_run, tmp_path):
    resume = str(Path(small_run(engine).checkpoint).with_name("epoch_0001"))
    check_before_start(small_config(tmp_path / "run", engine="zero2", resume=resume))


@pytest.mark.parametrize(
    ("export", "code", "sentence"),
    [
        ("{}/file/model.pt", 5, "{}/file/model.pt cannot be written: {}/file/"),
        ("/proc/none/model.pt", 5, "/proc/none/model.pt cannot be written: /proc/"),
        ("{}/model.onnx", 2, "model.onnx: files that end in .onnx are not written; name a file that ends in "),
        ("{}/model.distcp", 2, "model.distcp: files that end in .distcp are not written; name a file that ends in "),
        ("nowhere://bucket/model.pt", 4, "nowhere://bucket/model.pt: Protocol not known: nowhere"),
        ("https://host/model.pt", 2, "https://host/model.pt: nothing can be written there; choose another destination"),
        ("{}/file", 8, "--export {}/file exists already; move it away or choose another name"),
        ("file://{}/file", 8, "--export {}/file exists already; move it away or choose another name"),
    ],
)
def test_an_export_that_cannot_be_written(export, code, sentence, tmp_path):
    (tmp_path / "file").write_text("mine")
    found = refused(tmp_path, export=export.format(tmp_path))
    assert (found[0], found[1].startswith(sentence.replace("{}", str(tmp_path)))) == (code, True), found


@pytest.mark.parametrize("export", ["model.pt", "model.gguf", "folder", "gpt-2.5", "no/such/parent/model.safetensors"])
def test_an_export_that_can_be_written_is_not_begun(export, tmp_path):
    where = f"{tmp_path}/{export}"
    check_before_start(TrainConfig(out=tmp_path / "run", engine="fsdp2", launcher="torchrun", export=where))
    assert not list(tmp_path.iterdir())


def hugging_face(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return f"hf:{folder}"


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "bert"}, "--model hf:{}: bert is not causal, so it sees the text that it has to predict; set "),
        ({"model_type": "t5"}, "{} has no config.json of a causal language model: "),
        ({"model_type": "none"}, "{} has no config.json of a causal language model: "),
        (LLAMA | {"vocab_size": 16}, "{}: vocab_size is 16, and there are 256 bytes of a text"),
        (LLAMA | {"hidden_size": -64}, "--model hf:{} cannot be built: "),
    ],
)
def test_a_folder_of_another_model(config, sentence, tmp_path):
    code, found = refused(tmp_path, model=hugging_face(tmp_path, **config), dataset="text")
    assert (code, found.startswith(sentence.format(tmp_path))) == (4, True), found


@pytest.mark.parametrize("config", [LLAMA, {"model_type": "bert", "is_decoder": True}, {"model_type": "bart"}])
def test_a_folder_of_a_causal_model(config, tmp_path):
    model = hugging_face(tmp_path, **config)
    check_before_start(TrainConfig(out=tmp_path / "run", engine="fsdp2", model=model, dataset="text"))


def test_a_folder_that_is_not_there(tmp_path):
    """It is not looked for on the Hub."""
    sentence = "--model hf:/nonexistent: there is no folder /nonexistent"
    assert refused(tmp_path, model="hf:/nonexistent", dataset="text") == (3, sentence)
