"""Options that do not go together: one table, one sentence each, before any worker starts.

Each rule is a condition under which a run cannot be what its options say, and the sentence about it, in the options'
own spelling. ``training.config.train_config`` asks them in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .model_names import MODELS, ModelFacts, facts_of
from .options import Options
from .strategies import BY_NAME, is_over


@dataclass(frozen=True, slots=True)
class Rule:
    """``name`` is for the tests, of which each rule has one."""

    name: str
    is_broken: Callable[[Options], bool]
    sentence: Callable[[Options], str]


def broken_rule(config: Options) -> str | None:
    """The sentence about the first rule that these options break."""
    return next((rule.sentence(config) for rule in RULES if rule.is_broken(config)), None)


def _facts_missing(config: Options) -> bool:
    return facts_of(config.model) is None


def _facts(config: Options) -> ModelFacts:
    """Of a model that is known: an unknown one breaks an earlier rule."""
    facts = facts_of(config.model)
    assert facts is not None
    return facts


def _wrong_engine(config: Options) -> str:
    twin = BY_NAME[config.sharding.name].twin
    other = f"; --strategy {twin} is the same of {config.engine}" if config.engine == "fsdp2" and twin else ""
    return f"--strategy {config.sharding.name} is one of DeepSpeed's, and --engine is {config.engine}{other}"


def _is_torch(config: Options) -> bool:
    return config.sharding.framework == "fsdp2"


def _is_fully_sharded(config: Options) -> bool:
    """By ``fully_shard``, which DDP is not."""
    return _is_torch(config) and config.sharding.name != "ddp"


def _given(config: Options, *names: str) -> str:
    """The first of these options that the run gives."""
    return next((f"--{name.replace('_', '-')}" for name in names if getattr(config, name)), "")


def _parallel(config: Options) -> list[str]:
    """The ways to divide a model, beside sharding, that the run asks for."""
    return [f"--{name}" for name in ("tp", "pp", "ep") if getattr(config, name) > 1]


FSDP_OPTIONS = ("cpu_offload", "reshard_after_forward", "forward_prefetch", "backward_prefetch")

PIPELINED = ("zero0", "zero1")
"""DeepSpeed's strategies that go together with its pipelines."""


RULES: tuple[Rule, ...] = (
    Rule(
        "neither",
        lambda config: config.strategy is None and config.engine is None,
        lambda config: "give --strategy, or --engine to shard fully with that engine",
    ),
    Rule(
        "engine",
        lambda config: not is_over(config.sharding, config.engine),
        _wrong_engine,
    ),
    Rule(
        "model",
        _facts_missing,
        lambda config: f"--model is one of {', '.join(MODELS)} or hf:FOLDER, not {config.model!r}",
    ),
    Rule(
        "task",
        lambda config: (_facts(config).task == "text") != (config.dataset == "text"),
        lambda config: (
            f"--model {config.model} learns from text: give --dataset text"
            if _facts(config).task == "text"
            else f"--model {config.model} learns from images, and --dataset is text"
        ),
    ),
    Rule(
        "shard-size missing",
        lambda config: config.sharding.in_groups and config.shard_size is None,
        lambda config: f"--strategy {config.sharding.name} needs --shard-size, the workers that share one copy",
    ),
    Rule(
        "shard-size unused",
        lambda config: config.shard_size is not None and not config.sharding.in_groups,
        lambda config: "--shard-size is for --strategy hybrid_shard and zero3_hpz",
    ),
    Rule(
        "shard-size",
        lambda config: config.shard_size is not None and config.data_workers % config.shard_size != 0,
        lambda config: f"--shard-size {config.shard_size} does not divide {config.data_workers} workers",
    ),
    Rule(
        "fsdp options",
        lambda config: not _is_fully_sharded(config) and bool(_given(config, *FSDP_OPTIONS)),
        lambda config: (
            f"{_given(config, *FSDP_OPTIONS)} is for strategies of FSDP2, and --strategy is {config.sharding.name}"
            + ("; choose one that ends in _offload" if config.cpu_offload and not _is_torch(config) else "")
        ),
    ),
    Rule(
        "reshard",
        lambda config: (
            config.reshard_after_forward is not None
            and (config.sharding.name != "full_shard" or config.data_workers % config.reshard_after_forward != 0)
        ),
        lambda config: (
            f"--reshard-after-forward {config.reshard_after_forward} does not divide {config.data_workers} workers"
            if config.sharding.name == "full_shard"
            else f"--reshard-after-forward is for --strategy full_shard, not {config.sharding.name}"
        ),
    ),
    Rule(
        "parallel",
        lambda config: len(_parallel(config)) > 1,
        lambda config: (
            f"{', '.join(_parallel(config)[:-1])} and {_parallel(config)[-1]} do not go together here; give one of them"
        ),
    ),
    Rule(
        "tp strategy",
        lambda config: config.tp > 1 and not _is_fully_sharded(config),
        lambda config: f"--tp goes together with FSDP2, and --strategy is {config.sharding.name}",
    ),
    Rule(
        "tp model",
        lambda config: config.tp > 1 and _facts(config).heads == 0,
        lambda config: f"--tp is for --model lm; the layers of {config.model} cannot be dealt out",
    ),
    Rule(
        "tp heads",
        lambda config: config.tp > 1 and _facts(config).heads % config.tp != 0,
        lambda config: f"--tp {config.tp} does not divide the {_facts(config).heads} heads of --model {config.model}",
    ),
    Rule(
        "tp workers",
        lambda config: config.num_workers % config.tp != 0,
        lambda config: f"--tp {config.tp} does not divide --num-workers {config.num_workers}",
    ),
    Rule(
        "pp strategy",
        lambda config: config.pp > 1 and not _is_fully_sharded(config) and config.sharding.name not in PIPELINED,
        lambda config: (
            f"--pp goes together with FSDP2, {' and '.join(PIPELINED)}, and --strategy is {config.sharding.name}"
        ),
    ),
    Rule(
        "pp-schedule",
        lambda config: config.pp_schedule == "gpipe" and not _is_torch(config),
        lambda config: f"--pp-schedule gpipe is for FSDP2, and --strategy is {config.sharding.name}",
    ),
    Rule(
        "pp model",
        lambda config: config.pp > 1 and _facts(config).layers == 0,
        lambda config: f"--pp is for --model lm; the layers of {config.model} cannot be cut into stages",
    ),
    Rule(
        "pp layers",
        lambda config: config.pp > max(_facts(config).layers, 1),
        lambda config: (
            f"--pp {config.pp} is more stages than the {_facts(config).layers} layers of --model {config.model}"
        ),
    ),
    Rule(
        "pp workers",
        lambda config: config.num_workers % config.pp != 0,
        lambda config: f"--pp {config.pp} does not divide --num-workers {config.num_workers}",
    ),
    Rule(
        "pp-schedule unused",
        lambda config: config.pp_schedule is not None and config.pp == 1,
        lambda config: "--pp-schedule is for --pp",
    ),
    Rule(
        "pp micro-batches",
        lambda config: config.gradient_accumulation < config.pp and config.pp_schedule != "gpipe",
        lambda config: (
            f"--pp {config.pp} needs at least as many micro-batches, so that each stage has one to work on: give "
            f"--gradient-accumulation {config.pp} or more" + (", or --pp-schedule gpipe" if _is_torch(config) else "")
        ),
    ),
    Rule(
        "ep strategy",
        lambda config: config.ep > 1 and not _is_fully_sharded(config),
        lambda config: (
            f"--ep goes together with FSDP2, and --strategy is {config.sharding.name}, which trains --model lm-moe "
            "without --ep"
        ),
    ),
    Rule(
        "ep model",
        lambda config: config.ep > 1 and _facts(config).experts == 0,
        lambda config: f"--ep is for --model lm-moe; {config.model} has no experts that can be dealt out",
    ),
    Rule(
        "ep experts",
        lambda config: config.ep > 1 and _facts(config).experts % config.ep != 0,
        lambda config: (
            f"--ep {config.ep} does not divide the {_facts(config).experts} experts of --model {config.model}"
        ),
    ),
    Rule(
        "ep workers",
        lambda config: config.num_workers % config.ep != 0,
        lambda config: f"--ep {config.ep} does not divide --num-workers {config.num_workers}",
    ),
    Rule(
        "ep shard-size",
        lambda config: config.shard_size is not None and config.shard_size % config.ep != 0,
        lambda config: (
            f"--ep {config.ep} does not divide --shard-size {config.shard_size}, the workers that share one copy"
        ),
    ),
    Rule(
        "ep reshard",
        lambda config: config.ep > 1 and config.reshard_after_forward is not None,
        lambda config: "--reshard-after-forward does not go together with --ep, which deals out the same workers anew",
    ),
    Rule(
        "compile stage 3",
        lambda config: config.compile and not _is_torch(config) and config.sharding.stage == 3,
        lambda config: (
            f"--compile is for FSDP2 and ZeRO 0 to 2: --strategy {config.sharding.name} gathers parameters inside of "
            "each block"
        ),
    ),
    Rule(
        "compile parallel",
        lambda config: config.compile and (config.tp > 1 or config.pp > 1 or _facts(config).experts > 0),
        lambda config: "--compile does not go together with --tp, --pp or --model lm-moe",
    ),
    Rule(
        "zero0 precision",
        lambda config: config.sharding.name == "zero0" and config.precision != "fp32",
        lambda config: f"--strategy zero0 is for fp32 here; in {config.precision} choose zero1, or ddp with bf16",
    ),
    Rule(
        "ddp fp16",
        lambda config: config.sharding.name == "ddp" and config.precision == "fp16",
        lambda config: (
            "--strategy ddp computes in fp32 or bf16 here; no_shard keeps the same whole copies, and takes fp16"
        ),
    ),
    Rule(
        "deepspeed-config",
        lambda config: config.deepspeed_config is not None and _is_torch(config),
        lambda config: f"--deepspeed-config is for strategies of DeepSpeed, and --strategy is {config.sharding.name}",
    ),
    Rule(
        "accumulation",
        lambda config: config.batch_size % (config.data_workers * config.gradient_accumulation) != 0,
        lambda config: (
            f"the global batch of {config.batch_size} does not divide over {config.data_workers} workers"
            + (f" x {config.gradient_accumulation} micro-batches" if config.gradient_accumulation > 1 else "")
            + (f" (--num-workers / --tp {config.tp})" if config.tp > 1 else "")
            + (f" (--num-workers / --pp {config.pp})" if config.pp > 1 else "")
            + "; choose --batch-size a multiple of "
            + ("--num-workers" if config.gradient_accumulation == config.tp == config.pp == 1 else "their product")
        ),
    ),
)
