"""Folders of transformers: the tokens of their tokenizer, or bytes without one; and LoRA, by which every strategy
trains the same adapter and resumes the others' checkpoints, while the base model stays as it is."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

import ckpt_tools
from ckpt_tools.errors import CkptError, FormatError, UsageError
from inference.models.predictor import load_predictor
from tests.training.hub import TEXT, save_llama, save_tokenizer
from tests.training.jobs import losses, result_of, tiny_config, train_each
from training.checkpoints.run_folder import find_unknown_files
from training.checkpoints.weights import export_weights
from training.config.options import BY_NAME, STRATEGIES
from training.config.train_config import TrainConfig
from training.data.loading import make_dataset
from training.data.texts import list_tokenizer_messages
from training.launchers.checks import check_before_start

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

SAMPLE = {"full_shard": ["zero2", "zero3"], "zero3": ["full_shard", "ddp"]}
EACH = {name: [[*STRATEGIES][at - 1], [*STRATEGIES][at - 4]] for at, name in enumerate(STRATEGIES)}
"""Who is resumed by whom: in the soak every strategy."""

LORA = ("r=4", "lora_alpha=32", "target_modules=all-linear")


def lora_config(out: Path, hub: Path, **values: Any) -> TrainConfig:
    given = {"init_from": None if "resume" in values else str(hub), "lora": LORA, "learning_rate": 0.02, **values}
    return tiny_config(out, model=f"hf:{hub}", dataset_arg=("context=16",), **given)


@pytest.fixture(scope="module")
def trained(hub, tmp_path_factory, pytestconfig):
    """A run by each strategy on two ranks."""
    out = tmp_path_factory.mktemp("runs")
    found = {
        name: by_strategy(out / name, hub, name) for name in (EACH if pytestconfig.getoption("--soak") else SAMPLE)
    }
    train_each(*found.values())
    return found


def by_strategy(out: Path, hub: Path, strategy: str, **values: Any) -> TrainConfig:
    groups = {"shard_size": 1} if BY_NAME[strategy].in_groups else {}  # type: ignore[index]
    return lora_config(out, hub, strategy=strategy, **groups, **values)


def test_strategies_train_the_same_adapter(trained, hub):
    """A checkpoint has the base model as it was, and the state of the adapter alone."""
    expected = losses(trained["full_shard"])
    assert expected[3] < expected[0]
    for name, config in trained.items():
        assert losses(config) == pytest.approx(expected, rel=1e-5), name
    check_base_and_adapters(trained, hub)


@pytest.mark.extended
def test_strategies_resume_each_others_adapters(trained, hub, pytestconfig):
    """From the middle; some alone."""
    resumed, pairs = {}, EACH if pytestconfig.getoption("--soak") else SAMPLE
    for name, config in trained.items():
        for workers, by in zip((1, 2), pairs[name], strict=True):
            out, resume = config.out.with_name(f"{name}-{by}"), f"{config.out}/checkpoints/epoch_0001"
            resumed[out.name] = by_strategy(out, hub, by, num_workers=workers, resume=resume)
    train_each(*sorted(resumed.values(), key=lambda config: config.num_workers))
    for name, config in resumed.items():
        assert losses(config) == pytest.approx(losses(trained["full_shard"])[2:], rel=1e-5), name
    check_base_and_adapters(resumed, hub)


def check_base_and_adapters(runs: dict[str, TrainConfig], hub: Path) -> None:
    base = {key: value.numpy() for key, value in AutoModelForCausalLM.from_pretrained(hub).state_dict().items()}
    for name, config in runs.items():
        checkpoint = result_of(config).checkpoint
        opened = ckpt_tools.open(checkpoint)
        adapters = {each for each in opened if ".lora_" in each}
        assert len(adapters) == 2 * 2 * 7, name
        found = ckpt_tools.inspect(checkpoint).tensors
        assert {each.name for each in found if each.slot == "exp_avg"} == adapters, name
        for each in opened:
            bare = each.removeprefix("base_model.model.").replace(".base_layer.", ".")
            if each not in adapters:
                assert np.asarray(opened[each]).tobytes() == base[bare].tobytes(), (name, each)


@torch.no_grad()
def held_out_of(model: Any, config: TrainConfig) -> tuple[float, tuple[int, ...]]:
    """Loss and predictions of the held-out pieces."""
    samples: Any = make_dataset(config, "held-out")
    inputs, labels = samples.__getitems__(range(len(samples)))
    logits = model(input_ids=inputs).logits
    loss = functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten())
    return float(loss), tuple(logits.argmax(-1).flatten().tolist())


def test_peft_loads_the_export_and_the_merged_model_is_the_same(trained, hub, tmp_path):
    before, _ = held_out_of(AutoModelForCausalLM.from_pretrained(hub), trained["full_shard"])
    for name in ("full_shard", "zero3"):
        config, found = trained[name], result_of(trained[name])
        adapter = tmp_path / f"{name}-adapter"
        export_weights(replace(config, export=str(adapter)), found.checkpoint)
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(hub), str(adapter))
        loss, predicted = held_out_of(model, config)
        assert predicted == found.predicted
        assert loss == pytest.approx(found.held_out["loss"], rel=1e-6)
        assert loss < before - 0.01
        for number, base in enumerate((hub, Path(found.checkpoint))):
            merged = tmp_path / f"{name}-merged-{number}"
            ckpt_tools.merge_lora(base, adapter, merged, to="safetensors")
            whole, loading = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
            assert not any(loading.values()), loading
            assert held_out_of(whole, config)[0] == pytest.approx(loss, rel=1e-6)
            assert (merged / "tokenizer.json").read_bytes() == (hub / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        (["r=0"], "--lora: `r` should be a positive integer value but the value passed is 0"),
        (["use_dora=true"], "--lora use_dora is not taken; it is one of r, lora_alpha"),
    ],
)
def test_a_wrong_adapter_is_refused_before_workers_start(lora, sentence, hub, tmp_path):
    with pytest.raises(UsageError) as caught:
        check_before_start(lora_config(tmp_path, hub, strategy="ddp", lora=tuple(lora)))
    assert str(caught.value).startswith(sentence)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    return save_tokenizer(save_llama(tmp_path_factory.mktemp("hub")))


def config_of(out: Path, hub: Path, *arguments: str, **values: Any) -> TrainConfig:
    return tiny_config(out, model=f"hf:{hub}", strategy="full_shard", dataset_arg=arguments, **values)


def pieces(config: TrainConfig) -> torch.Tensor:
    """All pieces in order, each with the token after it."""
    parts: list[Any] = [make_dataset(config, part) for part in ("train", "held-out")]
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
    assert list_tokenizer_messages(config_of(tmp_path, save_tokenizer(hub))) == []


def with_code(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    settings = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text("raise SystemExit('the code of the folder is run')")


def with_model(**sizes: int) -> Callable[[Path], object]:
    return lambda folder: save_llama(folder, **sizes)


CANNOT_BE_READ = "HUB has a tokenizer that cannot be read: "
DAMAGE: list[tuple[Callable[[Path], object], type[CkptError], str]] = [
    (with_code, FormatError, CANNOT_BE_READ),
    (with_model(vocab_size=299), FormatError, "HUB: vocab_size is 299, and there are 300 tokens of its tokenizer"),
]


@pytest.mark.parametrize(("damage", "error", "sentence"), DAMAGE)
def test_a_tokenizer_that_does_not_fit_is_refused_before_workers_start(damage, error, sentence, hub, tmp_path):
    damaged = Path(shutil.copytree(hub, tmp_path / "hub"))
    damage(damaged)
    with pytest.raises(error) as caught:
        check_before_start(config_of(tmp_path / "out", damaged))
    assert str(caught.value).startswith(sentence.replace("HUB", str(damaged)))
    assert "\n" not in str(caught.value)


@pytest.mark.extended
def test_a_checkpoint_becomes_a_folder_that_continues_texts(hub, tmp_path):
    config = config_of(tmp_path / "run", hub, "context=16", learning_rate=0.02, keep_last=1)
    train_each(config)
    checkpoint = Path(result_of(config).checkpoint)
    assert [each.name for each in checkpoint.parent.iterdir()] == ["epoch_0002"]
    assert find_unknown_files(checkpoint) == []
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
