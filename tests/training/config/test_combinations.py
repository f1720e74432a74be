"""Options that do not go together: each rule of the table, and that it says one thing in one sentence."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ckpt_tools.errors import FormatError, UsageError
from tests.training.documents import ALL
from training.__main__ import main
from training.config import combinations
from training.config.command_line import shipped
from training.config.model_names import MODELS
from training.config.strategies import BY_NAME, STRATEGIES, chosen_strategy
from training.config.train_config import TrainConfig
from training.engines.deepspeed_config import deepspeed_config
from training.launchers.checks import check_frameworks

pytestmark = pytest.mark.quick

TEXT = {"model": "lm", "dataset": "text"}
PIPELINE = {"pp": 2, "gradient_accumulation": 4, **TEXT}
INTERLEAVED = {"pp_schedule": "interleaved1f1b", **PIPELINE}
EXPERTS = {"model": "lm-moe", "dataset": "text"}
BROKEN: dict[str, list[tuple[dict[str, Any], str]]] = {
    "neither": [({}, "give --strategy, or --engine to shard fully with that engine")],
    "engine": [
        (
            {"strategy": "zero3", "engine": "fsdp2"},
            "--strategy zero3 is one of DeepSpeed's, and --engine is fsdp2; --strategy full_shard is the same of fsdp2",
        ),
        (
            {"strategy": "zero1_offload", "engine": "zero1"},
            "--strategy zero1_offload is one of DeepSpeed's, and --engine is zero1",
        ),
    ],
    "model": [
        (
            {"strategy": "ddp", "model": "gpt"},
            "--model is one of vit, cnn, resnet18, lm, lm-moe, hf:FOLDER or a function, not 'gpt'",
        )
    ],
    "task": [
        ({"strategy": "ddp", "model": "lm"}, "--model lm learns from text: give --dataset text"),
        ({"strategy": "ddp", "dataset": "text"}, "--model vit learns from images, and --dataset is text"),
    ],
    "shard-size missing": [
        (
            {"strategy": "hybrid_shard"},
            "--strategy hybrid_shard needs --shard-size, the workers that share one copy",
        )
    ],
    "shard-size unused": [
        ({"strategy": "ddp", "shard_size": 2}, "--shard-size is for --strategy hybrid_shard and zero3_hpz")
    ],
    "shard-size": [({"strategy": "zero3_hpz", "shard_size": 3}, "--shard-size 3 does not divide 2 workers")],
    "fsdp options": [
        (
            {"strategy": "zero3", "cpu_offload": True},
            "--cpu-offload is for strategies of FSDP2, and --strategy is zero3; choose one that ends in _offload",
        ),
        (
            {"strategy": "ddp", "forward_prefetch": 1},
            "--forward-prefetch is for strategies of FSDP2, and --strategy is ddp",
        ),
    ],
    "reshard": [
        (
            {"strategy": "full_shard", "reshard_after_forward": 3},
            "--reshard-after-forward 3 does not divide 2 workers",
        ),
        (
            {"strategy": "no_shard", "reshard_after_forward": 2},
            "--reshard-after-forward is for --strategy full_shard, not no_shard",
        ),
    ],
    "parallel": [
        (
            {"strategy": strategy, "num_workers": 8, **model, **dict.fromkeys(sizes, 2)},
            f"{named} do not go together here; give one of them",
        )
        for strategy, model, sizes, named in (
            ("full_shard", TEXT, ("tp", "pp"), "--tp and --pp"),
            ("full_shard", EXPERTS, ("tp", "ep"), "--tp and --ep"),
            ("shard_grad_op", EXPERTS, ("pp", "ep"), "--pp and --ep"),
            ("zero2", EXPERTS, ("tp", "pp", "ep"), "--tp, --pp and --ep"),
        )
    ],
    "tp strategy": [
        ({"strategy": "zero3", "tp": 2, **TEXT}, "--tp goes together with FSDP2, and --strategy is zero3"),
    ],
    "tp model": [
        (
            {"strategy": "full_shard", "tp": 2},
            "--tp is for --model lm; the layers of vit cannot be split",
        ),
        (
            {"strategy": "full_shard", "tp": 2, **EXPERTS},
            "--tp is for --model lm; the layers of lm-moe cannot be split",
        ),
    ],
    "tp sizes": [
        (
            {"strategy": "full_shard", "tp": 3, "num_workers": 3, "batch_size": 63, **TEXT},
            "--tp 3 does not divide the 4 heads of --model lm",
        ),
        (
            {"strategy": "full_shard", "tp": 2, "model_arg": ("hidden=131",), **TEXT},
            "--tp 2 does not divide the 131 hidden units of --model lm",
        ),
    ],
    "tp workers": [
        (
            {"strategy": "full_shard", "tp": 2, "num_workers": 3, "batch_size": 63, **TEXT},
            "--tp 2 does not divide --num-workers 3",
        )
    ],
    "pp strategy": [
        ({"strategy": name, **PIPELINE}, f"--pp goes together with FSDP2, zero0 and zero1, and --strategy is {name}")
        for name in ("ddp", "zero1_offload", "zero2", "zero3")
    ],
    "pp-schedule": [
        (
            {"strategy": "zero1", "pp_schedule": "gpipe", **PIPELINE},
            "--pp-schedule gpipe is for FSDP2, and --strategy is zero1",
        ),
        (
            {"strategy": "zero1", **INTERLEAVED},
            "--pp-schedule interleaved1f1b is for FSDP2, and --strategy is zero1",
        ),
    ],
    "pp-schedule unused": [
        ({"strategy": "full_shard", "pp_schedule": name}, "--pp-schedule is for --pp")
        for name in ("gpipe", "interleaved1f1b")
    ],
    "pp-chunks": [
        ({"strategy": "full_shard", "pp_chunks": 2, **more}, "--pp-chunks is for --pp-schedule interleaved1f1b")
        for more in ({}, PIPELINE)
    ],
    "pp model": [
        (
            {"strategy": "full_shard", "pp": 2},
            "--pp is for --model lm; the layers of vit cannot be cut into stages",
        )
    ],
    "pp layers": [
        (
            {"strategy": "full_shard", **PIPELINE, "pp": 5, "num_workers": 5},
            "--pp 5 is more stages than the 4 layers of --model lm",
        ),
        (
            {"strategy": "full_shard", **INTERLEAVED, "pp_chunks": 3},
            "--pp 2 x --pp-chunks 3 is more stages than the 4 layers of --model lm",
        ),
        (
            {"strategy": "full_shard", **INTERLEAVED, "model_arg": ("layers=3",)},
            "--pp 2 x --pp-chunks 2 is more stages than the 3 layers of --model lm",
        ),
    ],
    "pp workers": [
        ({"strategy": "full_shard", **PIPELINE, "num_workers": 3}, "--pp 2 does not divide --num-workers 3"),
        ({"strategy": "full_shard", **PIPELINE, "num_workers": 1}, "--pp 2 does not divide --num-workers 1"),
    ],
    "pp rounds": [
        (
            {"strategy": "full_shard", **INTERLEAVED, "gradient_accumulation": parts},
            "--pp-schedule interleaved1f1b takes --pp 2 micro-batches at a time: give --gradient-accumulation 2 or a "
            "multiple of it",
        )
        for parts in (1, 3)
    ],
    "pp micro-batches": [
        (
            {"strategy": "full_shard", **PIPELINE, "gradient_accumulation": 1},
            "--pp 2 needs at least as many micro-batches, so that each stage has one to work on: give "
            "--gradient-accumulation 2 or more, or --pp-schedule gpipe",
        ),
        (
            {"strategy": "zero1", **PIPELINE, "gradient_accumulation": 1},
            "--pp 2 needs at least as many micro-batches, so that each stage has one to work on: give "
            "--gradient-accumulation 2 or more",
        ),
    ],
    "ep strategy": [
        (
            {"strategy": "zero3", "ep": 2, **EXPERTS},
            "--ep goes together with FSDP2, and --strategy is zero3, which trains --model lm-moe without --ep",
        ),
        (
            {"strategy": "ddp", "ep": 2, **EXPERTS},
            "--ep goes together with FSDP2, and --strategy is ddp, which trains --model lm-moe without --ep",
        ),
    ],
    "ep model": [
        (
            {"strategy": "full_shard", "ep": 2, **TEXT},
            "--ep is for --model lm-moe; lm has no experts",
        )
    ],
    "ep experts": [
        (
            {"strategy": "full_shard", "ep": 3, "num_workers": 3, "batch_size": 63, **EXPERTS},
            "--ep 3 does not divide the 4 experts of --model lm-moe",
        )
    ],
    "ep workers": [
        (
            {"strategy": "full_shard", "ep": 2, "num_workers": 3, "batch_size": 63, **EXPERTS},
            "--ep 2 does not divide --num-workers 3",
        )
    ],
    "ep shard-size": [
        (
            {"strategy": "hybrid_shard", "shard_size": 2, "ep": 4, "num_workers": 4, **EXPERTS},
            "--ep 4 does not divide --shard-size 2, the workers that share one copy",
        )
    ],
    "ep reshard": [
        (
            {"strategy": "full_shard", "reshard_after_forward": 2, "ep": 2, **EXPERTS},
            "--reshard-after-forward does not go together with --ep, which regroups the same workers",
        )
    ],
    "compile stage 3": [
        (
            {"strategy": "zero3_offload", "compile": True},
            "--compile is for FSDP2 and ZeRO 0 to 2: --strategy zero3_offload gathers parameters inside of each block",
        )
    ],
    "compile parallel": [
        (
            {"strategy": "full_shard", "compile": True, **more},
            "--compile does not go together with --tp, --pp or --model lm-moe",
        )
        for more in ({"tp": 2, **TEXT}, PIPELINE, EXPERTS)
    ],
    "zero0 precision": [
        (
            {"strategy": "zero0", "precision": "bf16"},
            "--strategy zero0 is for fp32 here; in bf16 choose zero1, or ddp with bf16",
        )
    ],
    "ddp fp16": [
        (
            {"strategy": "ddp", "precision": "fp16"},
            "--strategy ddp computes in fp32 or bf16 here; no_shard keeps the same whole copies, and takes fp16",
        )
    ],
    "reduce-dtype": [
        (
            {"strategy": "ddp", "precision": "bf16", "reduce_dtype": "bf16"},
            "--reduce-dtype is for FSDP2, and --strategy is ddp; choose no_shard",
        ),
        (
            {"strategy": "zero2", "reduce_dtype": "bf16"},
            "--reduce-dtype is for FSDP2, and --strategy is zero2; set communication_data_type in --deepspeed-config",
        ),
    ],
    "reduce-dtype fp16": [
        (
            {"strategy": "full_shard", "precision": "bf16", "reduce_dtype": "fp16"},
            "--reduce-dtype fp16 needs --precision fp16, which scales the loss; small gradients would be zero",
        )
    ],
    "deepspeed-config": [
        (
            {"strategy": "ddp", "deepspeed_config": Path("/ds.json")},
            "--deepspeed-config is for strategies of DeepSpeed, and --strategy is ddp",
        )
    ],
    "accumulation": [
        (
            {"strategy": "ddp", "num_workers": 3},
            "the global batch of 64 does not divide over 3 workers; choose --batch-size a multiple of --num-workers",
        ),
        (
            {"strategy": "ddp", "gradient_accumulation": 3},
            "the global batch of 64 does not divide over 2 workers x 3 micro-batches; choose --batch-size a multiple "
            "of their product",
        ),
        (
            {"strategy": "full_shard", **PIPELINE, "num_workers": 6},
            "the global batch of 64 does not divide over 3 workers x 4 micro-batches (--num-workers / --pp 2); choose "
            "--batch-size a multiple of their product",
        ),
    ],
    "root": [
        (
            {"strategy": "ddp", "dataset": "image-folder"},
            "--dataset image-folder needs --data-root, a folder with train/CLASS and held-out/CLASS",
        )
    ],
    "until": [({"strategy": "ddp", "epochs": 2, "until": 3}, "--until 3 lies beyond --epochs 2")],
    "storage": [
        (
            {"strategy": "ddp", "storage": "folder"},
            "--storage is a URL such as s3://bucket/run, not 'folder'; a folder is --out",
        ),
        (
            {"strategy": "ddp", "storage": "s3://bucket/run", "launcher": "torchrun"},
            "--storage is Ray Train's: use --launcher ray, or convert the checkpoints to it afterwards",
        ),
        (
            {"strategy": "ddp", "storage": "s3://bucket/run", "keep_last": 1},
            "--keep-last removes checkpoints in --out alone; for --storage use ckpt-tools prune",
        ),
    ],
    "keep-best": [
        (
            {"strategy": "ddp", "keep_last": 1, "keep_best": "kappa"},
            "--keep-best kappa: give the better end, kappa:min or kappa:max",
        )
    ],
    "async-save": [
        (
            {"strategy": "zero2", "async_save": True},
            "--async-save needs --engine fsdp2: DeepSpeed saves the state of zero2 itself",
        )
    ],
    "init-from": [
        (
            {"strategy": "ddp", "init_from": "a.pt", "resume": "latest"},
            "--init-from starts a new run: use it without --resume, or with --resume auto",
        )
    ],
    "lora": [
        (
            {"strategy": "ddp", "model": "hf:folder", "dataset": "text", "lora": ("r=2",)},
            "--lora trains beside the weights of a model: give them with --init-from",
        )
    ],
    "override": [
        (
            {"strategy": "ddp", "override": ("lr",), "resume": "latest"},
            "--override lr names no setting of a run; it is one of model, model-arg, lora, epochs, dataset, "
            "dataset-arg, data-root, num-samples, epoch-steps, batch-size, optimizer, optimizer-arg, learning-rate, "
            "weight-decay, schedule, schedule-arg, warmup-fraction, precision, clip-grad-norm, seed",
        )
    ],
    "min-workers": [
        (
            {"strategy": "ddp", "min_workers": 3, "max_restarts": 1},
            "--min-workers 3 is more than --num-workers 2",
        )
    ],
}


def config(**values: Any) -> TrainConfig:
    return TrainConfig(**({"out": Path("/run")} | values))


def test_each_rule_has_a_case():
    found = {sentence for cases in BROKEN.values() for _, sentence in cases}
    rules = [node.value for node in ast.walk(ast.parse(inspect.getsource(combinations))) if isinstance(node, ast.Yield)]
    assert len(rules) > 30
    for rule in rules:
        parts = rule.values if isinstance(rule, ast.JoinedStr) else [rule]
        pattern = "".join(re.escape(str(each.value)) if isinstance(each, ast.Constant) else ".*" for each in parts)
        assert any(re.fullmatch(pattern, each) for each in found), pattern


@pytest.mark.parametrize(
    ("values", "sentence"), [case for cases in BROKEN.values() for case in cases], ids=lambda value: str(value)[:60]
)
def test_a_wrong_combination_is_one_sentence(values, sentence):
    with pytest.raises(UsageError) as caught:
        config(**values)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("strategy", "engine", "name"),
    [
        ("full_shard", None, "full_shard"),
        ("full_shard", "fsdp2", "full_shard"),
        ("full_shard", "deepspeed", "zero3"),
        ("hybrid_shard", "deepspeed", "zero3_hpz"),
        ("ddp", "deepspeed", "zero0"),
        ("zero2", "deepspeed", "zero2"),
        (None, "fsdp2", "full_shard"),
        (None, "deepspeed", "zero3"),
        (None, "zero1", "zero1"),
    ],
)
def test_strategy_and_engine_mean_one_strategy(strategy, engine, name):
    assert chosen_strategy(strategy, engine) is BY_NAME[name]  # type: ignore[index]


def test_a_twin_is_of_the_other_framework_and_shards_alike():
    assert set(BY_NAME) == set(STRATEGIES)
    for strategy in BY_NAME.values():
        if strategy.twin is not None:
            twin = BY_NAME[strategy.twin]
            assert (twin.stage, twin.in_groups) == (strategy.stage, strategy.in_groups)
            assert twin.framework != strategy.framework


@pytest.mark.parametrize("name", shipped(".toml"))
def test_each_toml_file_is_a_run(name):
    params = main.make_context("training", ["--config", name, "--out=/run"]).params
    assert config(**params).strategy in BY_NAME


def test_the_command_line_wins_over_the_file():
    params = main.make_context("training", ["--config=tensor_parallel", "--out=/run", "--num-workers=2"]).params
    assert (params["num_workers"], params["tp"]) == (2, 2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("wings = 2", "wings is not an option of a run"),
        ("num_workers = 2", "num_workers is not an option of a run"),
        ("num-workers", "is not TOML"),
        ("num-workers = 'two'", "num-workers is a number, not 'two'"),
    ],
)
def test_a_wrong_toml_file_is_refused(text, sentence, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(text)
    done = CliRunner().invoke(main, [f"--config={file}", "--out=/run", "--strategy=ddp"])
    assert done.exit_code == 2
    assert sentence in done.stderr


@pytest.mark.parametrize("name", shipped(".json"))
def test_each_json_file_is_one_that_deepspeed_takes(name):
    import deepspeed

    groups = {"shard_size": 2} if name == "zero3_hpz" else {}
    read = deepspeed.DeepSpeedConfig(deepspeed_config(config(strategy=name, **groups), 1))
    assert (read.zero_optimization_stage, read.train_batch_size) == (BY_NAME[name].stage, 64)  # type: ignore[index]
    assert (read.zero_config.offload_optimizer is not None) == name.endswith("_offload")


def adam(**params: object) -> dict[str, object]:
    return {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, **params}}}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {"train_batch_size": 32},
            " sets train_batch_size to 32 and the options of the run say 64; change one of them",
        ),
        ({"zero_optimization": {"stage": 3}}, " sets zero_optimization.stage to 3 and the options of the run say 2"),
        ({"optimizer": {"params": {"lr": 1}}}, " sets optimizer.params.lr to 1 and the options of the run say 0.001"),
        ({"zero_optimisation": {}}, ": zero_optimisation is not a key that a run takes; it takes "),
        ({"zero_optimization": {"stage": 2, "wings": 1}}, ": zero_optimization.wings: "),
        (adam() | {"aio": "auto"}, ': aio is an object, not "auto"'),
        ({"optimizer": "auto"}, ': optimizer is an object, not "auto"'),
        ({"zero_optimization": []}, ": zero_optimization is an object, not []"),
        ({"optimizer": "AdamW"}, ': optimizer is an object, not "AdamW"'),
        ({"optimizer": {"type": "AdamW", "params": []}}, ": optimizer.params is an object, not []"),
        ({}, ": optimizer.type is missing; set it to AdamW"),
        ({"optimizer": {"type": "Adamant"}}, ": optimizer.type Adamant is not an optimizer of torch or DeepSpeed"),
        (adam(betas=[0.9]), ": AdamW does not take [0.9] for optimizer.params.betas: "),
        (adam(momentum=0.9), ": AdamW does not take 0.9 for optimizer.params.momentum: "),
        ({"optimizer": {"type": "SGD"}}, ": ZeRO with SGD is untested; set zero_allow_untested_optimizer to true"),
        (adam() | {"train_batch_size": True}, ": train_batch_size is a whole number, not true"),
        (adam() | {"gradient_predivide_factor": 0}, ": gradient_predivide_factor is above 0, not 0"),
        (adam() | {"fp16": {"loss_scale": "x"}}, ": fp16.loss_scale: "),
        (adam() | {"tensorboard": {"output_path": 3}}, ": tensorboard.output_path: "),
        (
            adam() | {"flops_profiler": {"profile_step": "x"}},
            ': flops_profiler.profile_step is a whole number, not "x"',
        ),
        (adam() | {"data_types": {"grad_accum_dtype": "fp12"}}, ": 'fp12' is not a valid DtypeEnum"),
        (adam() | {"checkpoint": {"parallel_write": 3}}, ": 'int' object has no attribute 'get'"),
        ([], " is not a JSON object"),
    ],
)
def test_a_file_for_deepspeed_that_does_not_fit_is_refused(content, sentence, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError) as caught:
        check_frameworks(config(strategy="zero2", deepspeed_config=file))
    assert str(caught.value).startswith(f"--deepspeed-config {file}{sentence}")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {"optimizer": {"type": "AdamW", "params": {}}},
            ': --pp needs torch\'s AdamW: set optimizer.type to "AdamW" and optimizer.params.torch_adam to true',
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "data_types": {}},
            " sets data_types, which does not go together with --pp",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "pipeline": {}}, ": pipeline is not a key "),
    ],
)
def test_a_file_that_does_not_fit_deepspeeds_pipelines_is_refused(content, sentence, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError) as caught:
        check_frameworks(config(strategy="zero1", deepspeed_config=file, **PIPELINE))
    assert str(caught.value).startswith(f"--deepspeed-config {file}{sentence}")


def test_a_file_for_deepspeed_is_taken_with_what_the_options_decide(tmp_path):
    file = tmp_path / "ds.json"
    zero = {"stage": 2, "reduce_bucket_size": 1000}
    file.write_text(json.dumps({"train_batch_size": "auto", "zero_optimization": zero, **adam(betas=[0.9, 0.95])}))
    run = config(strategy="zero2", deepspeed_config=file)
    check_frameworks(run)
    made = deepspeed_config(run, 2)
    assert made["zero_optimization"] == zero
    assert (made["train_batch_size"], made["train_micro_batch_size_per_gpu"]) == (64, 32)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"has no config.json of a causal language model"):
        check_frameworks(config(strategy="ddp", model=f"hf:{tmp_path}", dataset="text"))


DOCUMENTED = [
    line.removeprefix("$ ckpt-tools train ") for line in ALL.splitlines() if line.startswith("$ ckpt-tools train ")
]


@pytest.mark.parametrize("words", DOCUMENTED)
def test_each_documented_command_is_a_run(words):
    params = main.make_context("training", words.split()).params
    assert config(**params).sharding.name in STRATEGIES


def test_every_strategy_and_model_is_documented():
    """Options are in ``--help`` and in the reference made of it; the pages name those to begin with."""
    assert {name for name in {*MODELS, *STRATEGIES} if f"`{name}`" not in ALL} == set()
