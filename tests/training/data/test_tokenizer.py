"""Text of a folder of transformers: the tokens of its tokenizer, or bytes without one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ckpt_tools
from ckpt_tools.errors import FormatError, UsageError
from inference.models.predictor import load_predictor
from tests.training.hub import TEXT, VOCABULARY, save_llama, save_tokenizer
from tests.training.strategy_jobs import tiny_config, train_each
from training.checkpoints.run_folder import strangers_in
from training.config.command_line import config_of as config_of_words
from training.config.command_line import parsed
from training.config.train_config import TrainConfig
from training.data.loading import dataset_of
from training.data.texts import lines_of_text
from training.launchers.checks import check_before_start
from training.loop.result import RunResult


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    return save_tokenizer(save_llama(tmp_path_factory.mktemp("hub")))


def config_of(out: Path, hub: Path, *arguments: str, **values: Any) -> TrainConfig:
    return tiny_config(out, model=f"hf:{hub}", strategy="full_shard", dataset_arg=arguments, **values)


def pieces(config: TrainConfig) -> torch.Tensor:
    """All pieces in order, each with the token after it."""
    parts: list[Any] = [dataset_of(config, part) for part in ("train", "held-out")]
    rows = [torch.cat([part.pixels.long(), part.labels[:, -1:]], 1) for part in parts]
    count = sum(map(len, rows))
    found = torch.empty(count, rows[0].shape[1], dtype=torch.int64)
    held_out = torch.arange(count) % 10 == 0
    found[~held_out], found[held_out] = rows
    return found


def test_pieces_are_the_tokens_of_the_text(hub, tmp_path):
    expected = AutoTokenizer.from_pretrained(hub)(TEXT)["input_ids"]
    assert expected[0] == 0
    for context, arguments in ((64, ()), (11, ("context=11",))):
        found = pieces(config_of(tmp_path, hub, *arguments, num_samples=None))
        assert len(found) == (len(expected) - 1) // context
        starts = range(0, len(found) * context, context)
        assert found.tolist() == [expected[start : start + context + 1] for start in starts]


def test_each_file_is_a_text_of_its_own(hub, tmp_path):
    texts = {"b.txt": TEXT[:3000], "a.txt": TEXT[3000:5000]}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    tokenizer = AutoTokenizer.from_pretrained(hub)
    expected = [token for name in sorted(texts) for token in tokenizer(texts[name])["input_ids"]]
    found = pieces(config_of(tmp_path / "out", hub, "context=16", num_samples=None, data_root=tmp_path))
    assert found[:, :-1].flatten().tolist() == expected[: len(found) * 16]
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"c\.txt is not UTF-8, which a tokenizer needs"):
        pieces(config_of(tmp_path / "out", hub, num_samples=None, data_root=tmp_path))


def test_a_folder_without_a_tokenizer_learns_bytes(tmp_path, capsys):
    hub = save_llama(tmp_path / "hub")
    config = config_of(tmp_path / "out", hub, num_samples=None)
    assert bytes(pieces(config)[:, :-1].flatten().tolist()) == TEXT.encode()[: len(pieces(config)) * 64]
    check_before_start(config)
    assert f"{hub} has no tokenizer: the model learns the bytes of the text" in capsys.readouterr().out
    assert lines_of_text(config_of(tmp_path, save_tokenizer(hub))) == []


def without_vocabulary(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "LlamaTokenizer"}))


def with_code(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    settings = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text("raise SystemExit('the code of the folder is run')")


@pytest.mark.parametrize(
    ("damage", "error", "sentence"),
    [
        (
            lambda folder: (folder / "tokenizer.json").write_text("{}"),
            FormatError,
            "HUB has a tokenizer that cannot be read: ",
        ),
        (without_vocabulary, FormatError, "HUB has a tokenizer that "),
        (with_code, FormatError, "HUB has a tokenizer that cannot be read: "),
        (
            lambda folder: save_llama(folder, vocab_size=VOCABULARY - 1),
            FormatError,
            "HUB: vocab_size is 299, and there are 300 tokens of its tokenizer",
        ),
        (
            lambda folder: save_llama(folder, max_position_embeddings=63),
            UsageError,
            "--dataset-arg context=64 is longer than the 63 positions of HUB",
        ),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_before_workers_start(damage, error, sentence, hub, tmp_path):
    damaged = tmp_path / "hub"
    shutil.copytree(hub, damaged)
    damage(damaged)
    with pytest.raises(error) as caught:
        check_before_start(config_of(tmp_path / "out", damaged))
    assert str(caught.value).startswith(sentence.replace("HUB", str(damaged)))
    assert "\n" not in str(caught.value)


def test_bytes_and_sizes_that_a_folder_does_not_take_are_refused(tmp_path):
    small = save_llama(tmp_path / "small", vocab_size=200)
    with pytest.raises(FormatError, match=r"vocab_size is 200, and there are 256 bytes of a text"):
        check_before_start(config_of(tmp_path / "out", small))
    with pytest.raises(UsageError, match=r"--model-arg is not for hf:.*, whose sizes are in its config\.json"):
        check_before_start(config_of(tmp_path / "out", save_llama(tmp_path / "hub"), model_arg=("layers=2",)))


def test_relative_folders_are_those_of_the_current_folder(tmp_path, monkeypatch):
    """Ray's workers have another one."""
    monkeypatch.chdir(tmp_path)
    words = "--strategy ddp --model hf:base --dataset text --init-from base --out run"
    found = config_of_words(parsed(words.split()))
    assert (found.model, found.init_from) == (f"hf:{tmp_path}/base", f"{tmp_path}/base")
    stored = config_of_words(parsed([*words.split(), "--init-from", "s3://bucket/base"]))
    assert stored.init_from == "s3://bucket/base"


def test_a_checkpoint_becomes_a_folder_that_continues_texts(hub, tmp_path):
    config = config_of(tmp_path / "run", hub, "context=16", learning_rate=0.02, keep_last=1)
    train_each(2, config)
    found = RunResult.read(config.out / "result.json")
    checkpoint = Path(found.checkpoint)
    assert [each.name for each in checkpoint.parent.iterdir()] == ["epoch_0002"]
    assert strangers_in(checkpoint) == []
    whole = tmp_path / "whole"
    ckpt_tools.consolidate(checkpoint, whole)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (whole / name).read_bytes() == (hub / name).read_bytes()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(whole), AutoTokenizer.from_pretrained(whole)
    begun = tokenizer("First Citizen:", return_tensors="pt")
    continued = model.generate(**begun, max_new_tokens=8, do_sample=False)[0, begun["input_ids"].shape[1] :]
    predictor = load_predictor(whole, max_new_tokens=8)
    [answer] = predictor.predict([predictor.decode(b"First Citizen:", "text")])
    assert answer.text == tokenizer.decode(continued, skip_special_tokens=True) != ""
