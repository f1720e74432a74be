"""Options that do not go together: each rule with one sentence, checked before any worker starts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from .model_names import MODELS, facts_of, folder_of
from .options import OVERRIDES, RESUME_AUTO, RunOptions, is_url, option_name
from .references import Reference, is_function, text_of

DEEPSPEED_PIPELINES = ("zero0", "zero1")
ROOTS = {
    "fashion-mnist": "the folder it is kept in or downloaded to",
    "image-folder": "a folder with train/CLASS and held-out/CLASS",
}

Rules = Iterator[str]
"""Sentence of each broken rule."""


def find_broken_rule(run: RunOptions) -> str | None:
    """The sentence of the first rule that these options break. Groups of rules rely on those before them."""
    groups = (_model_rules, _unused_options, _parallelism_rules, _framework_rules, _data_rules, _saving_rules)
    return next(chain.from_iterable(group(run) for group in groups), None)


def _uses_fully_shard(run: RunOptions) -> bool:
    """Whether ``fully_shard`` shards the model; DDP does not."""
    return run.sharding.framework == "fsdp2" and run.sharding.name != "ddp"


def _model_rules(run: RunOptions) -> Rules:
    name, engine = run.sharding.name, run.engine
    if run.strategy is None and engine is None:
        yield "give --strategy, or --engine to shard fully with that engine"
    if engine not in (None, run.sharding.framework, name):
        twin = run.sharding.twin if engine == "fsdp2" else None
        other = f"; --strategy {twin} is the same of {engine}" if twin else ""
        yield f"--strategy {name} is one of DeepSpeed's, and --engine is {engine}{other}"
    if run.sharding.in_groups and run.shard_size is None:
        yield f"--strategy {name} needs --shard-size, the workers that share one copy"
    if facts_of(run.model, {}) is None:
        yield f"--model is one of {', '.join(MODELS)}, hf:FOLDER or a function, not {run.model!r}"
    task = "own" if is_function(run.dataset) else run.model_facts.task
    if task == "text" and run.dataset != "text":
        yield f"--model {text_of(run.model)} learns from text: give --dataset text"
    if task == "images" and run.dataset == "text":
        yield f"--model {text_of(run.model)} learns from images, and --dataset is text"


def _unused_options(run: RunOptions) -> Rules:
    """Options that are for another one, which is not given."""
    is_torch, shards_fully = run.sharding.framework == "fsdp2", _uses_fully_shard(run)
    fsdp2, its_name = "strategies of FSDP2", f"and --strategy is {run.sharding.name}"
    offload = "" if is_torch else "; choose one that ends in _offload"
    reducing = "choose no_shard" if is_torch else "set communication_data_type in --deepspeed-config"
    for option, is_used, user in (
        ("cpu_offload", shards_fully, f"{fsdp2}, {its_name}{offload}"),
        ("forward_prefetch", shards_fully, f"{fsdp2}, {its_name}"),
        ("backward_prefetch", shards_fully, f"{fsdp2}, {its_name}"),
        ("reshard_after_forward", run.sharding.name == "full_shard", f"--strategy full_shard, {its_name}"),
        ("reduce_dtype", shards_fully or run.reduce_dtype == "fp32", f"{fsdp2}, {its_name}; {reducing}"),
        ("async_save", is_torch, f"--engine fsdp2: DeepSpeed saves the state of {run.sharding.name} itself"),
        ("deepspeed_config", not is_torch, f"strategies of DeepSpeed, {its_name}"),
        ("shard_size", run.sharding.in_groups, "--strategy hybrid_shard and zero3_hpz"),
        ("pp_schedule", run.pp > 1, "--pp"),
        ("pp_chunks", run.chunks > 1, "--pp-schedule interleaved1f1b"),
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
            yield f"--{option_name(option)} is for {user}"


def _parallelism_rules(run: RunOptions) -> Rules:
    """Rules of ``--tp``, ``--pp`` and ``--ep``, and of all sizes that a number of workers has to divide."""
    facts, model, shards_fully = run.model_facts, text_of(run.model), _uses_fully_shard(run)
    used = [option for option in ("tp", "pp", "ep") if getattr(run, option) > 1]
    if len(used) > 1:
        yield f"{' and '.join(f'--{option}' for option in used)} do not go together here; give one of them"
    for option, users, has_engine, owner, parts in (
        ("tp", "FSDP2", shards_fully, "lm", facts.heads),
        ("pp", "FSDP2, zero0 and zero1", shards_fully or run.sharding.name in DEEPSPEED_PIPELINES, "lm", facts.layers),
        ("ep", "FSDP2", shards_fully, "lm-moe", facts.experts),
    ):
        if option in used and not has_engine:
            yield f"--{option} goes together with {users}, and --strategy is {run.sharding.name}"
        if option in used and not parts:
            yield f"--{option} is for --model {owner}; {model} cannot be split so"
    all_workers, workers = f"--num-workers {run.num_workers}", f"{run.data_workers} workers"
    for option, size, what in (
        ("tp", facts.heads, f"the {facts.heads} heads of --model {model}"),
        ("tp", facts.hidden, f"the {facts.hidden} hidden units of --model {model}"),
        ("tp", run.num_workers, all_workers),
        ("pp", run.num_workers, all_workers),
        ("ep", facts.experts, f"the {facts.experts} experts of --model {model}"),
        ("ep", run.num_workers, all_workers),
        ("ep", run.shard_size or 0, f"--shard-size {run.shard_size}, the workers that share one copy"),
        ("shard_size", run.data_workers, workers),
        ("reshard_after_forward", run.data_workers, workers),
    ):
        if size % (getattr(run, option) or 1):
            yield f"--{option_name(option)} {getattr(run, option)} does not divide {what}"
    if run.pp * run.chunks > max(facts.layers, 1):
        chunks = f" x --pp-chunks {run.chunks}" if run.chunks > 1 else ""
        yield f"--pp {run.pp}{chunks} is more stages than the {facts.layers} layers of --model {model}"
    parts = run.gradient_accumulation
    if parts % run.pp if run.chunks > 1 else parts < run.pp and run.pp_schedule != "gpipe":
        yield f"--pp {run.pp} needs a micro-batch for each stage: give --gradient-accumulation {run.pp} or a multiple"


def _framework_rules(run: RunOptions) -> Rules:
    """Things that a framework does not do, or its engine here."""
    name, is_torch = run.sharding.name, run.sharding.framework == "fsdp2"
    for is_broken, what, instead in (
        (run.pp_schedule not in (None, "1f1b") and not is_torch, f"--pp-schedule {run.pp_schedule}", "1f1b"),
        (run.ep > 1 and run.reshard_after_forward, "--ep with --reshard-after-forward", "one of them"),
        (run.compile and not is_torch and run.sharding.stage == 3, "--compile", "FSDP2 or ZeRO 0 to 2"),
        (run.compile and (run.tp > 1 or run.pp > 1), "--compile with --tp or --pp", "one of them"),
        (run.compile and run.model_facts.experts, "--compile with --model lm-moe", "lm"),
        (name == "zero0" and run.precision != "fp32", f"--precision {run.precision}", "zero1, or ddp with bf16"),
        (name == "ddp" and run.precision == "fp16", "--precision fp16", "no_shard, which keeps the same whole copies"),
    ):
        if is_broken:
            yield f"--strategy {name} does not take {what}; choose {instead}"
    if run.reduce_dtype == "fp16" and run.precision != "fp16":
        yield "--reduce-dtype fp16 needs --precision fp16, which scales the loss; small gradients would be zero"


def find_missing_root(dataset: Reference, root: Path | None) -> str | None:
    """Why the dataset needs a folder; None if it has one, or needs none."""
    if dataset in ROOTS and root is None:
        return f"--dataset {dataset} needs --data-root, {ROOTS[text_of(dataset)]}"
    return None


def _data_rules(run: RunOptions) -> Rules:
    parts, split = run.gradient_accumulation, [name for name in ("tp", "pp") if getattr(run, name) > 1]
    if run.batch_size % (run.data_workers * parts):
        times = f" x {parts} micro-batches" if parts > 1 else ""
        times += "".join(f" (--num-workers / --{name} {getattr(run, name)})" for name in split)
        yield (
            f"the global batch of {run.batch_size} does not divide over {run.data_workers} workers{times}; choose "
            f"--batch-size a multiple of {'their product' if times else '--num-workers'}"
        )
    if (sentence := find_missing_root(run.dataset, run.data_root)) is not None:
        yield sentence
    if run.last_epoch > run.epochs:
        yield f"--until {run.until} lies beyond --epochs {run.epochs}"


def _saving_rules(run: RunOptions) -> Rules:
    if run.storage is not None and not is_url(run.storage):
        yield f"--storage is a URL such as s3://bucket/run, not {run.storage!r}; a folder is --out"
    if run.storage is not None and run.launcher != "ray":
        yield "--storage is Ray Train's: use --launcher ray, or convert the checkpoints to it afterwards"
    if run.storage is not None and run.keep_last is not None:
        yield "--keep-last removes checkpoints in --out alone; for --storage use ckpt-tools prune"
    if run.keep_best not in (None, "accuracy", "loss") and not run.keep_best.endswith((":min", ":max")):
        yield f"--keep-best {run.keep_best}: give the better end, {run.keep_best}:min or {run.keep_best}:max"
    is_new = run.resume in (None, RESUME_AUTO)
    if run.init_from is not None and not is_new:
        yield f"--init-from starts a new run: use it without --resume, or with --resume {RESUME_AUTO}"
    if run.lora and run.init_from is None and is_new:
        yield "--lora trains beside the weights of a model: give them with --init-from"
    if unknown := sorted({*run.override} - {*OVERRIDES}):
        yield f"--override {unknown[0]} names no setting of a run; it is one of {', '.join(OVERRIDES)}"
    if run.min_workers is not None and run.min_workers > run.num_workers:
        yield f"--min-workers {run.min_workers} is more than --num-workers {run.num_workers}"
