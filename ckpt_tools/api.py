"""The verbs: one function for each command, with the same names, the same meaning and the same defaults.

Keywords that several verbs share are ``TypedDict`` classes of ``core.options``. A verb builds one value of them,
``ConvertOptions`` or ``ConvertRequest``, and passes it on. ``api_function`` refuses empty paths, names and patterns,
and ``expand_keywords`` shows all keywords in ``help``.

A verb imports its implementation when it is called, because every command imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ckpt_tools.arguments import api_function, expand_keywords
from ckpt_tools.core.option_names import DEFAULT_POLL_SECONDS, format_option
from ckpt_tools.core.options import (
    AverageKeywords,
    ConsolidateKeywords,
    ConvertKeywords,
    ConvertOptions,
    ConvertRequest,
    DeltaKeywords,
    LoadableKeywords,
    MergeKeywords,
    ReadKeywords,
    ReadOptions,
    ReshardKeywords,
    RunKeywords,
    SelectKeywords,
)
from ckpt_tools.errors import UsageError
from ckpt_tools.messages.progress import ignore_progress

if TYPE_CHECKING:
    from ckpt_tools.checkpoint import Checkpoint
    from ckpt_tools.conversion.convert_run import ConvertedCheckpoint, ConvertRunReport
    from ckpt_tools.conversion.delta import DeltaReport
    from ckpt_tools.conversion.loadable import LoadableReport
    from ckpt_tools.conversion.report import ConvertReport, PlanReport
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.option_names import Quantization, State
    from ckpt_tools.core.options import DTypeLike
    from ckpt_tools.core.summary import Summary
    from ckpt_tools.formats.index import FormatInfo
    from ckpt_tools.messages.progress import ProgressCallback
    from ckpt_tools.reading.opened import OpenedCheckpoint
    from ckpt_tools.recipes.report import RecipeInfo, RecipeMap
    from ckpt_tools.runs.listing import RunListing
    from ckpt_tools.runs.pruning import PruneReport
    from ckpt_tools.slices import TensorSlice
    from ckpt_tools.stores.publishing import CleanReport
    from ckpt_tools.stores.source import Store
    from ckpt_tools.verification.health.report import HealthReport
    from ckpt_tools.verification.report import VerifyReport
    from ckpt_tools.verification.scan import ScanReport
    from ckpt_tools.verification.signing import SignReport
    from ckpt_tools.verification.verify import ChecksumReport, ExecutionOptions


@api_function
@expand_keywords(ReadKeywords, ConvertRequest)
def inspect(
    src: str | Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    stats: bool = False,
    sample: bool = False,
    memory: str | int | None = None,
    workers: int | None = None,
    on_progress: ProgressCallback | None = None,
    **options: Unpack[ReadKeywords],
) -> Summary:
    """Summarize the checkpoint at ``src`` from its headers; no tensor is read, except for ``stats``.

    Args:
        src: A path, or a URL of a store: ``s3://``, ``gs://``, ``http://``, ... A folder or one file.
        include: Globs; only tensors with matching names are in ``tensors`` and ``stats``. Default: all tensors.
        exclude: Globs; tensors with matching names are left out there.
        stats: Read the tensors, and give the statistics of each in ``Summary.stats``.
        sample: With ``stats``, read at most 16 blocks of each tensor, which are evenly apart. The statistics are then
            those of the sample.
        memory: With ``stats``, the most that the process may use: bytes, or ``"2GiB"``. Default: ``"512MiB"``, or what
            a larger index needs.
        workers: With ``stats``, the number of threads. Default: one for each processor.
        on_progress: Called with the number of bytes done and in all. Default: not called.
        from_: The format of the source. Default: detected.
        tag: Which checkpoint of a DeepSpeed folder. Default: the tag that its file ``latest`` names.
        model_key: Where the model is in a tree, such as ``"app.model"``. Default: found by its content.
        optim_key: Where the optimizer is in a tree. Default: found by its content.
        param_order: A file of parameter names, for an optimizer that knows its parameters by number and whose shapes do
            not identify them: in the optimizer's order, or all of the model's in the model's order. A name on each
            line, a JSON list, or a JSON list with one list for each parameter group.
        optimizer_file: The file of ``torch.save`` with the optimizer, if it is apart from the model.
        storage_options: How the store is reached (credentials, ``endpoint_url``), as ``docs/stores.md`` lists them.
            Only for URLs. Default: the environment's.

    Returns:
        A ``Summary``: format, step, world size, tensors, parameters, bytes.

    Raises:
        SourceNotFoundError: nothing is at ``src``.
        FormatError: it is not a checkpoint that can be read.
        StoreError: the disk or the network failed.
        MemoryBudgetError: ``memory`` is too small for this checkpoint.
        UsageError: an option does not apply to this format, or a glob matches no tensor.

    Example:
        >>> import ckpt_tools
        >>> summary = ckpt_tools.inspect("run")
        >>> summary.format, summary.world_size, summary.num_parameters
        ('dcp', 2, 36)
        >>> (bias,) = ckpt_tools.inspect("run", stats=True, include=["*.bias"]).stats
        >>> bias.name, bias.num_read, bias.max
        ('encoder.bias', 4, 3.0)
    """
    from ckpt_tools.core.applicability import COMMAND_RULES, OptionContext, check_applicability
    from ckpt_tools.core.matching import check_globs_match, is_selected
    from ckpt_tools.core.names import collect_name_shapes
    from ckpt_tools.core.summary import summarize
    from ckpt_tools.process.collector import pause_collector
    from ckpt_tools.reading.naming import detect_naming, find_wrapper_parts

    checked_arguments = {"sample": sample, "memory": memory, "workers": workers}
    check_applicability(COMMAND_RULES["inspect"], checked_arguments, OptionContext(has_stats=stats))
    request = ConvertRequest(src=src, dst=src, include=include, exclude=exclude, memory=memory, **options)
    with pause_collector():
        opened = _open_checkpoint(src, request)
        source, manifest = opened.source, opened.manifest
        name_shapes = collect_name_shapes(manifest)
        naming_match = detect_naming(source, manifest, name_shapes)
        naming = None if naming_match is None else str(naming_match)
        wrapping = find_wrapper_parts(name_shapes)
        summary = summarize(manifest, str(opened.url), source.files, naming=naming, wrapping=wrapping)
    include, exclude = request.include, request.exclude
    if include or exclude:
        check_globs_match(manifest.fqns | manifest.unreadable_names, include=include, exclude=exclude)
        rows = (row for row in summary.tensors if is_selected(row.name, include, exclude))
        summary = replace(summary, tensors=tuple(rows))
    if not stats:
        return summary
    from ckpt_tools.core.limits import check_expansion
    from ckpt_tools.transfer.workers import choose_num_workers
    from ckpt_tools.verification.statistics import StatisticsPlan, compute_statistics

    measuring = StatisticsPlan.fit_to_memory(
        request.memory_bytes,
        manifest,
        num_workers=choose_num_workers(workers, opened.url),
        is_limit=memory is not None,
        sample=sample,
    )
    tensors = {key: entry for key, entry in manifest.tensors.items() if is_selected(key.fqn, include, exclude)}
    if not sample:
        check_expansion(tensors, manifest.stored_bytes)
    return replace(
        summary, stats=compute_statistics(source.store, tensors.items(), measuring, on_progress or ignore_progress)
    )


@api_function
@expand_keywords(ReadKeywords, ConvertRequest)
def open(src: str | Path, **options: Unpack[ReadKeywords]) -> Checkpoint:
    """Open the checkpoint at ``src`` as a mapping from names to tensors, which are read when they are indexed.

    Args:
        src, from_, tag, model_key, optim_key, param_order, optimizer_file, storage_options: As for ``inspect``.

    Returns:
        A ``Checkpoint``. Indexing one of its tensors reads those elements and no others.

    Raises:
        CkptError: As ``inspect`` does.

    Example:
        >>> import ckpt_tools
        >>> checkpoint = ckpt_tools.open("run")
        >>> checkpoint["encoder.weight"].shape
        (4, 8)
        >>> checkpoint["encoder.weight"][1, :3]
        array([ 8.,  9., 10.], dtype=float32)
    """
    from ckpt_tools.checkpoint import Checkpoint

    opened = _open_checkpoint(src, ConvertOptions(**options))

    url, manifest, storage_options = opened.url, opened.manifest, opened.storage_options

    def read_config() -> Mapping[str, Any]:
        from ckpt_tools.reading.opened import OpenedCheckpoint
        from ckpt_tools.stores.urls import open_source

        # Opened again, because a closed checkpoint keeps no file open.
        return OpenedCheckpoint(url, open_source(url, storage_options), manifest, storage_options).find_config() or {}

    return Checkpoint.of(opened.source.store, manifest, read_config)


@api_function
@expand_keywords(ReadKeywords, ConvertRequest)
def cat(src: str | Path, name: str, *, slot: str | None = None, **options: Unpack[ReadKeywords]) -> TensorSlice:
    """Name a part of one tensor of the checkpoint at ``src``; only its elements are read, when they are asked for.

    Args:
        src, from_, tag, model_key, optim_key, param_order, optimizer_file, storage_options: As for ``inspect``.
        name: The name of a tensor, or a name with integers, slices and an ellipsis as numpy takes them:
            ``"encoder.weight[0:2, :]"``.
        slot: What of a parameter: ``"weight"`` is the model's own copy, ``"master"`` its fp32 master, ``"exp_avg"`` and
            others are optimizer state. Default: the master if there is one, else the weight.

    Returns:
        A ``TensorSlice``: ``numpy()`` gives the elements, and ``print`` shows them as numpy does.

    Raises:
        UsageError: the checkpoint has no such tensor, or the index is not one of its shape.
        CkptError: As ``inspect`` does.

    Example:
        >>> import ckpt_tools
        >>> print(ckpt_tools.cat("run", "encoder.weight[1, :3]"))
        [ 8.  9. 10.]
        >>> ckpt_tools.cat("run", "encoder.bias").numpy()
        array([0., 1., 2., 3.], dtype=float32)
    """
    from ckpt_tools.slices import find_tensor_slice

    opened = _open_checkpoint(src, ConvertOptions(**options))
    return find_tensor_slice(opened.source.store, opened.manifest, name, slot)


@api_function
@expand_keywords(ConvertKeywords, ConvertRequest)
def plan(src: str | Path, dst: str | Path, **options: Unpack[ConvertKeywords]) -> PlanReport:
    """Say what ``convert`` with the same arguments would do; write nothing.

    Args:
        src, dst and all others: As for ``convert``. ``resume``, ``fsync`` and ``on_progress`` change nothing about
            what is to be done.

    Returns:
        A ``PlanReport``: files and bytes to write, bytes to read, peak memory, what would be cast, dropped, renamed
        and, with ``overwrite``, removed.

    Raises:
        CkptError: As ``convert`` does before it writes.

    Example:
        >>> import ckpt_tools
        >>> report = ckpt_tools.plan("run", "bf16.safetensors", dtype="bfloat16")
        >>> report.num_tensors, report.bytes_read
        (2, 144)
        >>> [str(note.outcome.value) for note in report.notes]
        ['cast']
    """
    from ckpt_tools.conversion.convert import plan_conversion

    return plan_conversion(ConvertRequest(src=src, dst=dst, **options))


@api_function
@expand_keywords(ConvertKeywords, ConvertRequest)
def convert(src: str | Path, dst: str | Path, **options: Unpack[ConvertKeywords]) -> ConvertReport:
    """Write the checkpoint at ``src`` to ``dst`` in another format, or for another number of ranks.

    Whatever happens, ``dst`` is absent, as it was before, or complete.

    Args:
        src: The source: a path, or a URL of a store.
        dst: The destination: a path, or a URL of a store that can be written to. A name with one of these endings
            is one file, any other a folder: {endings}.
        to: The format to write. Default: the one that the ending of ``dst`` implies. Formats, beside plug-ins:
            {formats}.

    What to read:
        from_: The format of the source. Default: detected.
        tag: Which checkpoint of a DeepSpeed folder is read, or the name of the one that is written.
        model_key: Where the model is in the tree that is read, or written to dcp: ``"app.model"``.
        optim_key: Where the optimizer is in the tree that is read, or written to dcp.
        param_order, optimizer_file: As for ``inspect``.
        storage_options: How stores are reached, the same for ``src`` and ``dst``.

    Names and selection:
        include: Globs; only tensors with matching names are written. Default: all tensors.
        exclude: Globs; tensors with matching names are left out.
        drop: Globs; tensors of ``src`` with matching names, as ``inspect`` shows them, are left out with their
            optimizer state, before all other options. ``exclude`` names the tensors that a recipe makes.
        rename: Rules ``"REGEX=REPLACEMENT"``, applied to names in this order.
        key_map: A file with a JSON object of old names to new names, applied before ``rename``.
        weights: Which copy of a weight is written if only one is: the fp32 ``"master"``, or the ``"model"``'s own.
            Default: ``"master"``, if there is one.
        strip: A prefix that is taken off names, before all other options that name tensors; or ``"auto"`` for those of
            wrappers (``module.``, ``_orig_mod.``, ``_fsdp_wrapped_module.``), and for a ``model.`` that all names share
            if the names are then those of a known model.
        recipe: A recipe that maps the tensors to another model layout: the name of a built-in one, or a TOML file.
            The options above that name tensors name those that it makes. Its sizes are in ``config.json``.
        inverse: Read the recipe from right to left.
        state: ``"model"`` for weights alone, ``"all"`` for the whole training state. Default: all if the target
            format is made for it.

    Output:
        dequantize: Make floating-point weights of quantized ones, as ``quantization_config`` in ``config.json`` says,
            in the dtype that it names for the model, or ``dtype``. It comes before all options that name tensors.
        dtype: Cast the weights, and nothing else: ``"float32"``, ``"bfloat16"``, ``"float16"``, or the same as a
            dtype of torch, numpy or ml_dtypes. Default: no cast.
        quantize: Quantize the layers of a language model: ``"fp8-block"`` in blocks of 128 x 128, as DeepSeek's models
            are; ``"fp8"`` or ``"int8"`` by row, as compressed-tensors does. The output is a folder of safetensors, and
            its ``config.json`` says so; ``dtype`` is for the other weights. Default: none.
        keep: Globs; weights with matching names are not quantized.
        buffers: Globs; tensors with matching names are buffers. They are not cast, and zero3 keeps them whole. Default:
            found by what the source says of its tensors.
        world_size: The number of ranks to write for, in formats with files for each rank. Default: the source's.
        max_shard_size: Cut the weights into files of at most this size: bytes, or ``"5GB"``, ``"512MiB"``. Default:
            one file.
        untie: Write embeddings and head as two tensors, and ``tie_word_embeddings`` in ``config.json`` as false.
        config: A folder with ``config.json`` and what belongs to it (``generation_config.json``, a tokenizer, a
            preprocessor), which is copied to a folder that ``from_pretrained`` opens. A recipe takes its sizes from it.
            Default: the files beside ``src``, if there are any.
        like: A model that the output is to be like, a path or URL (``hf://ORG/NAME`` too): a folder of weights, or one
            with only a ``config.json``. Names, shapes, ties, the dtype of each weight, the vocabulary's size, the
            files of safetensors, and all that ``config`` copies are taken from it, and a built-in recipe if one leads
            to its names. What is missing or left over is an error. ``to`` is then ``"safetensors"`` by default.
        fill: A checkpoint of any format, a path or URL. Weights that the output lacks are taken from it, under the
            names of the output: all of them, or with ``like`` those that it names. Its optimizer state is not read,
            so that ``src`` with optimizer state needs ``state="model"``.

    Running:
        memory: The most that the process may use: bytes, or ``"2GiB"``. Default: ``"512MiB"``, or what a larger
            index needs.
        workers: The number of threads, or of processes with ``runner="ray"``. Default: one for each processor.
        runner: ``"threads"`` of this process, or processes of a ``"ray"`` cluster. Default: ``"threads"``.
        address: The Ray cluster. Default: a cluster of this machine alone, which ends with the call.
        io: ``"direct"`` past the system's page cache, on local disks whose file system can; ``"buffered"`` through it.
            Default: ``"auto"``, which is direct with ``fsync``, and where the bytes moved are more than half of the
            free memory.
        part: ``"3/64"`` writes a 64th of the output, beside 63 other processes with the same arguments, on a disk that
            they share or on S3. The last one to end publishes the output. ``"auto"`` takes the number from torchrun or
            SLURM.
        on_progress: Called with the number of bytes done and in all. Default: not called.

    Safety:
        overwrite: Replace the one checkpoint that is at ``dst`` itself. If anything else is there, nothing is
            replaced.
        resume: Continue what a killed or failed run of the same conversion wrote; if this one fails, keep what it
            wrote.
        strict: Raise ``LossError`` if anything would be dropped that was not asked to be.
        fsync: Return when the output would survive a power failure.
        checksum: Write the digests of the output with it, for ``verify``.

    Returns:
        A ``ConvertReport``: bytes, seconds, and the plan, whose ``notes`` say what was cast or dropped.

    Raises:
        UsageError: arguments do not fit each other or this checkpoint.
        SourceNotFoundError: nothing is at ``src``.
        FormatError: ``src`` cannot be read, or the target format cannot hold it.
        DestinationExistsError: something is at ``dst`` that may not be replaced.
        LossError: with ``strict``, something would be dropped.
        MemoryBudgetError: ``memory`` is too small for this checkpoint.
        StoreError: the disk or the network failed.
        UnsafeError: reading on would run code or leave the checkpoint's folder.

    Example:
        >>> import ckpt_tools
        >>> report = ckpt_tools.convert("run", "half.safetensors", dtype="bfloat16", include=["*.weight"])
        >>> report.plan.num_tensors
        1
        >>> str(ckpt_tools.open("half.safetensors")["encoder.weight"].dtype)
        'bfloat16'
    """
    from ckpt_tools.conversion.convert import run_conversion

    return run_conversion(ConvertRequest(src=src, dst=dst, **options))


@api_function
@expand_keywords(RunKeywords, ConvertRequest)
def convert_run(
    run: str | Path,
    dst: str | Path,
    *,
    steps: Sequence[int] = (),
    every: int | None = None,
    last: int | None = None,
    follow: bool = False,
    until: int | None = None,
    poll: float | None = None,
    on_checkpoint: Callable[[ConvertedCheckpoint], None] | None = None,
    **options: Unpack[RunKeywords],
) -> ConvertRunReport:
    """Convert every complete checkpoint of a run, in the order of their steps, each once.

    What is at its destination already is not written again, so that the same call continues after a kill. It is
    compared first: the files with their sizes, and a sample of their elements. The first error ends the call. Only
    checkpoints whose names say a step or an epoch are converted, and the run is only read.

    Args:
        run: A folder that holds the checkpoints of one run: a path, or a URL of a store.
        dst: The destination of each, in which ``{step}`` stands for the step, or ``{name}`` for the name of the
            checkpoint: ``"out/{step}"``.
        steps: Convert these steps alone. Default: all.
        every: Convert only steps that are multiples of it.
        last: Convert only the newest ones of those, so many.
        follow: Convert new checkpoints of a running training too, until the call is interrupted, all ``steps`` are
            converted, or ``until`` is reached.
        until: With ``follow``: end once a checkpoint of this step or a later one is complete and converted.
        poll: With ``follow``: look every so many seconds, 10 by default. A new checkpoint is taken once it is complete
            and its files are the same at two looks.
        on_checkpoint: Called with each ``ConvertedCheckpoint`` when it is done.
        All others: As for ``convert``.

    Returns:
        A ``ConvertRunReport``; its ``checkpoints`` say what became of each.

    Raises:
        SourceNotFoundError: nothing is at ``run``, or no complete checkpoint of such a step.
        DestinationExistsError: a destination holds something else.
        UsageError: ``run`` is one checkpoint, ``dst`` is one place for all, or a checkpoint says no step.
        CkptError: As ``convert`` does, for the first checkpoint that fails; those before it are written.

    Example:
        >>> import ckpt_tools
        >>> for step in (1, 2, 3):
        ...     _ = ckpt_tools.convert("model.safetensors", f"training/step_{step}", to="safetensors")
        >>> report = ckpt_tools.convert_run("training", "exported/{step}.pt", every=2)
        >>> [(each.name, each.destination, each.outcome.value) for each in report.checkpoints]
        [('step_2', 'exported/2.pt', 'written')]
        >>> ckpt_tools.convert_run("training", "exported/{step}.pt").num_published
        1
    """
    from ckpt_tools.conversion.convert_run import Following, convert_whole_run
    from ckpt_tools.runs.steps import StepSelection

    for name, value in (("until", until), ("poll", poll)):
        if value is not None and not follow:
            raise UsageError.of(name, f"{format_option(name, value)} is for {format_option('follow', True)}")
    following = Following(DEFAULT_POLL_SECONDS if poll is None else poll, until) if follow else None
    request = ConvertRequest(src=run, dst=dst, **options)
    selection = StepSelection(tuple(steps), every, last)
    return convert_whole_run(request, selection, following, on_checkpoint or (lambda _: None))


@api_function
@expand_keywords(ConsolidateKeywords, ConvertRequest)
def consolidate(src: str | Path, dst: str | Path, **options: Unpack[ConsolidateKeywords]) -> ConvertReport:
    """Write the model's weights alone, as one model.

    Args:
        src, dst: As for ``convert``.
        to: The format to write. Default: the one that the ending of ``dst`` implies, else ``"safetensors"``.
        All others: As for ``convert``; ``state`` is ``"model"``.

    Returns:
        A ``ConvertReport``.

    Raises:
        CkptError: As ``convert`` does.

    Example:
        >>> import ckpt_tools
        >>> report = ckpt_tools.consolidate("run", "weights")
        >>> list(report.plan.files)
        ['model.safetensors']
    """
    from ckpt_tools.conversion.convert import run_conversion
    from ckpt_tools.stores.urls import find_format_by_suffix, open_output_location

    request = ConvertRequest(src=src, dst=dst, state="model", **options)
    to = request.to or find_format_by_suffix(open_output_location(dst, request.storage_options).name) or "safetensors"
    return run_conversion(replace(request, to=to))


@api_function
@expand_keywords(ReshardKeywords, ConvertRequest)
def reshard(
    src: str | Path,
    dst: str | Path,
    *,
    world_size: int,
    state: State | None = None,
    **options: Unpack[ReshardKeywords],
) -> ConvertReport:
    """Write the same checkpoint in the same format for another number of ranks.

    Args:
        src, dst: As for ``convert``.
        world_size: The number of ranks to write for, at least 1.
        All others: As for ``convert``; ``to`` is the format of the source.

    Returns:
        A ``ConvertReport``.

    Raises:
        UsageError: the format of the source is not written for a number of ranks.
        CkptError: As ``convert`` does.

    Example:
        >>> import ckpt_tools
        >>> report = ckpt_tools.reshard("run", "run-4", world_size=4)
        >>> ckpt_tools.inspect("run-4").world_size
        4
    """
    from ckpt_tools.conversion.convert import run_conversion

    request = ConvertRequest(src=src, dst=dst, keeps_format=True, world_size=world_size, state=state, **options)
    return run_conversion(request)


@api_function
@expand_keywords(MergeKeywords, ConvertRequest)
def merge_lora(
    base: str | Path, adapter: str | Path, dst: str | Path, **options: Unpack[MergeKeywords]
) -> ConvertReport:
    """Write the model at ``base`` with a LoRA adapter of PEFT merged into it, as ``merge_and_unload`` computes it.

    Each weight becomes ``W + scale * B A``, computed in fp32 and cast once to the dtype of the base model. Only
    weights are written.

    Args:
        base: The base model: a checkpoint of any format.
        adapter: A folder of PEFT, or a training state of any format that has an adapter in it.
        dst: As for ``convert``.
        to: As for ``convert``. Default: the format that the ending of ``dst`` implies, else ``"safetensors"`` if that
            is the base model's.
        adapter_name: The name of the adapter, if the training state has several.
        allow_missing: Merge an adapter that lacks parts which ``adapter_config.json`` names.
        config: A folder with the base model's ``config.json``, with ``adapter_config.json``, or with both. Default: the
            files beside ``base`` and ``adapter``.
        from_, tag, model_key, optim_key, param_order, optimizer_file, weights: As for ``convert``, of ``base``.
        All others: As for ``convert``. ``strip`` and ``recipe`` come before the merge, the other options that name
            tensors after it.

    Returns:
        A ``ConvertReport``.

    Raises:
        UsageError: the adapter is for another model, or there is not exactly one.
        IncompleteError: the adapter lacks what ``adapter_config.json`` names.
        UnsupportedError: the adapter is not of LoRA, or more than ``W + scale * B A``; the base model is quantized.
        CkptError: As ``convert`` does.

    Example:
        >>> import ckpt_tools
        >>> report = ckpt_tools.merge_lora("model.safetensors", "adapter", "merged.safetensors")
        >>> [note.what for note in report.notes if note.outcome.value == "merged"]
        ['1 tensor']
    """
    from ckpt_tools.conversion.convert import run_conversion

    return run_conversion(ConvertRequest(src=base, dst=dst, adapter=adapter, state="model", **options))


@api_function
@expand_keywords(AverageKeywords, ConvertRequest)
def average(
    sources: str | Path | Sequence[str | Path],
    dst: str | Path,
    *,
    last: int | None = None,
    every: int | None = None,
    coefficients: Sequence[float] = (),
    decay: float | None = None,
    **options: Unpack[AverageKeywords],
) -> ConvertReport:
    """Write the average of the weights of several checkpoints, which may be of different formats and world sizes.

    Sources are added one by one, in fp32, or in fp64 if one is, and the sum is cast once to the dtype of the last
    source, or to ``dtype``. The result depends on their order alone. Each has to hold tensors of the same names and
    shapes. Integers, bools, complex numbers and buffers are those of the last source, and so are ties, ``config.json``
    and tokenizer.
    Only weights are written.

    Args:
        sources: The checkpoints, the oldest first: paths, or URLs of stores. Or one run, with ``last`` or ``every``.
        dst: As for ``convert``.
        last: Average so many of the run's complete checkpoints: those of the largest steps.
        every: Average the run's complete checkpoints whose steps are multiples of this.
        coefficients: A positive number for each source; the average is ``sum(c * s) / sum(c)``. Default: equal ones.
        decay: Between 0 and 1. The exponential moving average: ``a`` is the first source, and with each further one
            ``s`` becomes ``decay * a + (1 - decay) * s``.
        to: As for ``convert``. Default: the format that the ending of ``dst`` implies, else ``"safetensors"`` if that
            is the last source's.
        weights: The copy of a weight that is averaged, as for ``convert``. Default: ``"master"``, if there is one.
        from_, tag, model_key, optim_key: As for ``convert``, of every source.
        buffers: Globs; tensors with matching names are buffers: those of the last source are written.
        All others: As for ``convert``. ``include`` and ``exclude`` also choose which tensors are compared; without
            ``recipe`` and ``strip``, which come after the average.

    Returns:
        A ``ConvertReport``.

    Raises:
        UsageError: the sources do not hold the same tensors, or the run has fewer checkpoints.
        UnsupportedError: the weights are quantized.
        CkptError: As ``convert`` does.

    Example:
        >>> import ckpt_tools
        >>> report = ckpt_tools.average(["run", "model.safetensors"], "averaged.safetensors")
        >>> [note.what for note in report.notes if note.outcome.value == "averaged"]
        ['2 tensors']
    """
    from ckpt_tools.conversion.average import make_average_request
    from ckpt_tools.conversion.convert import run_conversion

    request = make_average_request(
        sources, dst, last=last, every=every, coefficients=coefficients, decay=decay, **options
    )
    return run_conversion(request)


@api_function
@expand_keywords(DeltaKeywords, ConvertRequest)
def delta(old: str | Path, new: str | Path, out: str | Path, **options: Unpack[DeltaKeywords]) -> DeltaReport:
    """Write what turns the weights of ``old`` into those of ``new``, as slime publishes it and SGLang applies it.

    Each tensor that changed is ``old ^ new``, compressed with zstd, with the XXH3-128 of the new one. The files are
    made in a temporary file first, which takes as much of ``TMPDIR`` as they do. Such a folder is a source of every
    function, if the versions before it are beside it.

    Args:
        old: The version before, as the engine has it: a checkpoint of any format.
        new: The new version: a checkpoint of any format with the same tensors. Its weights are cast to the dtypes in
            ``old``; of those with fp32 masters, the masters are.
        out: The folder of the new version, ``weight_v000001`` or that of a later number N; the delta is against version
            N - 1. A path, or a URL of a store.
        workers: The number of threads. Default: one for each processor, and more for stores.
        fsync: Return when the output would survive a power failure.
        on_progress: Called with the number of bytes done and in all. Default: not called.
        storage_options: How stores are reached, the same for all URLs.

    Returns:
        A ``DeltaReport``: how many elements changed, and how large the delta is.

    Raises:
        UsageError: the two do not hold the same tensors, or ``out`` has no name of a version.
        DestinationExistsError: something is at ``out``.
        CkptError: As ``convert`` does.

    Example:
        >>> import ckpt_tools
        >>> report = ckpt_tools.delta("model.safetensors", "other.safetensors", "published/weight_v000001")
        >>> report.num_changed_tensors, report.version
        (1, 1)
    """
    from ckpt_tools.conversion.delta import write_delta

    return write_delta(
        old,
        new,
        out,
        workers=options.get("workers"),
        fsync=options.get("fsync", False),
        storage_options=options.get("storage_options"),
        on_progress=options.get("on_progress") or ignore_progress,
    )


@api_function
@expand_keywords(LoadableKeywords, ConvertRequest)
def make_loadable(src: str | Path, dst: str | Path, **options: Unpack[LoadableKeywords]) -> LoadableReport:
    """Write the file of ``torch.save`` at ``src`` again, so that ``torch.load(weights_only=True)`` takes it.

    The tree of dicts and lists stays as it is, and tensors that share their storage share it again. Objects of classes
    that ``weights_only`` does not allow are left out, or become plain values: a numpy number becomes a number, an
    ``argparse.Namespace`` a dict. Nothing of ``src`` is executed.

    Args:
        src: One file of ``torch.save``: a path, or a URL of a store.
        dst: The file to write, whose name ends in ``.pt``, ``.pth`` or ``.bin``.
        overwrite: Replace the file at ``dst``.
        strict: Raise ``LossError`` if anything would be left out.
        fsync: Return when the output would survive a power failure.
        on_progress: Called with the number of bytes done and in all. Default: not called.
        storage_options: How stores are reached, the same for ``src`` and ``dst``.

    Returns:
        A ``LoadableReport``; ``left_out`` and ``replaced`` list, by place and class, what differs from ``src``.

    Raises:
        UnsupportedError: a model was pickled whole, or no tensor would be left.
        CkptError: As ``convert`` does.

    Example:
        >>> import ckpt_tools
        >>> ckpt_tools.make_loadable("foreign.pt", "plain.pt").left_out
        (LeftOut(place='trainer', kind='my_code.Trainer', num_tensors=0),)
    """
    from ckpt_tools.conversion.loadable import rewrite_as_loadable

    return rewrite_as_loadable(ConvertRequest(src=src, dst=dst, **options))


@api_function
@expand_keywords(SelectKeywords, ConvertRequest)
def verify(
    src: str | Path,
    dst: str | Path | None = None,
    *,
    state: State | None = None,
    dtype: DTypeLike | None = None,
    buffers: Sequence[str] = (),
    like: str | Path | None = None,
    drop: Sequence[str] = (),
    fill: str | Path | None = None,
    untie: bool = False,
    quantize: Quantization | None = None,
    keep: Sequence[str] = (),
    digests: str | Path | None = None,
    public_key: str | Path | None = None,
    signature: str | Path | None = None,
    workers: int | None = None,
    on_progress: ProgressCallback | None = None,
    **options: Unpack[SelectKeywords],
) -> VerifyReport:
    """Check bit for bit that ``dst`` holds the tensors of ``src``; without ``dst``, that ``src`` is whole.

    Without ``dst`` every byte of ``src`` is read and compared with the checksums stored in it, and every tensor with
    its digest, if there is a list of digests.

    Args:
        src: The checkpoint that was converted, or the one that is checked alone.
        dst: What ``src`` was converted to.
        from_: The format of ``src``. Default: detected.
        state, dtype, weights, include, exclude, rename, key_map, strip, recipe, inverse, dequantize, config, like,
            drop, fill, untie, quantize, keep, model_key, optim_key, param_order, optimizer_file, buffers, tag: As for
            ``convert``.
        digests: Without ``dst``: a list of digests to compare with, of the checkpoint that was converted to ``src``; or
            a list of its files as ``sha256sum``, ``b2sum``, ``md5sum`` or Megatron-Core (``integrity.json``) write it.
            Default: the lists that lie with ``src``, and the hub's hashes of what ``hf download`` stored there.
        public_key: Without ``dst``: a PEM file. The signature of ``digests``, else of ``src``, is checked first.
        signature: Where the signature is. Default: with what it signs.
        workers: The number of threads. Default: one for each processor, and at least 16 for stores.
        on_progress: Called with the number of bytes done and in all. Default: not called.
        storage_options: How stores are reached, the same for all URLs.

    Returns:
        A ``VerifyReport``; ``report.equal`` says whether everything agrees. Differences are not raised.

    Raises:
        DifferenceError: the signature does not fit.
        CkptError: something cannot be read; an argument does not apply.

    Example:
        >>> import ckpt_tools
        >>> report = ckpt_tools.verify("model.safetensors", "run")
        >>> report.equal, report.num_tensors
        (True, 2)
    """
    from ckpt_tools.core.applicability import COMMAND_RULES, OptionContext, check_applicability
    from ckpt_tools.runs.opening import open_checkpoint, resolve_checkpoint_url
    from ckpt_tools.verification.verify import verify_checkpoint, verify_conversion

    convert_options = ConvertOptions(
        state=state,
        dtype=dtype,
        buffers=buffers,
        like=like,
        drop=drop,
        fill=fill,
        untie=untie,
        quantize=quantize,
        keep=keep,
        **options,
    )
    given_options = {
        **convert_options.values_by_name,
        "digests": digests,
        "public_key": public_key,
        "signature": signature,
    }
    case = OptionContext(
        has_destination=dst is not None, has_digests=digests is not None, has_public_key=public_key is not None
    )
    check_applicability(COMMAND_RULES["verify"], given_options, case)
    src = resolve_checkpoint_url(src, convert_options.storage_options)
    checked_signature = None
    if public_key is not None:
        from ckpt_tools.verification.signing import check_signature

        checked_signature = check_signature(digests or src, public_key=public_key, signature=signature)
    file_list = None
    if digests is not None:
        from ckpt_tools.verification.file_checks import read_named_list

        file_list = read_named_list(digests, src, convert_options.storage_options)
        check_applicability(COMMAND_RULES["verify"], given_options, replace(case, has_digests=file_list is None))
    execution_options = _execution_options(convert_options, workers, on_progress, src, dst)
    if dst is None:
        report = verify_checkpoint(
            src, convert_options, execution_options, against=digests if file_list is None else None, files=file_list
        )
        return replace(report, signature=checked_signature)
    opened = open_checkpoint(
        src,
        convert_options.read_options,
        format_name=convert_options.from_,
        storage_options=convert_options.storage_options,
        config_folder=convert_options.config,
    )
    return verify_conversion(opened, dst, convert_options, execution_options)


@api_function
@expand_keywords(SelectKeywords, ConvertRequest)
def diff(
    a: str | Path,
    b: str | Path,
    *,
    state: State | None = None,
    workers: int | None = None,
    on_progress: ProgressCallback | None = None,
    **options: Unpack[SelectKeywords],
) -> VerifyReport:
    """Compare the tensors of two checkpoints of any formats: which differ, and by how much.

    Args:
        a, b: The checkpoints: paths, or URLs of stores.
        from_, tag, model_key, optim_key, param_order, optimizer_file: How ``a`` is read, as for ``inspect``.
        state: ``"model"`` compares weights alone. Default: everything, optimizer state too.
        weights: Which copy of a weight is compared if one checkpoint alone keeps fp32 masters: ``"master"`` or
            ``"model"``. Default: ``"master"``.
        rename, key_map: Turn names of ``a`` into names of ``b``, as for ``convert``.
        strip, recipe, inverse, dequantize, config: A prefix and a recipe that turn tensors of ``a`` into those of
            ``b``, and whether those of ``a`` are dequantized, as for ``convert``.
        include, exclude: Globs that choose among the names of ``b``.
        workers: The number of threads. Default: one for each processor, and at least 16 for stores.
        on_progress: Called with the number of bytes done and in all. Default: not called.
        storage_options: How stores are reached, the same for ``a`` and ``b``.

    Returns:
        A ``VerifyReport``; ``report.differences`` lists what differs.

    Raises:
        CkptError: a checkpoint cannot be read; an argument does not apply.

    Example:
        >>> import ckpt_tools
        >>> report = ckpt_tools.diff("model.safetensors", "other.safetensors")
        >>> report.num_differing
        1
        >>> report.differences[0].key.fqn, report.differences[0].aspect.value
        ('encoder.bias', 'values')
    """
    from ckpt_tools.runs.opening import open_checkpoint
    from ckpt_tools.verification.verify import diff_checkpoints

    convert_options = ConvertOptions(state=state, **options)
    storage_options = convert_options.storage_options
    opened_a = open_checkpoint(
        a,
        convert_options.read_options,
        format_name=convert_options.from_,
        storage_options=storage_options,
        config_folder=convert_options.config,
    )
    opened_b = open_checkpoint(b, ReadOptions(), storage_options=storage_options)
    execution_options = _execution_options(convert_options, workers, on_progress, a, b)
    return diff_checkpoints(opened_a, opened_b, convert_options, execution_options)


@api_function
@expand_keywords(ReadKeywords, ConvertRequest)
def check(
    src: str | Path,
    *,
    against: str | Path | None = None,
    ignore: Sequence[str] = (),
    exclude: Sequence[str] = (),
    sample: bool = False,
    memory: str | int | None = None,
    workers: int | None = None,
    on_progress: ProgressCallback | None = None,
    **options: Unpack[ReadKeywords],
) -> HealthReport:
    """Say whether the checkpoint at ``src`` is one of a training that works: finite, trained, and whole.

    Args:
        src, from_, tag, model_key, optim_key, param_order, optimizer_file, storage_options: As for ``inspect``.
        against: The previous checkpoint of the run: weights that jumped, that did not change, or that are lost are
            found beside it. Default: none.
        ignore: Names of rules that make no finding, as ``docs/tasks/check.md`` lists them.
        exclude: Globs; tensors with matching names are not looked at.
        sample: Read at most 16 blocks of each tensor, which are evenly apart.
        memory: The most that the process may use: bytes, or ``"2GiB"``. Default: ``"512MiB"``, or what a larger index
            needs.
        workers: The number of threads. Default: one for each processor.
        on_progress: Called with the number of bytes done and in all. Default: not called.

    Returns:
        A ``HealthReport``. ``report.healthy``: no rule found anything. ``report.findings`` are ``HealthFinding``
        objects, and ``report.notes`` say what no rule could be applied to.

    Raises:
        UsageError: a rule is not known, a glob matches nothing, or no weight of ``src`` is in ``against``.
        CkptError: As ``inspect`` does.

    Example:
        >>> import ckpt_tools
        >>> ckpt_tools.check("run").healthy
        True
        >>> ckpt_tools.check("run", against="model.safetensors").findings[0].what
        'none of 2 weights has changed'
    """
    from ckpt_tools.runs.opening import open_checkpoint
    from ckpt_tools.transfer.workers import choose_num_workers
    from ckpt_tools.verification.health.check import CheckOptions, check_health

    request = ConvertRequest(src=src, dst=src, exclude=exclude, memory=memory, **options)
    check_options = CheckOptions(
        ignore,
        request.exclude,
        sample,
        request.memory_bytes,
        memory is not None,
        choose_num_workers(workers, src),
        on_progress or ignore_progress,
    )
    opened = _open_checkpoint(src, request, may_be_empty=False)
    previous = None
    if against is not None:
        storage_options = request.storage_options
        previous = open_checkpoint(against, ReadOptions(), storage_options=storage_options, step_by_name=True)
    return check_health(opened, previous, check_options)


@api_function
@expand_keywords(ReadKeywords, ConvertRequest)
def checksum(
    src: str | Path,
    *,
    output: str | Path | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    on_progress: ProgressCallback | None = None,
    **options: Unpack[ReadKeywords],
) -> ChecksumReport:
    """Write the digest of every tensor of ``src`` to a list, for ``verify``.

    Args:
        src, from_, tag, model_key, optim_key, param_order, optimizer_file, storage_options: As for ``inspect``.
        output: The file to write; ``"-"`` writes no file. Default: in the folder of ``src``, or beside its file,
            where ``verify`` looks for it.
        workers: The number of threads. Default: one for each processor, and at least 16 for stores.
        overwrite: Replace a list that is there.
        on_progress: Called with the number of bytes done and in all. Default: not called.

    Returns:
        A ``ChecksumReport`` with the digests, and where they were written.

    Raises:
        DestinationExistsError: a list is there, or something that is not a list.
        CkptError: As ``inspect`` does.

    Example:
        >>> import ckpt_tools
        >>> report = ckpt_tools.checksum("model.safetensors", output="model.digests.json")
        >>> len(report.digests), report.num_bytes
        (2, 144)
        >>> ckpt_tools.verify("run", digests="model.digests.json").num_digests
        2
    """
    from ckpt_tools.core.applicability import COMMAND_RULES, OptionContext, check_applicability
    from ckpt_tools.verification.verify import write_digests

    read_options = ConvertOptions(**options)
    check_applicability(
        COMMAND_RULES["checksum"], {"overwrite": overwrite}, OptionContext(prints_digests=output == "-")
    )
    opened = _open_checkpoint(src, read_options, output, may_be_empty=False)
    execution_options = _execution_options(read_options, workers, on_progress, src)
    return write_digests(opened.source, opened.manifest, execution_options, output=output, overwrite=overwrite)


@api_function
def scan(
    src: str | Path,
    *,
    allow: Iterable[str] = (),
    allow_configuration: bool = False,
    exclude: Iterable[str] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> ScanReport:
    """Prove that loading any file of ``src`` runs nothing, or list what is not proved; run nothing.

    Args:
        src: A path, or a URL of a store. It need not be a checkpoint.
        allow: Exact names of classes and functions that you vouch for, such as ``mypackage.config.Config``.
        allow_configuration: Count configuration, but make no finding of it: the programs that will read it import and
            call no names in it.
        exclude: Globs; a file whose name or path matches one is not looked at.
        storage_options: As for ``inspect``.

    Returns:
        A ``ScanReport``. ``report.clean``: every byte of every file was accounted for, and loading it runs nothing
        except the names of ``report.allowed``, and what programs make of configuration that you allowed.
        ``report.findings`` says what is not proved, and why.

    Raises:
        SourceNotFoundError: nothing is at ``src``.
        StoreError: the disk or the network failed.

    Example:
        >>> import ckpt_tools
        >>> report = ckpt_tools.scan("run")
        >>> report.clean, report.num_findings
        (True, 0)
    """
    from ckpt_tools.runs.opening import resolve_checkpoint_url
    from ckpt_tools.stores.urls import open_source
    from ckpt_tools.verification.scan import scan_source

    src = resolve_checkpoint_url(src, storage_options)
    return scan_source(
        open_source(src, storage_options),
        str(src),
        tuple(allow),
        allow_configuration=allow_configuration,
        exclude=tuple(exclude),
    )


@api_function
def ls(run: str | Path, *, storage_options: Mapping[str, Any] | None = None) -> RunListing:
    """List the checkpoints of a run of any trainer, the newest first, and say of each whether it is complete.

    Args:
        run: A folder that holds checkpoints, or one checkpoint: a path, or a URL of a store.
        storage_options: As for ``inspect``.

    Returns:
        A ``RunListing``; its ``checkpoints`` are ``RunCheckpoint`` objects.

    Raises:
        SourceNotFoundError: nothing is at ``run``, or it holds no checkpoints.
        StoreError: the disk or the network failed.

    Example:
        >>> import ckpt_tools
        >>> [(each.name, each.is_complete) for each in ckpt_tools.ls("run").checkpoints]
        [('.', True)]
    """
    from ckpt_tools.runs.listing import list_checkpoints
    from ckpt_tools.runs.opening import resolve_checkpoint_url
    from ckpt_tools.stores.urls import open_run_source

    run = resolve_checkpoint_url(run, storage_options)
    return list_checkpoints(open_run_source(run, storage_options), url=str(run))


@api_function
def prune(
    run: str | Path,
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep_best: str | None = None,
    healthy: bool = False,
    incomplete: bool = False,
    allow_less: bool = False,
    yes: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> PruneReport:
    """Remove old checkpoints of a run; without ``yes``, say which ones would go.

    The newest complete checkpoint always stays, and so do the one that the trainer's own record calls the best, and
    those whose folders hold files that no trainer writes.

    Args:
        run: A folder that holds the checkpoints of one run: a path, or a URL of a store.
        keep_last: Keep this many of the newest complete checkpoints, at least 1.
        keep_every: Keep checkpoints whose step is a multiple of it. Default: none for that reason.
        keep_best: Keep the best by a metric of the trainer's own record: ``"eval_loss:min"``, ``"accuracy"``.
            Default: none for that reason.
        healthy: Keep the newest checkpoint without NaN and infinities too, so that a run that diverged does not lose
            its last good one. Checkpoints are read from the newest on, until one is found.
        incomplete: Remove incomplete checkpoints too, if nothing was written to them for an hour.
        allow_less: Rely on the newest checkpoints even if one holds less than an older one that would go: no weights,
            other names, less than half of the elements.
        yes: Remove what does not stay.
        storage_options: As for ``inspect``.

    Returns:
        A ``PruneReport``; its ``checkpoints`` are ``Pruned`` objects, each with its reason.

    Raises:
        SourceNotFoundError: nothing is at ``run``, or no complete checkpoint.
        UsageError: ``run`` is one checkpoint or holds several runs, or no checkpoint has the metric.
        DestinationExistsError: a run or a conversion of ckpt-tools is writing there; nothing was removed.
        FormatError: one of the newest complete checkpoints cannot be opened, or holds less than an older one; nothing
            was removed.
        DifferenceError: with ``healthy``, no complete checkpoint is finite; nothing was removed.
        StoreError: the disk or the network failed.

    Example:
        >>> import ckpt_tools
        >>> for step in (1, 2, 3):
        ...     _ = ckpt_tools.convert("model.safetensors", f"old/step_{step}", to="safetensors")
        >>> report = ckpt_tools.prune("old", keep_last=1, keep_every=2)
        >>> [(each.name, each.stays) for each in report.checkpoints]
        [('step_3', True), ('step_2', True), ('step_1', False)]
    """
    from ckpt_tools.runs.pruning import prune_run
    from ckpt_tools.runs.rules import BestMetric, PruneRules

    best_metric = None if keep_best is None else BestMetric.parse(keep_best)
    rules = PruneRules(keep_last, keep_every, best_metric, incomplete, allow_less)
    is_finite = None
    if healthy:
        from ckpt_tools.transfer.workers import choose_num_workers
        from ckpt_tools.verification.health.check import has_finite_values

        def is_finite(store: Store, manifest: Manifest) -> bool:
            return has_finite_values(store, manifest, choose_num_workers(None, run))

    return prune_run(run, rules, yes=yes, storage_options=storage_options, is_finite=is_finite)


@api_function
def clean(dst: str | Path, *, dry_run: bool = False, storage_options: Mapping[str, Any] | None = None) -> CleanReport:
    """Remove what killed or failed runs of ``convert`` left at ``dst`` or beside it, and nothing else.

    Args:
        dst: The destination of those runs: a path, or a URL of a store.
        dry_run: List it, and remove nothing.
        storage_options: As for ``inspect``.

    Returns:
        A ``CleanReport`` with what was found.

    Raises:
        DestinationExistsError: a run is writing there now; nothing was removed.
        StoreError: the disk or the network failed.

    Example:
        >>> import ckpt_tools
        >>> ckpt_tools.clean("run", dry_run=True).leftovers
        ()
    """
    from ckpt_tools.stores.publishing import clean_leftovers as clean_place
    from ckpt_tools.stores.urls import open_output_location

    return clean_place(open_output_location(dst, storage_options), dry_run=dry_run)


@api_function
def sign(
    src: str | Path, *, private_key: str | Path, signature: str | Path | None = None, overwrite: bool = False
) -> SignReport:
    """Sign every file of ``src`` by OpenSSF model-signing, for ``verify`` and for ``model_signing`` to check.

    Args:
        src: A local checkpoint, or a list of digests that ``checksum`` wrote.
        private_key: A PEM file with an elliptic-curve key.
        signature: Where the signature goes. Default: ``model.sig`` in the folder ``src``, or ``<file>.sig``.
        overwrite: Replace a signature that is there.

    Returns:
        A ``SignReport``: where the signature was written.

    Raises:
        DestinationExistsError: a signature is there, or something that is not a signature.
        SourceNotFoundError: ``src`` or the key is not there.
        UsageError: the key cannot be used, or the extra ``sign`` is not installed.

    Example:
        >>> import ckpt_tools
        >>> ckpt_tools.sign("model.safetensors", private_key="key.pem").signature
        'model.safetensors.sig'
        >>> ckpt_tools.verify("model.safetensors", public_key="key.pub").equal
        True
    """
    from ckpt_tools.runs.opening import resolve_checkpoint_url
    from ckpt_tools.verification.signing import sign_with_key

    return sign_with_key(resolve_checkpoint_url(src), private_key=private_key, signature=signature, overwrite=overwrite)


@api_function
def list_formats() -> tuple[FormatInfo, ...]:
    """List the formats that can be read and written.

    Returns:
        A ``FormatInfo`` for each format; its ``name`` is what ``to`` and ``from_`` accept.

    Example:
        >>> import ckpt_tools
        >>> [row.name for row in ckpt_tools.list_formats() if row.writes][:3]
        ['megatron', 'dcp', 'universal']
    """
    from ckpt_tools.formats.index import build_format_table

    return build_format_table()


@api_function
def list_recipes() -> tuple[RecipeInfo, ...]:
    """List the recipes that are built in, and those of plug-ins.

    Returns:
        A ``RecipeInfo`` for each; its ``name`` is what ``recipe`` accepts.

    Raises:
        UsageError: a plug-in gives a recipe that cannot be read.

    Example:
        >>> import ckpt_tools
        >>> all(recipe.name and recipe.text for recipe in ckpt_tools.list_recipes())
        True
    """
    from ckpt_tools.recipes import index
    from ckpt_tools.recipes.report import RecipeInfo

    return tuple(map(RecipeInfo.of, index.list_recipes()))


@api_function
def show_recipe(recipe: str | Path) -> RecipeInfo:
    """Show one recipe.

    Args:
        recipe: The name of a built-in recipe, or a TOML file.

    Returns:
        A ``RecipeInfo``; its ``text`` is the file, and its ``card`` says what proves it.

    Raises:
        SourceNotFoundError: there is no such file.
        UsageError: there is no such recipe, or the file is not a recipe.

    Example:
        >>> import ckpt_tools
        >>> recipe = ckpt_tools.show_recipe("halves.toml")
        >>> recipe.left, recipe.right
        ('whole', 'cut')
    """
    from ckpt_tools.recipes.index import load_recipe
    from ckpt_tools.recipes.report import RecipeInfo

    return RecipeInfo.of(load_recipe(recipe))


@api_function
@expand_keywords(ReadKeywords, ConvertRequest)
def check_recipe(
    recipe: str | Path,
    src: str | Path,
    *,
    inverse: bool = False,
    config: str | Path | None = None,
    state: State | None = None,
    **options: Unpack[ReadKeywords],
) -> RecipeMap:
    """Say what a recipe makes of the checkpoint at ``src``; read its headers alone, and write nothing.

    Args:
        recipe, inverse, config: As for ``convert``.
        src, from_, tag, model_key, optim_key, param_order, optimizer_file, storage_options: As for ``inspect``.
        state: ``"all"`` maps the whole training state, as ``convert`` with it does. Default: the weights alone.

    Returns:
        A ``RecipeMap``; its ``tensors`` are ``MappedTensor`` objects, each with the names that its elements are from.

    Raises:
        UsageError: the recipe does not fit the checkpoint.
        CkptError: the checkpoint or the recipe cannot be read.

    Example:
        >>> import ckpt_tools
        >>> report = ckpt_tools.check_recipe("halves.toml", "model.safetensors")
        >>> sorted((tensor.name, tensor.shape, tensor.sources) for tensor in report.tensors)[1]
        ('encoder.rest', (2, 8), ('encoder.weight',))
    """
    from ckpt_tools.core import renaming, transforms
    from ckpt_tools.reading.checkpoint import make_recipe_step
    from ckpt_tools.recipes.report import make_recipe_map

    convert_options = ConvertOptions(recipe=recipe, inverse=inverse, config=config, state=state, **options)
    opened = _open_checkpoint(src, convert_options)
    manifest, step = opened.manifest, make_recipe_step(opened, convert_options)
    assert step is not None and step.recipe is not None
    if state != "all" and not manifest.unjoined_state:
        weights_manifest, _ = transforms.keep_model_only(
            manifest, weight_copy=convert_options.choose_weight_copy(manifest), is_requested=True
        )
        manifest, _ = renaming.strip_wrappers(weights_manifest)
    return make_recipe_map(manifest, step.recipe, step)


def _open_checkpoint(
    src: str | Path, options: ConvertOptions, *other_urls: str | Path | None, may_be_empty: bool = True
) -> OpenedCheckpoint:
    """The checkpoint at ``src``. ``other_urls`` are other places that the storage options may be for."""
    from ckpt_tools.runs.opening import open_checkpoint

    storage_options = options.storage_options
    return open_checkpoint(
        src,
        options.read_options,
        format_name=options.from_,
        storage_options=storage_options,
        config_folder=options.config,
        may_be_empty=may_be_empty,
        step_by_name=True,
        checks_options=True,
    )


def _execution_options(
    options: ConvertOptions, workers: int | None, on_progress: ProgressCallback | None, *urls: str | Path | None
) -> ExecutionOptions:
    from ckpt_tools.transfer.workers import choose_num_workers
    from ckpt_tools.verification.verify import ExecutionOptions

    return ExecutionOptions(choose_num_workers(workers, *urls), on_progress or ignore_progress, options.storage_options)
