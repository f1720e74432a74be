"""Options that a run does not take, or that do not go together: each answer is one sentence."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_origin

import pytest
from click.testing import CliRunner

from ckpt_tools.errors import UsageError
from tests.support.empty_values import check_refused, lines_with_one_empty_value
from training.__main__ import main
from training.config import combinations
from training.config.options import Options, described, spelt
from training.config.train_config import TrainConfig
from training.studies import compare

pytestmark = pytest.mark.quick

REFUSED = r"""
--epochs 12
    give --strategy, or --engine to shard fully with that engine
--strategy zero3 --engine fsdp2
    --strategy zero3 is one of DeepSpeed's, and --engine is fsdp2; --strategy full_shard is the same of fsdp2
--strategy zero1_offload --engine zero1
    --strategy zero1_offload is one of DeepSpeed's, and --engine is zero1
--strategy ddp --model gpt
    --model is one of vit, cnn, resnet18, lm, lm-moe, hf:FOLDER or a function, not 'gpt'
--strategy ddp --model lm
    --model lm learns from text: give --dataset text
--strategy ddp --dataset text
    --model vit learns from images, and --dataset is text
--strategy hybrid_shard
    --strategy hybrid_shard needs --shard-size, the workers that share one copy
--strategy ddp --shard-size 2
    --shard-size is for --strategy hybrid_shard and zero3_hpz
--strategy zero3_hpz --shard-size 3
    --shard-size 3 does not divide 2 workers
--strategy zero3 --cpu-offload
    --cpu-offload is for strategies of FSDP2, and --strategy is zero3; choose one that ends in _offload
--strategy ddp --forward-prefetch 1
    --forward-prefetch is for strategies of FSDP2, and --strategy is ddp
--strategy full_shard --reshard-after-forward 3
    --reshard-after-forward 3 does not divide 2 workers
--strategy no_shard --reshard-after-forward 2
    --reshard-after-forward is for --strategy full_shard, not no_shard
--strategy full_shard --num-workers 8 --model lm --dataset text --tp 2 --pp 2
    --tp and --pp do not go together here; give one of them
--strategy zero2 --num-workers 8 --model lm-moe --dataset text --tp 2 --pp 2 --ep 2
    --tp, --pp and --ep do not go together here; give one of them
--strategy zero3 --tp 2 --model lm --dataset text
    --tp goes together with FSDP2, and --strategy is zero3
--strategy full_shard --tp 2
    --tp is for --model lm; the layers of vit cannot be split
--strategy full_shard --tp 3 --num-workers 3 --batch-size 63 --model lm --dataset text
    --tp 3 does not divide the 4 heads of --model lm
--strategy full_shard --tp 2 --model-arg hidden=131 --model lm --dataset text
    --tp 2 does not divide the 131 hidden units of --model lm
--strategy full_shard --tp 2 --num-workers 3 --batch-size 63 --model lm --dataset text
    --tp 2 does not divide --num-workers 3
--strategy ddp --pp 2 --gradient-accumulation 4 --model lm --dataset text
    --pp goes together with FSDP2, zero0 and zero1, and --strategy is ddp
--strategy zero1_offload --pp 2 --gradient-accumulation 4 --model lm --dataset text
    --pp goes together with FSDP2, zero0 and zero1, and --strategy is zero1_offload
--strategy zero1 --pp-schedule interleaved1f1b --pp 2 --gradient-accumulation 4 --model lm --dataset text
    --pp-schedule interleaved1f1b is for FSDP2, and --strategy is zero1
--strategy full_shard --pp-schedule gpipe
--strategy full_shard --pp-schedule interleaved1f1b
    --pp-schedule is for --pp
--strategy full_shard --pp-chunks 2
--strategy full_shard --pp-chunks 2 --pp 2 --gradient-accumulation 4 --model lm --dataset text
    --pp-chunks is for --pp-schedule interleaved1f1b
--strategy full_shard --pp 2
    --pp is for --model lm; the layers of vit cannot be cut into stages
--strategy full_shard --pp 5 --gradient-accumulation 4 --model lm --dataset text --num-workers 5
    --pp 5 is more stages than the 4 layers of --model lm
--engine fsdp2 --pp-schedule interleaved1f1b --pp 2 --gradient-accumulation 4 --model lm --dataset text --pp-chunks 3
    --pp 2 x --pp-chunks 3 is more stages than the 4 layers of --model lm
--engine fsdp2 --pp-schedule interleaved1f1b --pp 2 --gradient-accumulation 4 --model lm --dataset text \
--model-arg layers=3
    --pp 2 x --pp-chunks 2 is more stages than the 3 layers of --model lm
--strategy full_shard --pp 2 --gradient-accumulation 4 --model lm --dataset text --num-workers 3
    --pp 2 does not divide --num-workers 3
--strategy full_shard --pp-schedule interleaved1f1b --pp 2 --gradient-accumulation 1 --model lm --dataset text
--strategy full_shard --pp-schedule interleaved1f1b --pp 2 --gradient-accumulation 3 --model lm --dataset text
    --pp-schedule interleaved1f1b takes --pp 2 micro-batches at a time: give --gradient-accumulation 2 or a multiple of
    it
--strategy full_shard --pp 2 --gradient-accumulation 1 --model lm --dataset text
    --pp 2 needs at least as many micro-batches, so that each stage has one to work on: give --gradient-accumulation 2
    or more, or --pp-schedule gpipe
--strategy zero1 --pp 2 --gradient-accumulation 1 --model lm --dataset text
    --pp 2 needs at least as many micro-batches, so that each stage has one to work on: give --gradient-accumulation 2
    or more
--strategy zero3 --ep 2 --model lm-moe --dataset text
    --ep goes together with FSDP2, and --strategy is zero3, which trains --model lm-moe without --ep
--strategy full_shard --ep 2 --model lm --dataset text
    --ep is for --model lm-moe; lm has no experts
--strategy full_shard --ep 3 --num-workers 3 --batch-size 63 --model lm-moe --dataset text
    --ep 3 does not divide the 4 experts of --model lm-moe
--strategy full_shard --ep 2 --num-workers 3 --batch-size 63 --model lm-moe --dataset text
    --ep 2 does not divide --num-workers 3
--strategy hybrid_shard --shard-size 2 --ep 4 --num-workers 4 --model lm-moe --dataset text
    --ep 4 does not divide --shard-size 2, the workers that share one copy
--strategy full_shard --reshard-after-forward 2 --ep 2 --model lm-moe --dataset text
    --reshard-after-forward does not go together with --ep, which regroups the same workers
--strategy zero3_offload --compile
    --compile is for FSDP2 and ZeRO 0 to 2: --strategy zero3_offload gathers parameters inside of each block
--strategy full_shard --compile --tp 2 --model lm --dataset text
--strategy full_shard --compile --pp 2 --gradient-accumulation 4 --model lm --dataset text
--strategy full_shard --compile --model lm-moe --dataset text
    --compile does not go together with --tp, --pp or --model lm-moe
--strategy zero0 --precision bf16
    --strategy zero0 is for fp32 here; in bf16 choose zero1, or ddp with bf16
--strategy ddp --precision fp16
    --strategy ddp computes in fp32 or bf16 here; no_shard keeps the same whole copies, and takes fp16
--strategy ddp --precision bf16 --reduce-dtype bf16
    --reduce-dtype is for FSDP2, and --strategy is ddp; choose no_shard
--strategy zero2 --reduce-dtype bf16
    --reduce-dtype is for FSDP2, and --strategy is zero2; set communication_data_type in --deepspeed-config
--strategy full_shard --precision bf16 --reduce-dtype fp16
    --reduce-dtype fp16 needs --precision fp16, which scales the loss; small gradients would be zero
--strategy ddp --deepspeed-config /ds.json
    --deepspeed-config is for strategies of DeepSpeed, and --strategy is ddp
--strategy ddp --num-workers 3
--engine fsdp2 --min-workers 3 --max-restarts 1 --num-workers 4
    the global batch of 64 does not divide over 3 workers; choose --batch-size a multiple of --num-workers
--strategy ddp --gradient-accumulation 3
    the global batch of 64 does not divide over 2 workers x 3 micro-batches; choose --batch-size a multiple of their
    product
--strategy full_shard --pp 2 --gradient-accumulation 4 --model lm --dataset text --num-workers 6
    the global batch of 64 does not divide over 3 workers x 4 micro-batches (--num-workers / --pp 2); choose
    --batch-size a multiple of their product
--strategy ddp --dataset image-folder
    --dataset image-folder needs --data-root, a folder with train/CLASS and held-out/CLASS
--strategy ddp --epochs 2 --until 3
    --until 3 lies beyond --epochs 2
--strategy ddp --storage folder
    --storage is a URL such as s3://bucket/run, not 'folder'; a folder is --out
--strategy ddp --storage s3://bucket/run --launcher torchrun
    --storage is Ray Train's: use --launcher ray, or convert the checkpoints to it afterwards
--strategy ddp --storage s3://bucket/run --keep-last 1
    --keep-last removes checkpoints in --out alone; for --storage use ckpt-tools prune
--strategy ddp --keep-last 1 --keep-best kappa
    --keep-best kappa: give the better end, kappa:min or kappa:max
--strategy zero2 --async-save
    --async-save needs --engine fsdp2: DeepSpeed saves the state of zero2 itself
--strategy ddp --init-from a.pt --resume latest
    --init-from starts a new run: use it without --resume, or with --resume auto
--strategy ddp --model hf:folder --dataset text --lora r=2
--strategy ddp --model hf:FOLDER --lora r=4 --launcher torchrun --dataset text
--strategy ddp --model hf:FOLDER --lora r=4 --launcher torchrun --dataset text --resume auto
    --lora trains beside the weights of a model: give them with --init-from
--strategy ddp --override lr --resume latest
    --override lr names no setting of a run; it is one of model, model-arg, lora, epochs, dataset, dataset-arg,
    data-root, num-samples, epoch-steps, batch-size, optimizer, optimizer-arg, learning-rate, weight-decay, schedule,
    schedule-arg, warmup-fraction, precision, clip-grad-norm, seed
--strategy ddp --min-workers 3 --max-restarts 1
    --min-workers 3 is more than --num-workers 2
--engine ddp
    --engine is one of fsdp2, deepspeed, zero1, zero2, zero3, not 'ddp'
--engine fsdp2 --precision fp8
    --precision is one of fp32, bf16, fp16, not 'fp8'
--engine fsdp2 --num-workers 0
    --num-workers is at least 1, not 0
--engine fsdp2 --save-every -1
    --save-every is at least 1, not -1
--engine fsdp2 --save-every-steps 0
    --save-every-steps is at least 1, not 0
--engine fsdp2 --save-every-minutes nan
    --save-every-minutes is above 0, not nan
--engine fsdp2 --max-steps 0
    --max-steps is at least 1, not 0
--engine fsdp2 --max-restarts -1
    --max-restarts is at least 0, not -1
--engine fsdp2 --keep-best loss
    --keep-best is for --keep-last: without it every checkpoint is kept
--engine fsdp2 --rename a=b
    --rename is for --init-from
--engine fsdp2 --recipe mixtral
    --recipe is for --init-from
--engine fsdp2 --init-from a.pt --inverse
    --inverse is for --recipe
--engine fsdp2 --num-samples 0
    --num-samples is at least 1, not 0
--engine fsdp2 --learning-rate 0.0
    --learning-rate is above 0, not 0.0
--engine fsdp2 --learning-rate nan
    --learning-rate is above 0, not nan
--engine fsdp2 --learning-rate inf
    --learning-rate is above 0, not inf
--engine fsdp2 --weight-decay nan
    --weight-decay is at least 0, not nan
--engine fsdp2 --warmup-fraction 1.0
    --warmup-fraction is at least 0 and below 1, not 1.0
--engine fsdp2 --seed -1
    --seed is at least 0 and below 4294967296, not -1
--engine fsdp2 --dataset fashion-mnist
    --dataset fashion-mnist needs --data-root, the folder it is kept in or downloaded to
--engine fsdp2 --data-root /data
    --data-root is for the other datasets; digits come with scikit-learn
--engine fsdp2 --override seed
    --override is for --resume: a fresh run takes all its settings from its own options
--engine fsdp2 --strategy fsdp
    --strategy is one of ddp, no_shard, shard_grad_op, full_shard, hybrid_shard, zero0, zero1, zero2, zero3,
    zero1_offload, zero2_offload, zero3_offload, zero3_hpz, not 'fsdp'
--engine fsdp2 --schedule step
    --schedule is one of cosine, linear, constant, or a function, not 'step'
--engine fsdp2 --clip-grad-norm 0.0
    --clip-grad-norm is above 0, not 0.0
--engine fsdp2 --forward-prefetch -1
    --forward-prefetch is at least 0, not -1
--strategy ddp --model lm --lora r=4 --launcher torchrun --dataset text
    --lora is for --model hf:FOLDER, and --model is lm
--strategy ddp --model hf:FOLDER --lora r --launcher torchrun --dataset text
    --lora is NAME=VALUE, not 'r'
--engine fsdp2 --min-workers 1 --max-restarts 1 --launcher torchrun
    --min-workers is for --launcher ray
--engine fsdp2 --min-workers 1 --max-restarts 0
    --min-workers is for --max-restarts: without restarts a run ends with its first worker
--engine fsdp2 --min-workers 0 --max-restarts 1
    --min-workers is at least 1, not 0
"""
"""Words of a run, below them what is said; several lines of words have one answer."""


def cases() -> list[tuple[str, str]]:
    found, lines = [], re.findall(r"((?:^\S.*\n)+)((?:^    .*\n)+)", REFUSED.replace("\\\n", ""), re.MULTILINE)
    for words, sentence in lines:
        found += [(each, " ".join(sentence.split())) for each in words.splitlines()]
    return found


def config_of(words: str) -> TrainConfig:
    """The run of these words, which the options of click have not judged before."""
    kinds = {f"--{spelt(field.name)}": (field.name, kind) for field, kind, _ in described()}
    values: dict[str, Any] = {"out": Path("/run")}
    left = iter(words.split())
    for word in left:
        name, kind = kinds[word]
        if get_origin(kind) is tuple:
            values[name] = (*values.get(name, ()), next(left))
        else:
            values[name] = True if kind is bool else (kind if kind in (int, float, Path) else str)(next(left))
    return TrainConfig(**values)


@pytest.mark.parametrize(("words", "sentence"), cases(), ids=lambda value: value[:60])
def test_a_wrong_run_is_one_sentence(words, sentence):
    with pytest.raises(UsageError) as caught:
        config_of(words)
    assert str(caught.value) == sentence


def test_each_rule_has_a_case():
    found = {sentence for _, sentence in cases()}
    rules = [node.value for node in ast.walk(ast.parse(inspect.getsource(combinations))) if isinstance(node, ast.Yield)]
    assert len(rules) > 30
    for rule in rules:
        parts = rule.values if isinstance(rule, ast.JoinedStr) else [rule]
        pattern = "".join(re.escape(str(each.value)) if isinstance(each, ast.Constant) else ".*" for each in parts)
        assert any(re.fullmatch(pattern, each) for each in found), pattern


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


def test_every_command_is_here():
    folder = Path(sys.modules["training"].__path__[0])
    found = {path.stem for path in folder.rglob("*.py") if "@click.command(" in path.read_text()}
    assert found == {"__main__", *COMMANDS.keys() - {"train"}}


@pytest.mark.parametrize(("command", "label", "words"), EMPTY)
def test_an_empty_value_is_refused(command, label, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(command, label, words)


@pytest.mark.parametrize("name", ["out", "data-root", "storage", "rename"])
def test_an_empty_value_in_a_file_of_options_is_refused(name, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f"{name} = " + ('[""]\n' if name == "rename" else '""\n'))
    out = [] if name == "out" else ["--out", str(tmp_path / "run")]
    ended = CliRunner().invoke(main, ["--config", str(file), *out])
    assert (ended.exit_code, f"--{name}" in ended.output) == (2, True), ended.output


@pytest.mark.parametrize("name", sorted(Options.__dataclass_fields__))
def test_a_run_has_no_empty_text(name):
    with pytest.raises(UsageError, match=f"^--{spelt(name)} is empty"):
        TrainConfig(**{"out": Path("/run"), "strategy": "full_shard", name: ""})


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
