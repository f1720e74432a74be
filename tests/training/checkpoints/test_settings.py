"""A resumed run keeps to the settings of its checkpoint, or says what is different; no run replaces what none wrote."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ckpt_tools
from ckpt_tools.errors import DestinationExistsError, UsageError
from tests.training.jobs import small_config
from training.__main__ import main
from training.checkpoints.run_folder import make_partial
from training.checkpoints.settings import check_settings, read_settings
from training.config.options import SETTINGS, option_name
from training.config.train_config import Settings, TrainConfig
from training.launchers.checks import check_before_start
from training.loop.result import RESULT_NAME, RunResult, check_result_file

OTHER: Settings = {"model_arg": ("layers=8",), "lora": ("r=4",), "dataset": "fashion-mnist", "epoch_steps": 5}
OTHER |= {"dataset_arg": ("context=32",), "num_samples": 128, "batch_size": 32, "epochs": 9, "optimizer": "sgd"}
OTHER |= {"optimizer_arg": ("eps=1e-6",), "schedule": "linear", "schedule_arg": ("gamma=0.5",), "seed": 7}
OTHER |= {"warmup_fraction": 0.5, "learning_rate": 5.0, "weight_decay": 0.5, "clip_grad_norm": 1.0, "precision": "bf16"}
"""Of each setting, a value that is not the default."""

SAME: dict[str, dict[str, Any]] = {
    "schedule_arg": {"schedule": "os:getcwd"},
    "epoch_steps": {"dataset": "os:getcwd"},
    "lora": {"model": "hf:/folder", "dataset": "text"},
}
"""What a setting needs beside it."""


def config(**values: Any) -> TrainConfig:
    return TrainConfig(**({"out": Path("/run"), "engine": "fsdp2", "resume": "latest"} | values))


def saved(folder: Path, **entries: Any) -> Path:
    """A small checkpoint with these entries beside its model."""
    path = folder / "checkpoint.pt"
    torch.save({"model": {"w": torch.zeros(2)}, **entries}, path)
    return path


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in ("model", "data_root")])
def test_a_setting_that_differs_is_refused_unless_overridden(name, tmp_path):
    data: dict[str, Any] = {"data_root": Path("/data")} if name == "dataset" else {}
    data |= SAME.get(name, {})
    ours, plain = config(**{name: OTHER[name]}, **data), config(**SAME.get(name, {}))
    checkpoint = saved(tmp_path, settings=plain.settings)
    theirs = "not given" if plain.settings[name] is None else plain.settings[name]
    change = f"--{option_name(name)} is {ours.settings[name]} here and {theirs} in the checkpoint"
    with pytest.raises(UsageError, match=f"^{re.escape(change)}; .* --override {option_name(name)}$"):
        check_settings(ours, checkpoint)
    allowed = config(**{name: OTHER[name]}, **data, override=(option_name(name),))
    assert check_settings(allowed, checkpoint) == f"resuming {checkpoint} with other settings: {change}"


def test_another_model_is_not_answered_with_an_override(tmp_path):
    checkpoint = saved(tmp_path, settings=config(model="lm", dataset="text").settings)
    sentence = (
        "--model is vit here and lm in the checkpoint, which has other tensors: resume with --model lm --dataset text, "
        "or start a new run without --resume"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(sentence)}$"):
        check_settings(config(override=("model", "dataset")), checkpoint)


def test_other_samples_are_refused_and_the_same_ones_may_move(tmp_path):
    for name, words in {"here": "one two", "moved": "one two", "other": "one too"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(words)
        (tmp_path / name / "notes").write_text(name)
    text = {"model": "lm", "dataset": "text"}
    checkpoint = saved(tmp_path, settings=config(**text, data_root=tmp_path / "here").settings)
    assert check_settings(config(**text, data_root=tmp_path / "moved"), checkpoint) is None
    other = f"--data-root {tmp_path / 'other'} holds other samples than in the run of the checkpoint"
    with pytest.raises(UsageError, match=f"^{re.escape(other)}; .* --override data-root$"):
        check_settings(config(**text, data_root=tmp_path / "other"), checkpoint)
    with pytest.raises(UsageError, match=r"^--data-root is not given here, and was in the run of the checkpoint; "):
        check_settings(config(**text), checkpoint)
    line = check_settings(config(**text, data_root=tmp_path / "other", override=("data-root",)), checkpoint)
    assert line == f"resuming {checkpoint} with other settings: {other}"


def test_equal_settings_need_no_word(tmp_path):
    """Also where a restart names a setting that the run has overridden before: its checkpoint has the new value."""
    assert check_settings(config(num_workers=4, until=1), saved(tmp_path, settings=config().settings)) is None
    assert check_settings(config(seed=7, override=("seed",)), saved(tmp_path, settings=config(seed=7).settings)) is None


def settings_of(checkpoint: Path | str) -> Settings:
    """Settings that are saved in the checkpoint."""
    return read_settings(ckpt_tools.open(checkpoint).manifest.extra)


@pytest.mark.parametrize("engine", ["fsdp2", "zero1", "zero2", "zero3"])
def test_every_engine_saves_its_settings_and_the_versions_that_made_it(engine, small_run):
    result = small_run(engine)
    assert settings_of(result.checkpoint) == result.settings == small_config(Path("/run"), engine=engine).settings
    assert result.versions.keys() == {"python", "ckpt_tools", "torch", *(["deepspeed"] if engine != "fsdp2" else [])}
    assert result.versions["ckpt_tools"] == ckpt_tools.__version__
    assert result.versions["torch"].startswith(torch.__version__.partition("+")[0])


@pytest.mark.parametrize(
    ("engine", "way"), [("fsdp2", ("zero2", "dcp")), ("zero3", ("dcp", "zero1")), ("zero1", ("universal", "torch"))]
)
def test_settings_go_along_from_format_to_format(engine, way, small_run, tmp_path):
    source = small_run(engine).checkpoint
    for number, name in enumerate(way):
        size = {"world_size": 2} if name.startswith("zero") else {}
        ckpt_tools.convert(source, target := tmp_path / f"{number}", to=name, state="all", **size)
        source = str(target)
    assert settings_of(source) == small_run(engine).settings


def test_the_line_is_printed_before_the_run_starts_and_the_command_refuses(small_run, tmp_path, capsys):
    """Before it makes anything."""
    resume = str(Path(small_run("zero3").checkpoint).with_name("epoch_0001"))
    changed = {"seed": 7, "override": ("seed",)}
    check_before_start(small_config(tmp_path / "run", engine="fsdp2", resume=resume, **changed))
    sentence = "--seed is 7 here and 0 in the checkpoint"
    assert capsys.readouterr().out == f"resuming {resume} with other settings: {sentence}\n"
    refused = small_config(tmp_path / "run", engine="zero1", resume=resume, seed=7)
    done = CliRunner().invoke(main, refused.to_args())
    assert (done.exit_code, sentence in done.stderr) == (2, True)
    assert not refused.out.exists()


SHARDS = (".metadata", ".metadata.tmp", "__0_0.distcp", "latest", "zero_to_fp32.py", "zero_to_torch.py",
          "global_step8/zero_pp_rank_0_mp_rank_00_model_states.pt",
          "global_step8/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")  # fmt: skip


def test_what_a_killed_run_left_of_a_checkpoint_is_removed(tmp_path):
    for name in SHARDS:
        path = tmp_path / ".epoch_0001.partial" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")
    for _ in range(2):
        assert list(make_partial(tmp_path, "epoch_0001").iterdir()) == []


@pytest.mark.parametrize("name", ["global_step8/notes.pt", "link"])
def test_anything_else_there_is_kept(name, tmp_path):
    partial = make_partial(tmp_path, "epoch_0001")
    (partial / ".metadata").write_text("half")
    path = partial / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(".metadata") if name == "link" else path.write_text("mine")
    with pytest.raises(DestinationExistsError, match=path.name):
        make_partial(tmp_path, "epoch_0001")
    assert path.exists() and (partial / ".metadata").exists()


def test_a_result_that_no_run_wrote_is_found_before_it_is_replaced(tmp_path):
    check_result_file(tmp_path)
    texts = ("fsdp2", "full_shard", "ray", 2, "fp32", "digits", 1)
    result = RunResult(*texts, {}, {}, {}, 0.5, 1, 2, "epoch_0001", 1.0, (), (1, 2))  # type: ignore[arg-type]
    for _ in range(2):
        result.write(tmp_path)
        with (tmp_path / RESULT_NAME).open() as earlier:
            result.write(tmp_path)
            assert earlier.read() == (tmp_path / RESULT_NAME).read_text()
            assert os.fstat(earlier.fileno()).st_nlink == 0, "it is replaced in one step"
        assert [path.name for path in tmp_path.iterdir()] == [RESULT_NAME]
        check_result_file(tmp_path)
    (tmp_path / RESULT_NAME).write_text('{"accuracy": 1}')
    with pytest.raises(DestinationExistsError, match="is not the result of a run"):
        check_result_file(tmp_path)
