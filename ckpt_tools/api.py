"""The verbs: one function a command, with the same names and the same meaning.

Options left out take the defaults stated in the signatures. Every function raises ``CkptError`` and nothing else on
bad input.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt_tools.comparison import Progress, Side, VerifyReport, compare
from ckpt_tools.conversion import (
    SAME,
    ConvertReport,
    PlanReport,
    Prepared,
    described,
    prepare,
    reduced,
    run,
)
from ckpt_tools.errors import UsageError
from ckpt_tools.format.registry import FormatInfo, table, writers
from ckpt_tools.integrity import check_integrity
from ckpt_tools.lazy import Checkpoint
from ckpt_tools.manifest import Kind
from ckpt_tools.opening import read_checkpoint
from ckpt_tools.options import ConvertOptions, default_workers, parse_size
from ckpt_tools.options_names import DEFAULT_MEMORY
from ckpt_tools.summary import Summary, summarize


def _silent(done: int, total: int) -> None:
    """The default progress: none."""


def inspect(
    src: str | Path,
    *,
    from_: str | None = None,
    tag: str | None = None,
    model_key: str | None = None,
    optim_key: str | None = None,
) -> Summary:
    """What the checkpoint at ``src`` holds, from its headers alone."""
    options = ConvertOptions(tag=tag, model_key=model_key, optim_key=optim_key)
    _, manifest = read_checkpoint(src, options.reading, format_name=from_)
    return summarize(manifest, str(src))


def open(
    src: str | Path,
    *,
    from_: str | None = None,
    tag: str | None = None,
    model_key: str | None = None,
    optim_key: str | None = None,
) -> Checkpoint:
    """The checkpoint at ``src`` as a mapping of names to tensors that are read when indexed, and only where."""
    options = ConvertOptions(tag=tag, model_key=model_key, optim_key=optim_key)
    source, manifest = read_checkpoint(src, options.reading, format_name=from_)
    return Checkpoint.of(source.store, manifest)


def plan(src: str | Path, dst: str | Path, **options: Any) -> PlanReport:
    """What ``convert`` with the same arguments will read, write, cast and drop; writes nothing."""
    known = {name: options.pop(name) for name in list(options) if name not in ("overwrite", "fsync", "on_progress")}
    return described(_prepared(src, dst, **known))


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: str | None = None,
    from_: str | None = None,
    world_size: int | None = None,
    state: str | None = None,
    dtype: str | None = None,
    weights: str = "master",
    max_shard_size: str | int | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[str] = (),
    key_map: str | Path | None = None,
    model_key: str | None = None,
    optim_key: str | None = None,
    tag: str | None = None,
    memory: str | int = DEFAULT_MEMORY,
    workers: int | None = None,
    overwrite: bool = False,
    strict: bool = False,
    fsync: bool = False,
    on_progress: Progress = _silent,
) -> ConvertReport:
    """Write the checkpoint at ``src`` to ``dst`` in another format, or cut otherwise.

    ``dst`` is absent, as it was, or complete, whatever happens. ``on_progress`` hears of bytes written and in all.
    """
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
        strict=strict,
    )
    return run(prepared, overwrite=overwrite, fsync=fsync, on_progress=on_progress)


def consolidate(src: str | Path, dst: str | Path, *, to: str | None = None, **options: Any) -> ConvertReport:
    """The model's weights alone as one model: safetensors, or what ``dst`` or ``to`` says. Takes ``convert``'s
    options."""
    from ckpt_tools.opening import implied_format, local_path

    chosen = to or implied_format(local_path(dst)) or "safetensors"
    return convert(src, dst, to=chosen, state="model", **options)


def reshard(src: str | Path, dst: str | Path, *, world_size: int, **options: Any) -> ConvertReport:
    """The same checkpoint in the same format for another number of ranks. Takes ``convert``'s options."""
    return convert(src, dst, to=SAME, world_size=world_size, **options)


def _prepared(
    src: str | Path,
    dst: str | Path,
    *,
    to: str | None = None,
    from_: str | None = None,
    memory: str | int = DEFAULT_MEMORY,
    workers: int | None = None,
    strict: bool = False,
    **options: Any,
) -> Prepared:
    return prepare(
        src,
        dst,
        to=to,
        from_=from_,
        options=ConvertOptions(**options),
        memory_bytes=parse_size(memory),
        num_workers=_workers(workers),
        strict=strict,
    )


def _workers(asked: int | None) -> int:
    if asked is not None and asked < 1:
        raise UsageError(f"--workers {asked}: at least one is needed")
    return asked or default_workers()


def verify(
    src: str | Path,
    dst: str | Path | None = None,
    *,
    from_: str | None = None,
    workers: int | None = None,
    on_progress: Progress = _silent,
    **options: Any,
) -> VerifyReport:
    """Whether ``dst`` holds the tensors of ``src``, bit for bit, under the options it was converted with.

    Without ``dst``: whether every byte of ``src`` can be read and agrees with the checksums stored in it.
    """
    chosen = ConvertOptions(**options)
    source, manifest = read_checkpoint(src, chosen.reading, format_name=from_)
    if dst is None:
        return check_integrity(source, manifest, num_workers=_workers(workers), on_progress=on_progress)
    other_source, other = read_checkpoint(dst, ConvertOptions().reading)
    target = writers().get(other.format)
    expected, _ = reduced(
        manifest,
        chosen,
        whole=chosen.state != "model" and bool(other.groups or other.of_kind(Kind.STATE)),
        holds_masters=target is None or target.holds_masters,
    )
    total = sum(entry.num_bytes for entry in expected.tensors.values())
    done = 0

    def on_bytes(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        on_progress(min(done, total), total)

    return compare(
        Side(source.store, expected), Side(other_source.store, other), num_workers=_workers(workers), on_bytes=on_bytes
    )


def formats() -> tuple[FormatInfo, ...]:
    """The formats that can be read and written."""
    return table()
