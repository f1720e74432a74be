"""The options of a run: name, type, default and help of each, said once; and the sharding strategies.

``command_line`` makes the options of ``ckpt-tools train`` from them, ``train_config`` checks their values. Imports no
framework, so a mistake on the command line is answered at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from .model_names import ModelFacts, facts_of
from .references import Reference, parse_arguments

LauncherName = Literal["ray", "torchrun"]
Precision = Literal["fp32", "bf16", "fp16"]
MatmulPrecision = Literal["highest", "high", "medium"]
DatasetName = Literal["digits", "fashion-mnist", "image-folder", "text"]
OptimizerName = Literal["adamw", "adam", "sgd"]
PipelineScheduleName = Literal["gpipe", "1f1b", "interleaved1f1b"]
ScheduleName = Literal["cosine", "linear", "constant"]
DATASETS: tuple[DatasetName, ...] = get_args(DatasetName)
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)

EngineName = Literal["fsdp2", "deepspeed", "zero1", "zero2", "zero3"]  # ``zero3`` is ``--strategy zero3``
Framework = Literal["fsdp2", "deepspeed"]
TorchStrategy = Literal["ddp", "no_shard", "shard_grad_op", "full_shard", "hybrid_shard"]
ZeroStrategy = Literal[
    "zero0", "zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload", "zero3_hpz"
]
StrategyName = Literal[TorchStrategy, ZeroStrategy]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)


@dataclass(frozen=True, slots=True)
class Strategy:
    """A sharding strategy. ``stage`` is ZeRO's, for both frameworks: each worker keeps everything (0), weights and
    gradients (1), weights (2) or nothing (3) whole. ``in_groups``: shards over groups of ``--shard-size`` workers.
    ``twin``: the equivalent strategy of the other framework, if there is one."""

    name: StrategyName
    framework: Framework
    stage: Literal[0, 1, 2, 3]
    in_groups: bool = False
    offload: bool = False
    twin: StrategyName | None = None


BY_NAME: Mapping[StrategyName, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("ddp", "fsdp2", 0, twin="zero0"),
        Strategy("no_shard", "fsdp2", 0, twin="zero0"),
        Strategy("shard_grad_op", "fsdp2", 2, twin="zero2"),
        Strategy("full_shard", "fsdp2", 3, twin="zero3"),
        Strategy("hybrid_shard", "fsdp2", 3, in_groups=True, twin="zero3_hpz"),
        Strategy("zero0", "deepspeed", 0, twin="ddp"),
        Strategy("zero1", "deepspeed", 1),
        Strategy("zero2", "deepspeed", 2, twin="shard_grad_op"),
        Strategy("zero3", "deepspeed", 3, twin="full_shard"),
        Strategy("zero1_offload", "deepspeed", 1, offload=True),
        Strategy("zero2_offload", "deepspeed", 2, offload=True),
        Strategy("zero3_offload", "deepspeed", 3, offload=True),
        Strategy("zero3_hpz", "deepspeed", 3, in_groups=True, twin="hybrid_shard"),
    )
}


def choose_strategy(strategy: StrategyName | None, engine: EngineName | None) -> Strategy:
    """The strategy that ``--strategy`` and ``--engine`` select together. An engine alone shards fully; ``deepspeed``
    with a strategy of PyTorch's selects its twin. :mod:`.combinations` refuses contradictions."""
    name = strategy or ("full_shard" if engine in (None, "fsdp2", "deepspeed") else engine)
    chosen = BY_NAME[name]  # type: ignore[index]
    return BY_NAME[chosen.twin] if engine == "deepspeed" and chosen.framework == "fsdp2" and chosen.twin else chosen


RESUME_LATEST = "latest"
RESUME_AUTO = "auto"


def option_name(name: str) -> str:
    """The spelling of a field as an option, without leading dashes."""
    return name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Option:
    """Help of an option, and what its type does not say: the placeholder of its value, and the range of a number."""

    help: str
    metavar: str | None = None
    least: int = 0
    above: int | None = None
    below: float = math.inf
    heading: str | None = None
    """Heading of the help under which this option and those after it are."""

    def is_in_range(self, value: float) -> bool:
        """Whether the number is in the range; NaN and infinity are in none."""
        return (value >= self.least if self.above is None else value > self.above) and value < self.below

    @property
    def range(self) -> str:
        start = f"at least {self.least}" if self.above is None else f"above {self.above}"
        return start if self.below == math.inf else f"{start} and below {self.below}"


class Setting(Option):
    """An option that changes what is learnt: it is saved in each checkpoint, and a resumed run must have the same."""

    __slots__ = ()


ARG = "NAME=VALUE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options with their defaults, in the order of ``--help``; :class:`.train_config.TrainConfig` checks them."""

    strategy: Annotated[
        StrategyName | None,
        Option(f"Sharding strategy: {', '.join(get_args(StrategyName))}.", "NAME", heading="The run"),
    ] = None
    engine: Annotated[EngineName | None, Option("Framework; without --strategy it shards fully.")] = None
    launcher: Annotated[LauncherName, Option("Launcher of the worker processes.")] = "ray"
    num_workers: Annotated[int, Option("World size; with CUDA, one GPU per worker.", least=1)] = 2
    out: Annotated[Path, Option("Run folder: result, metrics and checkpoints.")]
    epochs: Annotated[int, Setting("Epochs of training, and length of the learning rate schedule.", least=1)] = 12
    until: Annotated[int | None, Option("Stop after this epoch; --epochs still sets the schedule.", least=1)] = None
    max_steps: Annotated[int | None, Option("Stop after N optimizer steps, even within an epoch.", "N", least=1)] = None
    # Of NumPy; torch's has 64 bits, and the seed of an epoch is larger.
    seed: Annotated[int, Setting("Seed of the initial weights and the sample order.", below=2**32)] = 0
    max_restarts: Annotated[int, Option("Restarts of the run after failures.")] = 0
    min_workers: Annotated[
        int | None, Option("Ray: restart with at least M workers if machines are lost.  [default: all]", "M", least=1)
    ] = None

    model: Annotated[
        Reference, Setting("Model: vit, lm, ..., or a function.", "NAME|hf:FOLDER|FUNCTION", heading="Model and data")
    ] = "vit"
    model_arg: Annotated[tuple[str, ...], Setting("Argument of the model, such as layers=8; repeatable.", ARG)] = ()
    lora: Annotated[tuple[str, ...], Setting("Argument of PEFT's LoraConfig, such as r=8; repeatable.", ARG)] = ()
    dataset: Annotated[Reference, Setting(f"Dataset: {', '.join(DATASETS)}, or a function.", "NAME|FUNCTION")] = (
        "digits"
    )
    dataset_arg: Annotated[tuple[str, ...], Setting("Argument of the dataset; repeatable.", ARG)] = ()
    data_root: Annotated[Path | None, Setting("Dataset folder; fashion-mnist is downloaded here.")] = None
    num_samples: Annotated[int | None, Setting("Train on the first N samples only.", "N", least=1)] = None
    epoch_steps: Annotated[int | None, Setting("Steps of an epoch, if the data have no length.", "N", least=1)] = None
    loader_workers: Annotated[int, Option("Processes per worker that load samples.", "N")] = 0
    batch_size: Annotated[int, Setting("Global batch size: samples per step over all workers.", least=1)] = 64

    optimizer: Annotated[
        Reference, Setting(f"Optimizer: {', '.join(OPTIMIZERS)}, or a function.", "NAME|FUNCTION", heading="Optimizer")
    ] = "adamw"
    optimizer_arg: Annotated[tuple[str, ...], Setting("Argument of the optimizer; repeatable.", ARG)] = ()
    learning_rate: Annotated[float, Setting("Peak learning rate, reached after the warm-up.", above=0)] = 1e-3
    weight_decay: Annotated[float, Setting("Weight decay of the optimizer.")] = 0.05
    schedule: Annotated[
        Reference, Setting(f"Learning rate after the warm-up: {', '.join(SCHEDULES)}, or a function.", "NAME|FUNCTION")
    ] = "cosine"
    schedule_arg: Annotated[tuple[str, ...], Setting("Argument of the schedule's function; repeatable.", ARG)] = ()
    warmup_fraction: Annotated[float, Setting("Fraction of all steps used for a linear warm-up.", below=1)] = 0.1
    clip_grad_norm: Annotated[float | None, Setting("Clip gradients to this global norm.", above=0)] = None
    gradient_accumulation: Annotated[int, Option("Micro-batches per step; --batch-size stays the same.", least=1)] = 1

    precision: Annotated[
        Precision, Setting("Precision of computation; master weights are fp32.", heading="Precision and speed")
    ] = "fp32"
    reduce_dtype: Annotated[Precision, Option("FSDP2: dtype in which gradients are summed over workers.")] = "fp32"
    matmul_precision: Annotated[
        MatmulPrecision, Option("float32 products: highest (exact), high (TF32 on GPUs), medium (bf16).")
    ] = "highest"
    deterministic: Annotated[bool, Option("Deterministic algorithms alone, so a GPU repeats a run bit for bit.")] = (
        False
    )
    activation_checkpointing: Annotated[bool, Option("Recompute each block's activations in backward.")] = False
    compile: Annotated[bool, Option("torch.compile each block for training; evaluation is not compiled.")] = False

    shard_size: Annotated[
        int | None,
        Option(
            "hybrid_shard, zero3_hpz: workers per copy of the weights.", least=1, heading="Sharding and parallelism"
        ),
    ] = None
    tp: Annotated[int, Option("Tensor parallelism: workers that share each layer; with FSDP2.", least=1)] = 1
    pp: Annotated[int, Option("Pipeline parallelism: number of stages; with FSDP2, zero0 or zero1.", least=1)] = 1
    pp_schedule: Annotated[PipelineScheduleName | None, Option("Pipeline schedule.  [default: 1f1b]")] = None
    pp_chunks: Annotated[
        int | None, Option("interleaved1f1b: parts of the layers per worker.  [default: 2]", least=2)
    ] = None
    ep: Annotated[int, Option("Expert parallelism: workers that share the experts; with FSDP2.", least=1)] = 1
    cpu_offload: Annotated[bool, Option("FSDP2: keep weights, gradients and optimizer state in CPU memory.")] = False
    reshard_after_forward: Annotated[
        int | None, Option("full_shard: keep weights sharded over N workers until backward.", "N", least=1)
    ] = None
    forward_prefetch: Annotated[int, Option("FSDP2: blocks to prefetch in forward.")] = 0
    backward_prefetch: Annotated[int, Option("FSDP2: blocks to prefetch in backward.")] = 0
    deepspeed_config: Annotated[Path | None, Option("DeepSpeed JSON file instead of the built-in one.")] = None

    save_every: Annotated[
        int, Option("Epochs between checkpoints; the last epoch is always saved.", least=1, heading="Checkpoints")
    ] = 1
    save_every_steps: Annotated[int | None, Option("Optimizer steps between checkpoints.", least=1)] = None
    save_every_minutes: Annotated[float | None, Option("Minutes between checkpoints.", above=0)] = None
    async_save: Annotated[bool, Option("Copy the state to CPU memory and write it while training continues.")] = False
    keep_last: Annotated[int | None, Option("Keep the newest K checkpoints.  [default: all]", "K", least=1)] = None
    keep_best: Annotated[
        str | None, Option("With --keep-last: also keep the best by this metric.", r"METRIC[:min|:max]")
    ] = None
    storage: Annotated[
        str | None, Option("Object store for checkpoints: s3://bucket/run, ...  [default: --out]", "URL")
    ] = None
    resume: Annotated[
        str | None,
        Option(
            f"Checkpoint to resume; {RESUME_LATEST}: this run's last, {RESUME_AUTO}: its newest complete one, if any.",
            f"PATH|URL|{RESUME_LATEST}|{RESUME_AUTO}",
        ),
    ] = None
    override: Annotated[
        tuple[str, ...],
        Option(
            "With --resume: setting that may differ from the checkpoint's, such as learning-rate; repeatable.", "NAME"
        ),
    ] = ()
    export: Annotated[str | None, Option("Write the final weights as one model file or folder.", "PATH|URL")] = None

    init_from: Annotated[
        str | None, Option("Checkpoint of any format with the initial weights.", "PATH|URL", heading="First weights")
    ] = None
    rename: Annotated[tuple[str, ...], Option("With --init-from: rename tensors; repeatable.", "REGEX=REPL")] = ()
    recipe: Annotated[str | None, Option("With --init-from: map tensors by a recipe.", "NAME|FILE")] = None
    inverse: Annotated[bool, Option("With --recipe: read it from right to left.")] = False

    eval_every_steps: Annotated[
        int | None, Option("Optimizer steps between evaluations.", "N", least=1, heading="Evaluation and logs")
    ] = None
    eval_batch_size: Annotated[int, Option("Samples of each forward pass of an evaluation.", "N", least=1)] = 30
    metrics: Annotated[Reference | None, Option("Function with metrics of the evaluation.", "FUNCTION")] = None
    log_every: Annotated[int, Option("Log metrics every N steps.", "N", least=1)] = 10
    callback: Annotated[
        tuple[Reference, ...], Option("Function that gets each line of metrics; repeatable.", "FUNCTION")
    ] = ()
    peak_tflops: Annotated[
        float | None,
        Option("Peak TFLOP/s of a worker's device, for MFU.  [default: that of known GPUs in 16 bits]", above=0),
    ] = None
    tensorboard: Annotated[bool, Option("Also write TensorBoard event files to OUT/tensorboard.")] = False
    profile: Annotated[bool, Option("Write a trace of a few steps per rank to OUT/profile.")] = False

    @property
    def sharding(self) -> Strategy:
        """The strategy that ``strategy`` and ``engine`` select together."""
        return choose_strategy(self.strategy, self.engine)

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the model. Raises ``UsageError``."""
        return parse_arguments(self.model_arg, "model-arg")

    @property
    def model_facts(self) -> ModelFacts:
        facts = facts_of(self.model, self.model_arguments)
        assert facts is not None, "an unknown model is refused before"
        return facts

    @property
    def chunks(self) -> int:
        """Number of parts of the layers that each worker of a pipeline has."""
        return (self.pp_chunks or 2) if self.pp_schedule == "interleaved1f1b" else 1

    @property
    def data_workers(self) -> int:
        """Number of workers with different samples; the workers of a ``tp`` or ``pp`` group share theirs."""
        return self.num_workers // (self.tp * self.pp)

    @property
    def last_epoch(self) -> int:
        """Number of finished epochs at which this run ends."""
        return self.epochs if self.until is None else self.until


@cache
def describe_options() -> tuple[tuple[Field[Any], Any, Option], ...]:
    """Each option: its field, its type without ``None`` (of a reference, ``str``), and its :class:`Option`."""
    hints = get_type_hints(RunOptions, include_extras=True)
    described = []
    for field in fields(RunOptions):
        kind, option = get_args(hints[field.name])
        if get_origin(kind) in (Union, UnionType):
            kind = next(each for each in get_args(kind) if each is not NoneType)
        described.append((field, kind, option))
    return tuple(described)


def options_by_heading() -> dict[str, list[str]]:
    """Options by heading of the help. ``--config`` and ``--help``, which every command has, are under the first."""
    names: dict[str, list[str]] = {}
    for field, _, option in describe_options():
        if option.heading is not None:
            names[option.heading] = [] if names else ["config", "help"]
        next(reversed(names.values())).append(field.name)
    return names


SETTINGS = tuple(field.name for field, _, option in describe_options() if isinstance(option, Setting))
OVERRIDES = tuple(map(option_name, SETTINGS))


def is_url(text: str) -> bool:
    """Whether ``text`` is the URL of a store that is not local."""
    return "://" in text and not text.startswith("file://")
