"""Options that a run does not take, or that do not go together: each answer is one sentence."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_origin

import pytest

from ckpt_tools.errors import UsageError
from tests.support.empty_values import check_refused, lines_with_one_empty_value
from training.__main__ import main
from training.config.options import describe_options, option_name
from training.config.train_config import TrainConfig
from training.studies import compare

pytestmark = pytest.mark.quick

REFUSED = """
--epochs 12 => give --strategy, or --engine to shard fully with that engine
--strategy zero3 --engine fsdp2 => --strategy zero3 is one of DeepSpeed's, and --engine is fsdp2; --strategy
--strategy ddp --model gpt => --model is one of vit, cnn, resnet18, lm, lm-moe, hf:FOLDER or a function, not 'gpt'
--strategy ddp --model lm => --model lm learns from text: give --dataset text
--strategy ddp --dataset text => --model vit learns from images, and --dataset is text
--strategy hybrid_shard => --strategy hybrid_shard needs --shard-size, the workers that share one copy
--strategy ddp --shard-size 2 => --shard-size is for --strategy hybrid_shard and zero3_hpz
--strategy zero3_hpz --shard-size 3 => --shard-size 3 does not divide 2 workers
--strategy zero3 --cpu-offload => --cpu-offload is for strategies of FSDP2, and --strategy is zero3; choose one that
--strategy full_shard --reshard-after-forward 3 => --reshard-after-forward 3 does not divide 2 workers
--strategy full_shard --num-workers 8 LM --tp 2 --pp 2 => --tp and --pp do not go together here; give one of them
--strategy zero2 --num-workers 8 MOE --tp 2 --pp 2 --ep 2 => --tp and --pp and --ep do not go together here; give one of
--strategy zero3 --tp 2 LM => --tp goes together with FSDP2, and --strategy is zero3
--strategy full_shard --tp 2 => --tp is for --model lm; vit cannot be split so
--strategy full_shard --tp 3 --num-workers 3 --batch-size 63 LM => --tp 3 does not divide the 4 heads of --model lm
--strategy full_shard --tp 2 --model-arg hidden=131 LM => --tp 2 does not divide the 131 hidden units of --model lm
--strategy full_shard --tp 2 --num-workers 3 --batch-size 63 LM => --tp 2 does not divide --num-workers 3
--strategy ddp --pp 2 --gradient-accumulation 4 LM => --pp goes together with FSDP2, zero0 and zero1, and --strategy
--strategy zero1 --pp-schedule interleaved1f1b --pp 2 --gradient-accumulation 4 LM
    => --strategy zero1 does not take --pp-schedule interleaved1f1b; choose 1f1b
--strategy full_shard --pp-chunks 2 => --pp-chunks is for --pp-schedule interleaved1f1b
--strategy full_shard --pp 2 => --pp is for --model lm; vit cannot be split so
--strategy full_shard --pp 5 --gradient-accumulation 4 LM --num-workers 5
    => --pp 5 is more stages than the 4 layers of --model lm
--engine fsdp2 --pp-schedule interleaved1f1b --pp 2 --gradient-accumulation 4 LM --pp-chunks 3
    => --pp 2 x --pp-chunks 3 is more stages than the 4 layers of --model lm
--strategy full_shard --pp 2 --gradient-accumulation 4 LM --num-workers 3
    => --pp 2 does not divide --num-workers 3
XX a micro-batch for each stage: give --gradient-accumulation 2 or a multiple
--strategy full_shard --pp 2 --gradient-accumulation 1 LM => --pp 2 needs a micro-batch for each stage: give
--strategy zero3 --ep 2 MOE => --ep goes together with FSDP2, and --strategy is zero3
--strategy full_shard --ep 2 LM => --ep is for --model lm-moe; lm cannot be split so
--strategy full_shard --ep 3 --num-workers 3 --batch-size 63 MOE => --ep 3 does not divide the 4 experts of --model
--strategy hybrid_shard --shard-size 2 --ep 4 --num-workers 4 MOE => --ep 4 does not divide --shard-size 2, the
--strategy full_shard --reshard-after-forward 2 --ep 2 MOE
    => --strategy full_shard does not take --ep with --reshard-after-forward; choose one of
--strategy zero3_offload --compile => --strategy zero3_offload does not take --compile; choose FSDP2 or ZeRO 0
--strategy full_shard --compile --tp 2 LM => --strategy full_shard does not take --compile with --tp or --pp; choose
--strategy zero0 --precision bf16 => --strategy zero0 does not take --precision bf16; choose zero1, or ddp with
--strategy ddp --precision fp16 => --strategy ddp does not take --precision fp16; choose no_shard, which keeps
--strategy ddp --precision bf16 --reduce-dtype bf16 => --reduce-dtype is for strategies of FSDP2, and --strategy is
--strategy full_shard --precision bf16 --reduce-dtype fp16 => --reduce-dtype fp16 needs --precision fp16, which
--strategy ddp --deepspeed-config /ds.json => --deepspeed-config is for strategies of DeepSpeed, and --strategy is ddp
--strategy ddp --num-workers 3 => the global batch of 64 does not divide over 3 workers; choose --batch-size a
--strategy full_shard --pp 2 --gradient-accumulation 4 LM --num-workers 6
    => the global batch of 64 does not divide over 3 workers x 4 micro-batches (--num-workers / --pp 2); choose
--strategy ddp --dataset image-folder => --dataset image-folder needs --data-root, a folder with train/CLASS and
--strategy ddp --epochs 2 --until 3 => --until 3 lies beyond --epochs 2
--strategy ddp --storage folder => --storage is a URL such as s3://bucket/run, not 'folder'; a folder is --out
--strategy ddp --storage s3://bucket/run --launcher torchrun => --storage is Ray Train's: use --launcher ray, or
--strategy ddp --storage s3://bucket/run --keep-last 1 => --keep-last removes checkpoints in --out alone; for
--strategy ddp --keep-last 1 --keep-best kappa => --keep-best kappa: give the better end, kappa:min or kappa:max
--strategy zero2 --async-save => --async-save is for --engine fsdp2: DeepSpeed saves the state of zero2
--strategy ddp --init-from a.pt --resume latest => --init-from starts a new run: use it without --resume, or with
--strategy ddp --model hf:folder --dataset text --lora r=2 => --lora trains beside the weights of a model: give them
--strategy ddp --override lr --resume latest => --override lr names no setting of a run; it is one of
--strategy ddp --min-workers 3 --max-restarts 1 => --min-workers 3 is more than --num-workers 2
--engine fsdp2 --keep-best loss => --keep-best is for --keep-last: without it every checkpoint is kept
--engine fsdp2 --rename a=b => --rename is for --init-from
--engine fsdp2 --init-from a.pt --inverse => --inverse is for --recipe
--engine fsdp2 --learning-rate 0.0 => --learning-rate is above 0, not 0.0
--engine fsdp2 --dataset fashion-mnist => --dataset fashion-mnist needs --data-root, the folder it is kept in or
--engine fsdp2 --data-root /data => --data-root is for the other datasets; digits come with scikit-learn
--engine fsdp2 --override seed => --override is for --resume: a fresh run takes all its settings from its own options
--strategy ddp --model lm --lora r=4 --launcher torchrun --dataset text
    => --lora is for --model hf:FOLDER, and --model is lm
--engine fsdp2 --min-workers 1 --max-restarts 1 --launcher torchrun => --min-workers is for --launcher ray
--engine fsdp2 --min-workers 1 --max-restarts 0 => --min-workers is for --max-restarts: without restarts a run ends
"""
"""Words of a run, and how what is said of them begins. LM and MOE are a model and its text."""

LM, MOE = "--model lm --dataset text", "--model lm-moe --dataset text"


def config_of(words: str) -> TrainConfig:
    """The run of these words, which the options of click have not judged before."""
    kinds = {f"--{option_name(field.name)}": (field.name, kind) for field, kind, _ in describe_options()}
    values: dict[str, Any] = {"out": Path("/run")}
    left = iter(words.split())
    for word in left:
        name, kind = kinds[word]
        if get_origin(kind) is tuple:
            values[name] = (*values.get(name, ()), next(left))
        else:
            values[name] = True if kind is bool else (kind if kind in (int, float, Path) else str)(next(left))
    return TrainConfig(**values)


@pytest.mark.parametrize(("words", "beginning"), re.findall(r"^(\S.*?)\s+=> (.*)$", REFUSED, re.MULTILINE))
def test_a_wrong_run_is_one_sentence(words, beginning):
    with pytest.raises(UsageError, match=f"^{re.escape(beginning)}"):
        config_of(words.replace("LM", LM).replace("MOE", MOE))


def test_an_epoch_holds_whole_batches_only():
    assert config_of("--engine fsdp2 --batch-size 64").steps_per_epoch(130) == 2
    with pytest.raises(UsageError, match="63 training samples do not fill one batch; --batch-size is 64"):
        config_of("--engine fsdp2 --batch-size 64").steps_per_epoch(63)


COMMANDS = {"train": main, "compare": compare.main}
EMPTY = [
    pytest.param(command, label, words, id=f"{name}{label}")
    for name, command in COMMANDS.items()
    for label, words in lines_with_one_empty_value(command)
]


@pytest.mark.parametrize(("command", "label", "words"), EMPTY)
def test_an_empty_value_is_refused(command, label, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(command, label, words)


def test_a_null_byte_and_the_folder_of_an_unset_variable_are_refused(tmp_path):
    """``Path`` makes the current folder of an unset variable."""
    with pytest.raises(UsageError, match=r"^--export has a null byte$"):
        TrainConfig(out=Path("/run"), engine="fsdp2", export="a\0b")
    with pytest.raises(UsageError, match=r"^--out is empty"):
        TrainConfig(out=Path(), strategy="full_shard")
    command = [sys.executable, "-m", "ckpt_tools", "train", "--strategy", "full_shard", "--out", ""]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (2, "Error: --out is empty")
    assert not list(tmp_path.iterdir())
