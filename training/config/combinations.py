"""Options that do not go together: each rule with one sentence, checked before any worker starts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from .hub import folder_of
from .model_names import MODELS, ModelFacts, facts_of
from .options import OVERRIDES, RESUME_AUTO, Options, is_url, spelt
from .references import Reference, is_function, text_of

FSDP_OPTIONS = ("cpu_offload", "reshard_after_forward", "forward_prefetch", "backward_prefetch")
PIPELINED = ("zero0", "zero1")  # DeepSpeed's strategies that its pipelines support
ROOTS = {
    "fashion-mnist": "the folder it is kept in or downloaded to",
    "image-folder": "a folder with train/CLASS and held-out/CLASS",
}

Rules = Iterator[str]
"""Sentence of each broken rule. A rule may rely on those before it."""


def broken_rule(run: Options) -> str | None:
    """The sentence of the first rule that these options break."""
    parallel = (_fsdp, _tensor, _pipeline, _experts, _divisors)
    groups = (_strategy, _model, _unused, *parallel, _compile, _precision, _batch, _data, _saving, _start)
    return next(chain.from_iterable(group(run) for group in groups), None)


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
        yield "give --strategy, or --engine to shard fully with that engine"
    if run.engine not in (None, run.sharding.framework, run.sharding.name):
        twin = run.sharding.twin if run.engine == "fsdp2" else None
        other = f"; --strategy {twin} is the same of {run.engine}" if twin else ""
        yield f"--strategy {run.sharding.name} is one of DeepSpeed's, and --engine is {run.engine}{other}"
    if run.sharding.in_groups and run.shard_size is None:
        yield f"--strategy {run.sharding.name} needs --shard-size, the workers that share one copy"


def _model(run: Options) -> Rules:
    if facts_of(run.model, {}) is None:
        yield f"--model is one of {', '.join(MODELS)}, hf:FOLDER or a function, not {run.model!r}"
    task = _facts(run).task
    if task == "own" or is_function(run.dataset):
        return
    if task == "text" and run.dataset != "text":
        yield f"--model {text_of(run.model)} learns from text: give --dataset text"
    if task == "images" and run.dataset == "text":
        yield f"--model {text_of(run.model)} learns from images, and --dataset is text"


def _fsdp(run: Options) -> Rules:
    name = run.sharding.name
    given = [f"--{spelt(option)}" for option in FSDP_OPTIONS if getattr(run, option)]
    if given and not _is_fully_sharded(run):
        ending = "; choose one that ends in _offload" if run.cpu_offload and not _is_torch(run) else ""
        yield f"{given[0]} is for strategies of FSDP2, and --strategy is {name}{ending}"
    if run.reshard_after_forward is not None and name != "full_shard":
        yield f"--reshard-after-forward is for --strategy full_shard, not {name}"
    *first, last = [f"--{option}" for option in ("tp", "pp", "ep") if getattr(run, option) > 1] or [""]
    if first:
        yield f"{', '.join(first)} and {last} do not go together here; give one of them"


def _tensor(run: Options) -> Rules:
    if run.tp > 1 and not _is_fully_sharded(run):
        yield f"--tp goes together with FSDP2, and --strategy is {run.sharding.name}"
    if run.tp > 1 and _facts(run).heads == 0:
        yield f"--tp is for --model lm; the layers of {text_of(run.model)} cannot be split"


def _pipeline(run: Options) -> Rules:
    name, model, layers = run.sharding.name, text_of(run.model), _facts(run).layers
    if run.pp > 1 and not _is_fully_sharded(run) and name not in PIPELINED:
        yield f"--pp goes together with FSDP2, {' and '.join(PIPELINED)}, and --strategy is {name}"
    if run.pp_schedule not in (None, "1f1b") and not _is_torch(run):
        yield f"--pp-schedule {run.pp_schedule} is for FSDP2, and --strategy is {name}"
    if run.pp > 1 and layers == 0:
        yield f"--pp is for --model lm; the layers of {model} cannot be cut into stages"
    if run.pp * run.chunks > max(layers, 1):
        chunks = f" x --pp-chunks {run.chunks}" if run.chunks > 1 else ""
        yield f"--pp {run.pp}{chunks} is more stages than the {layers} layers of --model {model}"
    if run.num_workers % run.pp:
        yield f"--pp {run.pp} does not divide --num-workers {run.num_workers}"
    if run.chunks > 1 and run.gradient_accumulation % run.pp:
        yield (
            f"--pp-schedule interleaved1f1b takes --pp {run.pp} micro-batches at a time: give --gradient-accumulation "
            f"{run.pp} or a multiple of it"
        )
    if run.gradient_accumulation < run.pp and run.pp_schedule != "gpipe":
        ending = ", or --pp-schedule gpipe" if _is_torch(run) else ""
        yield (
            f"--pp {run.pp} needs at least as many micro-batches, so that each stage has one to work on: give "
            f"--gradient-accumulation {run.pp} or more{ending}"
        )


def _experts(run: Options) -> Rules:
    if run.ep == 1:
        return
    name = run.sharding.name
    if not _is_fully_sharded(run):
        yield f"--ep goes together with FSDP2, and --strategy is {name}, which trains --model lm-moe without --ep"
    if _facts(run).experts == 0:
        yield f"--ep is for --model lm-moe; {text_of(run.model)} has no experts"
    if run.reshard_after_forward is not None:
        yield "--reshard-after-forward does not go together with --ep, which regroups the same workers"


def _divisors(run: Options) -> Rules:
    facts, model = _facts(run), text_of(run.model)
    all_workers, workers = f"--num-workers {run.num_workers}", f"{run.data_workers} workers"
    for option, size, what in (
        ("tp", facts.heads, f"the {facts.heads} heads of --model {model}"),
        ("tp", facts.hidden, f"the {facts.hidden} hidden units of --model {model}"),
        ("tp", run.num_workers, all_workers),
        ("ep", facts.experts, f"the {facts.experts} experts of --model {model}"),
        ("ep", run.num_workers, all_workers),
        ("ep", run.shard_size or 0, f"--shard-size {run.shard_size}, the workers that share one copy"),
        ("shard_size", run.data_workers, workers),
        ("reshard_after_forward", run.data_workers, workers),
    ):
        if size % (getattr(run, option) or 1):
            yield f"--{spelt(option)} {getattr(run, option)} does not divide {what}"


def _compile(run: Options) -> Rules:
    name = run.sharding.name
    if run.compile and not _is_torch(run) and run.sharding.stage == 3:
        yield f"--compile is for FSDP2 and ZeRO 0 to 2: --strategy {name} gathers parameters inside of each block"
    if run.compile and (run.tp > 1 or run.pp > 1 or _facts(run).experts):
        yield "--compile does not go together with --tp, --pp or --model lm-moe"


def _precision(run: Options) -> Rules:
    name = run.sharding.name
    if name == "zero0" and run.precision != "fp32":
        yield f"--strategy zero0 is for fp32 here; in {run.precision} choose zero1, or ddp with bf16"
    if name == "ddp" and run.precision == "fp16":
        yield "--strategy ddp computes in fp32 or bf16 here; no_shard keeps the same whole copies, and takes fp16"
    if run.reduce_dtype != "fp32" and not _is_fully_sharded(run):
        hint = "choose no_shard" if _is_torch(run) else "set communication_data_type in --deepspeed-config"
        yield f"--reduce-dtype is for FSDP2, and --strategy is {name}; {hint}"
    if run.reduce_dtype == "fp16" and run.precision != "fp16":
        yield "--reduce-dtype fp16 needs --precision fp16, which scales the loss; small gradients would be zero"


def _batch(run: Options) -> Rules:
    parts, split = run.gradient_accumulation, [name for name in ("tp", "pp") if getattr(run, name) > 1]
    if run.batch_size % (run.data_workers * parts):
        times = f" x {parts} micro-batches" if parts > 1 else ""
        times += "".join(f" (--num-workers / --{name} {getattr(run, name)})" for name in split)
        product = "their product" if times else "--num-workers"
        workers = f"{run.data_workers} workers{times}"
        yield (
            f"the global batch of {run.batch_size} does not divide over {workers}; choose --batch-size a multiple of "
            f"{product}"
        )


def _unused(run: Options) -> Rules:
    """Options that are for another one, which is not given."""
    for option, is_used, user in (
        ("shard_size", run.sharding.in_groups, "--strategy hybrid_shard and zero3_hpz"),
        ("pp_schedule", run.pp > 1, "--pp"),
        ("pp_chunks", run.chunks > 1, "--pp-schedule interleaved1f1b"),
        ("deepspeed_config", not _is_torch(run), f"strategies of DeepSpeed, and --strategy is {run.sharding.name}"),
        ("schedule_arg", is_function(run.schedule), f"a function, and --schedule is {run.schedule}"),
        ("epoch_steps", is_function(run.dataset), f"a dataset of your own, and --dataset is {run.dataset}"),
        ("data_root", run.dataset != "digits", "the other datasets; digits come with scikit-learn"),
        ("keep_best", run.keep_last, "--keep-last: without it every checkpoint is kept"),
        ("min_workers", run.launcher == "ray", "--launcher ray"),
        ("min_workers", run.max_restarts, "--max-restarts: without restarts a run ends with its first worker"),
        ("rename", run.init_from, "--init-from"),
        ("recipe", run.init_from, "--init-from"),
        ("inverse", run.recipe, "--recipe"),
        ("lora", folder_of(run.model), f"--model hf:FOLDER, and --model is {text_of(run.model)}"),
        ("override", run.resume, "--resume: a fresh run takes all its settings from its own options"),
    ):
        if getattr(run, option) and not is_used:
            yield f"--{spelt(option)} is for {user}"


def without_root(dataset: Reference, root: Path | None) -> Rules:
    if dataset in ROOTS and root is None:
        yield f"--dataset {dataset} needs --data-root, {ROOTS[text_of(dataset)]}"


def _data(run: Options) -> Rules:
    yield from without_root(run.dataset, run.data_root)
    if run.last_epoch > run.epochs:
        yield f"--until {run.until} lies beyond --epochs {run.epochs}"


def _saving(run: Options) -> Rules:
    if run.storage is not None and not is_url(run.storage):
        yield f"--storage is a URL such as s3://bucket/run, not {run.storage!r}; a folder is --out"
    if run.storage is not None and run.launcher != "ray":
        yield "--storage is Ray Train's: use --launcher ray, or convert the checkpoints to it afterwards"
    if run.storage is not None and run.keep_last is not None:
        yield "--keep-last removes checkpoints in --out alone; for --storage use ckpt-tools prune"
    if run.keep_best not in (None, "accuracy", "loss") and not run.keep_best.endswith((":min", ":max")):
        yield f"--keep-best {run.keep_best}: give the better end, {run.keep_best}:min or {run.keep_best}:max"
    if run.async_save and not _is_torch(run):
        yield f"--async-save needs --engine fsdp2: DeepSpeed saves the state of {run.sharding.name} itself"


def _start(run: Options) -> Rules:
    is_new = run.resume in (None, RESUME_AUTO)
    if run.init_from is not None and not is_new:
        yield f"--init-from starts a new run: use it without --resume, or with --resume {RESUME_AUTO}"
    if run.lora and run.init_from is None and is_new:
        yield "--lora trains beside the weights of a model: give them with --init-from"
    for name in sorted({*run.override} - {*OVERRIDES}):
        yield f"--override {name} names no setting of a run; it is one of {', '.join(OVERRIDES)}"
    if run.min_workers is not None and run.min_workers > run.num_workers:
        yield f"--min-workers {run.min_workers} is more than --num-workers {run.num_workers}"
