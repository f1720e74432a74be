"""Options that do not go together: each rule with one sentence, checked before any worker starts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from .model_names import MODELS, ModelFacts, facts_of
from .options import Options, spelt
from .references import is_function, text_of

FSDP_OPTIONS = ("cpu_offload", "reshard_after_forward", "forward_prefetch", "backward_prefetch")

PIPELINED = ("zero0", "zero1")  # DeepSpeed's strategies that its pipelines support


def broken_rule(run: Options) -> str | None:
    """The sentence of the first rule that these options break."""
    groups = (_strategy, _model, _shard_size, _fsdp, _tensor, _pipeline, _experts, _compile, _precision, _batch)
    return next((sentence for _, sentence in chain.from_iterable(group(run) for group in groups)), None)


Rules = Iterator[tuple[str, str]]
"""Name and sentence of each broken rule. A rule may rely on those before it; the names are for the tests."""


def _facts(run: Options) -> ModelFacts:
    facts = facts_of(run.model, run.model_arguments)
    assert facts is not None, "an unknown model breaks an earlier rule"
    return facts


def _is_torch(run: Options) -> bool:
    return run.sharding.framework == "fsdp2"


def _is_fully_sharded(run: Options) -> bool:
    """Whether ``fully_shard`` shards the model; DDP does not."""
    return _is_torch(run) and run.sharding.name != "ddp"


def _strategy(run: Options) -> Rules:
    if run.strategy is None and run.engine is None:
        yield "neither", "give --strategy, or --engine to shard fully with that engine"
    if run.engine not in (None, run.sharding.framework, run.sharding.name):
        twin = run.sharding.twin if run.engine == "fsdp2" else None
        other = f"; --strategy {twin} is the same of {run.engine}" if twin else ""
        yield "engine", f"--strategy {run.sharding.name} is one of DeepSpeed's, and --engine is {run.engine}{other}"


def _model(run: Options) -> Rules:
    if facts_of(run.model, {}) is None:
        yield "model", f"--model is one of {', '.join(MODELS)}, hf:FOLDER or a function, not {run.model!r}"
    if "own" in (_facts(run).task, "own" if is_function(run.dataset) else ""):
        return
    is_text = _facts(run).task == "text"
    if is_text and run.dataset != "text":
        yield "task", f"--model {text_of(run.model)} learns from text: give --dataset text"
    if not is_text and run.dataset == "text":
        yield "task", f"--model {text_of(run.model)} learns from images, and --dataset is text"


def _shard_size(run: Options) -> Rules:
    size, strategy = run.shard_size, run.sharding
    if strategy.in_groups and size is None:
        yield (
            "shard-size missing",
            f"--strategy {strategy.name} needs --shard-size, the workers that share one copy",
        )
    if size is not None and not strategy.in_groups:
        yield "shard-size unused", "--shard-size is for --strategy hybrid_shard and zero3_hpz"
    if size is not None and run.data_workers % size:
        yield "shard-size", f"--shard-size {size} does not divide {run.data_workers} workers"


def _fsdp(run: Options) -> Rules:
    name, reshard = run.sharding.name, run.reshard_after_forward
    given = [f"--{spelt(option)}" for option in FSDP_OPTIONS if getattr(run, option)]
    if given and not _is_fully_sharded(run):
        ending = "; choose one that ends in _offload" if run.cpu_offload and not _is_torch(run) else ""
        yield "fsdp options", f"{given[0]} is for strategies of FSDP2, and --strategy is {name}{ending}"
    if reshard is not None and name != "full_shard":
        yield "reshard", f"--reshard-after-forward is for --strategy full_shard, not {name}"
    if reshard is not None and run.data_workers % reshard:
        yield "reshard", f"--reshard-after-forward {reshard} does not divide {run.data_workers} workers"
    parallel = [f"--{option}" for option in ("tp", "pp", "ep") if getattr(run, option) > 1]
    if len(parallel) > 1:
        *first, last = parallel
        yield "parallel", f"{', '.join(first)} and {last} do not go together here; give one of them"


def _tensor(run: Options) -> Rules:
    facts = _facts(run)
    if run.tp > 1 and not _is_fully_sharded(run):
        yield "tp strategy", f"--tp goes together with FSDP2, and --strategy is {run.sharding.name}"
    if run.tp > 1 and facts.heads == 0:
        yield "tp model", f"--tp is for --model lm; the layers of {text_of(run.model)} cannot be split"
    for size, what in ((facts.heads, "heads"), (facts.hidden, "hidden units")):
        if size % run.tp:
            yield "tp sizes", f"--tp {run.tp} does not divide the {size} {what} of --model {text_of(run.model)}"
    if run.num_workers % run.tp:
        yield "tp workers", f"--tp {run.tp} does not divide --num-workers {run.num_workers}"


def _pipeline(run: Options) -> Rules:
    name, layers = run.sharding.name, _facts(run).layers
    if run.pp > 1 and not _is_fully_sharded(run) and name not in PIPELINED:
        yield "pp strategy", f"--pp goes together with FSDP2, {' and '.join(PIPELINED)}, and --strategy is {name}"
    if run.pp_schedule not in (None, "1f1b") and not _is_torch(run):
        yield "pp-schedule", f"--pp-schedule {run.pp_schedule} is for FSDP2, and --strategy is {name}"
    if run.pp_schedule is not None and run.pp == 1:
        yield "pp-schedule unused", "--pp-schedule is for --pp"
    if run.pp_chunks is not None and run.chunks == 1:
        yield "pp-chunks", "--pp-chunks is for --pp-schedule interleaved1f1b"
    if run.pp > 1 and layers == 0:
        yield "pp model", f"--pp is for --model lm; the layers of {text_of(run.model)} cannot be cut into stages"
    if run.pp * run.chunks > max(layers, 1):
        chunks = f" x --pp-chunks {run.chunks}" if run.chunks > 1 else ""
        yield (
            "pp layers",
            f"--pp {run.pp}{chunks} is more stages than the {layers} layers of --model {text_of(run.model)}",
        )
    if run.num_workers % run.pp:
        yield "pp workers", f"--pp {run.pp} does not divide --num-workers {run.num_workers}"
    if run.chunks > 1 and run.gradient_accumulation % run.pp:
        yield (
            "pp rounds",
            f"--pp-schedule interleaved1f1b takes --pp {run.pp} micro-batches at a time: give --gradient-accumulation "
            f"{run.pp} or a multiple of it",
        )
    if run.gradient_accumulation < run.pp and run.pp_schedule != "gpipe":
        ending = ", or --pp-schedule gpipe" if _is_torch(run) else ""
        yield (
            "pp micro-batches",
            f"--pp {run.pp} needs at least as many micro-batches, so that each stage has one to work on: give "
            f"--gradient-accumulation {run.pp} or more{ending}",
        )


def _experts(run: Options) -> Rules:
    ep, experts, size = run.ep, _facts(run).experts, run.shard_size
    if ep > 1 and not _is_fully_sharded(run):
        yield (
            "ep strategy",
            f"--ep goes together with FSDP2, and --strategy is {run.sharding.name}, which trains --model lm-moe "
            "without --ep",
        )
    if ep > 1 and experts == 0:
        yield "ep model", f"--ep is for --model lm-moe; {text_of(run.model)} has no experts"
    if ep > 1 and experts % ep:
        yield "ep experts", f"--ep {ep} does not divide the {experts} experts of --model {text_of(run.model)}"
    if run.num_workers % ep:
        yield "ep workers", f"--ep {ep} does not divide --num-workers {run.num_workers}"
    if size is not None and size % ep:
        yield "ep shard-size", f"--ep {ep} does not divide --shard-size {size}, the workers that share one copy"
    if ep > 1 and run.reshard_after_forward is not None:
        yield "ep reshard", "--reshard-after-forward does not go together with --ep, which regroups the same workers"


def _compile(run: Options) -> Rules:
    if run.compile and not _is_torch(run) and run.sharding.stage == 3:
        yield (
            "compile stage 3",
            f"--compile is for FSDP2 and ZeRO 0 to 2: --strategy {run.sharding.name} gathers parameters inside of "
            "each block",
        )
    if run.compile and (run.tp > 1 or run.pp > 1 or _facts(run).experts):
        yield "compile parallel", "--compile does not go together with --tp, --pp or --model lm-moe"


def _precision(run: Options) -> Rules:
    name = run.sharding.name
    if name == "zero0" and run.precision != "fp32":
        yield (
            "zero0 precision",
            f"--strategy zero0 is for fp32 here; in {run.precision} choose zero1, or ddp with bf16",
        )
    if name == "ddp" and run.precision == "fp16":
        yield (
            "ddp fp16",
            "--strategy ddp computes in fp32 or bf16 here; no_shard keeps the same whole copies, and takes fp16",
        )
    if run.reduce_dtype != "fp32" and not _is_fully_sharded(run):
        hint = "choose no_shard" if _is_torch(run) else "set communication_data_type in --deepspeed-config"
        yield "reduce-dtype", f"--reduce-dtype is for FSDP2, and --strategy is {name}; {hint}"
    if run.reduce_dtype == "fp16" and run.precision != "fp16":
        yield (
            "reduce-dtype fp16",
            "--reduce-dtype fp16 needs --precision fp16, which scales the loss; small gradients would be zero",
        )
    if run.deepspeed_config is not None and _is_torch(run):
        yield "deepspeed-config", f"--deepspeed-config is for strategies of DeepSpeed, and --strategy is {name}"


def _batch(run: Options) -> Rules:
    parts = run.gradient_accumulation
    if run.batch_size % (run.data_workers * parts):
        yield (
            "accumulation",
            f"the global batch of {run.batch_size} does not divide over {run.data_workers} workers"
            + (f" x {parts} micro-batches" if parts > 1 else "")
            + (f" (--num-workers / --tp {run.tp})" if run.tp > 1 else "")
            + (f" (--num-workers / --pp {run.pp})" if run.pp > 1 else "")
            + "; choose --batch-size a multiple of "
            + ("--num-workers" if parts == run.tp == run.pp == 1 else "their product"),
        )
