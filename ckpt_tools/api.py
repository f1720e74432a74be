"""The verbs: one function a command, with the same names and the same meaning.

Options left out take the defaults stated in the signatures. Every function raises ``CkptError`` and nothing else on
bad input.

``storage_options`` say how stores that are no local folders are reached, as fsspec's do: credentials, an endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tools.conversion import SAME, ConvertReport, PlanReport, Prepared, plan_report, prepare, run
from ckpt_tools.core.applicability import ARGUMENTS, Case, check
from ckpt_tools.core.option_names import DEFAULT_MEMORY
from ckpt_tools.core.options import ConvertOptions, parse_size
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.reading import check_reading, named, read_checkpoint
from ckpt_tools.stores.urls import implied_format, is_remote, open_place, open_source, reaching_stores
from ckpt_tools.transfer.workers import REMOTE_WORKERS, WorkerPool, default_workers

# What few verbs need is imported by them: each of these rooms costs a conversion 5 to 15 ms of its start.
if TYPE_CHECKING:
    from ckpt_tools.checkpoint import Checkpoint
    from ckpt_tools.core.progress import Progress
    from ckpt_tools.core.summary import Summary
    from ckpt_tools.formats.registry import FormatInfo
    from ckpt_tools.stores.leftovers import CleanReport
    from ckpt_tools.verification.report import VerifyReport
    from ckpt_tools.verification.scan import ScanReport
    from ckpt_tools.verification.signing import SignReport
    from ckpt_tools.verification.verify import ChecksumReport

_RUNNING = ("resume", "fsync", "on_progress", "storage_options")
"""Options of ``convert`` that change nothing about what is to be done."""


def _silent(done: int, total: int) -> None:
    """The default progress: none."""


@reaching_stores
def inspect(
    src: str | Path,
    *,
    from_: str | None = None,
    tag: str | None = None,
    model_key: str | None = None,
    optim_key: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Summary:
    """What the checkpoint at ``src`` holds, from its headers alone."""
    from ckpt_tools.core.summary import summarize

    src, options = named(src), ConvertOptions(tag=tag, model_key=model_key, optim_key=optim_key)
    source, manifest = read_checkpoint(src, options.reading, format_name=from_)
    check_reading(manifest, options.reading)
    return summarize(manifest, str(src), source.files)


@reaching_stores
def open(
    src: str | Path,
    *,
    from_: str | None = None,
    tag: str | None = None,
    model_key: str | None = None,
    optim_key: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """The checkpoint at ``src`` as a mapping of names to tensors that are read when indexed, and only where."""
    from ckpt_tools.checkpoint import Checkpoint

    options = ConvertOptions(tag=tag, model_key=model_key, optim_key=optim_key)
    source, manifest = read_checkpoint(src, options.reading, format_name=from_)
    check_reading(manifest, options.reading)
    return Checkpoint.of(source.store, manifest)


@reaching_stores
def plan(src: str | Path, dst: str | Path, **options: Any) -> PlanReport:
    """What ``convert`` with the same arguments will read, write, cast, drop and, with ``overwrite``, remove; writes
    nothing, and refuses what ``convert`` refuses."""
    known = {name: options.pop(name) for name in list(options) if name not in _RUNNING}
    return plan_report(_prepared(src, dst, **known))


@reaching_stores
def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: str | None = None,
    from_: str | None = None,
    world_size: int | None = None,
    state: str | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    max_shard_size: str | int | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[str] = (),
    key_map: str | Path | None = None,
    model_key: str | None = None,
    optim_key: str | None = None,
    tag: str | None = None,
    memory: str | int | None = None,
    workers: int | None = None,
    runner: str = "threads",
    address: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    strict: bool = False,
    fsync: bool = False,
    checksum: bool = False,
    on_progress: Progress = _silent,
    storage_options: Mapping[str, Any] | None = None,
) -> ConvertReport:
    """Write the checkpoint at ``src`` to ``dst`` in another format, or cut otherwise.

    ``dst`` is absent, as it was, or complete, whatever happens. With ``resume`` what a killed or failed run of the same
    conversion wrote is checked and not written again, and is kept where this one fails too. ``on_progress`` hears of
    bytes written and in all.

    With ``overwrite`` the one checkpoint that lies at ``dst`` itself is replaced. Where anything else is there, or the
    source is, or is a folder above or below it, nothing is replaced, and DestinationExistsError says why.

    With ``checksum`` the digests of what was written lie with it, for ``verify``.

    With ``runner="ray"`` the work is done by processes of a Ray cluster: the one at ``address``, or one of this machine
    alone that is started for it.
    """
    if workers is None and runner == "threads":
        workers = _workers(None, src, dst)
    prepared = _prepared(
        src,
        dst,
        to=to,
        from_=from_,
        world_size=world_size,
        state=state,
        dtype=dtype,
        weights=weights,
        max_shard_size=max_shard_size,
        include=include,
        exclude=exclude,
        rename=rename,
        key_map=key_map,
        model_key=model_key,
        optim_key=optim_key,
        tag=tag,
        memory=memory,
        workers=workers,
        runner=runner,
        address=address,
        strict=strict,
        overwrite=overwrite,
        checksum=checksum,
    )
    pool = WorkerPool(runner, address, workers)
    return run(
        prepared,
        pool=pool,
        fsync=fsync,
        on_progress=on_progress,
        resume=resume,
    )


@reaching_stores
def consolidate(src: str | Path, dst: str | Path, *, to: str | None = None, **options: Any) -> ConvertReport:
    """The model's weights alone as one model: safetensors, or what ``dst`` or ``to`` says. Takes ``convert``'s
    options."""
    chosen = to or implied_format(open_place(dst).name) or "safetensors"
    return convert(src, dst, to=chosen, state="model", **options)


@reaching_stores
def reshard(src: str | Path, dst: str | Path, *, world_size: int, **options: Any) -> ConvertReport:
    """The same checkpoint in the same format for another number of ranks. Takes ``convert``'s options."""
    return convert(src, dst, to=SAME, world_size=world_size, **options)


def _prepared(
    src: str | Path,
    dst: str | Path,
    *,
    to: str | None = None,
    from_: str | None = None,
    memory: str | int | None = None,
    workers: int | None = None,
    runner: str = "threads",
    address: str | None = None,
    strict: bool = False,
    overwrite: bool = False,
    checksum: bool = False,
    **options: Any,
) -> Prepared:
    return prepare(
        src,
        dst,
        to=to,
        from_=from_,
        options=ConvertOptions(**options),
        memory_bytes=parse_size(DEFAULT_MEMORY if memory is None else memory),
        memory_is_limit=memory is not None,
        num_workers=WorkerPool(runner, address, workers).workers_per_process,
        strict=strict,
        overwrite=overwrite,
        checksum=checksum,
    )


def _workers(asked: int | None, *urls: str | Path | None) -> int:
    """The threads for what lies at ``urls``."""
    if asked is not None and asked < 1:
        raise UsageError(f"--workers {asked}: at least one is needed")
    is_distant = any(url is not None and is_remote(url) for url in urls)
    return asked or max(default_workers(), REMOTE_WORKERS if is_distant else 1)


@reaching_stores
def verify(
    src: str | Path,
    dst: str | Path | None = None,
    *,
    from_: str | None = None,
    digests: str | Path | None = None,
    public_key: str | Path | None = None,
    signature: str | Path | None = None,
    workers: int | None = None,
    on_progress: Progress = _silent,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> VerifyReport:
    """Whether ``dst`` holds the tensors of ``src``, bit for bit, under the options it was converted with.

    Without ``dst``: whether every byte of ``src`` can be read, agrees with the checksums stored in it, and every tensor
    with its digest: as ``digests`` lists those of the checkpoint that was converted to ``src`` with ``options``, else
    as the list that lies with ``src`` does, if there is one. With ``public_key``, first of all, whether the signature
    of ``digests``, else of ``src``, is by its owner.
    """
    from ckpt_tools.verification.signing import check_signature
    from ckpt_tools.verification.verify import Running, verify_alone, verify_pair

    chosen = ConvertOptions(**options)
    given = {**chosen.given, "digests": digests, "public_key": public_key, "signature": signature}
    case = Case(has_destination=dst is not None, has_digests=digests is not None, has_key=public_key is not None)
    check(ARGUMENTS["verify"], given, case)
    if public_key is not None:
        check_signature(digests or named(src), public_key=public_key, signature=signature)
    source, manifest = read_checkpoint(src, chosen.reading, format_name=from_)
    how = Running(_workers(workers, src, dst), on_progress)
    if dst is None:
        check_reading(manifest, chosen.reading)
        return verify_alone(source, manifest, chosen, how, against=digests)
    return verify_pair(source, manifest, dst, chosen, how)


@reaching_stores
def diff(
    a: str | Path,
    b: str | Path,
    *,
    from_: str | None = None,
    workers: int | None = None,
    on_progress: Progress = _silent,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> VerifyReport:
    """What differs between the tensors of ``a`` and ``b``, in whatever formats: optimizer state too, bit for bit, and
    how far the values are apart.

    ``state="model"`` compares weights alone; ``rename`` and ``key_map`` turn names of ``a`` into those of ``b``, and
    ``include`` and ``exclude`` choose among the latter. ``from_``, ``tag`` and the keys say how ``a`` is read. Where
    one side alone keeps fp32 masters, ``weights`` says which copy of it is compared.
    """
    from ckpt_tools.verification.verify import Running, compare_all

    chosen = ConvertOptions(**options)
    check(ARGUMENTS["diff"], chosen.given, Case())
    first = read_checkpoint(a, chosen.reading, format_name=from_)
    second = read_checkpoint(b, ConvertOptions().reading)
    return compare_all(first, second, chosen, Running(_workers(workers, a, b), on_progress))


@reaching_stores
def checksum(
    src: str | Path,
    *,
    output: str | Path | None = None,
    from_: str | None = None,
    tag: str | None = None,
    model_key: str | None = None,
    optim_key: str | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    on_progress: Progress = _silent,
    storage_options: Mapping[str, Any] | None = None,
) -> ChecksumReport:
    """Write down the digest of every tensor of ``src``, where ``verify`` finds them: in its folder, or beside its file.

    ``output`` names another file, or is ``-`` for none: the report holds them.
    """
    from ckpt_tools.verification.verify import Running, write_digests

    options = ConvertOptions(tag=tag, model_key=model_key, optim_key=optim_key)
    check(ARGUMENTS["checksum"], {"overwrite": overwrite}, Case(is_printed=output == "-"))
    source, manifest = read_checkpoint(src, options.reading, format_name=from_)
    check_reading(manifest, options.reading)
    how = Running(_workers(workers, src), on_progress)
    return write_digests(source, manifest, how, output=output, overwrite=overwrite)


@reaching_stores
def scan(src: str | Path, *, storage_options: Mapping[str, Any] | None = None) -> ScanReport:
    """What a loader that executes pickles would run of any file of ``src``; nothing is run."""
    from ckpt_tools.verification.scan import scan_source

    src = named(src)
    return scan_source(open_source(src), str(src))


@reaching_stores
def clean(dst: str | Path, *, dry_run: bool = False, storage_options: Mapping[str, Any] | None = None) -> CleanReport:
    """Remove what killed or failed runs left of ours at ``dst`` or beside it; with ``dry_run``, only list it.

    A run under way is left alone: the error says that there is one.
    """
    from ckpt_tools.stores.leftovers import clean as clean_place

    return clean_place(open_place(dst), dry_run=dry_run)


def sign(
    src: str | Path, *, private_key: str | Path, signature: str | Path | None = None, overwrite: bool = False
) -> SignReport:
    """Sign every file of ``src``, which may be a list of digests, for ``verify`` and for ``model_signing`` to check."""
    from ckpt_tools.verification.signing import sign_with_key

    return sign_with_key(named(src), private_key=private_key, signature=signature, overwrite=overwrite)


def formats() -> tuple[FormatInfo, ...]:
    """The formats that can be read and written."""
    from ckpt_tools.formats.registry import table

    return table()
