"""Compares what the files of a checkpoint say of how far its run was, so that files of two saves are seen.

What ranks say must agree, which ``Manifest`` checks: their readers hand it over in ``steps``. The other counters can
differ in a genuine save: steps skipped for overflow, an optimizer that began anew, gradient accumulation, a scheduler
of epochs. So what differs there is a note, and a warning in every command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ckpt_tools.core.dtypes import decode_number
from ckpt_tools.core.manifest import Kind, Manifest, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.progress import log_warning
from ckpt_tools.core.shards import Framing
from ckpt_tools.core.step_claims import OPTIMIZER_STEP_COUNTER, is_finite_number
from ckpt_tools.core.wording import join_names
from ckpt_tools.errors import FormatError
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.transformers import STATE

STEP = "step"

MAX_ITEMS = 32
"""Files of which a step is read if each step is an archive of its own, as in a DCP: it takes three reads, and a store
may need 0.1 s for one."""

EXACT = ("zero", "universal", "megatron", "nanotron")
"""Formats whose trainers count the optimizer's steps, and nothing else."""

_UNPLACED = re.compile(r"(?:.*\.)?state\.\d+\.step")
"""The step of a numbered parameter, where no name is known for the number."""

_NUMBERED = re.compile(r"\d+|checkpoint_\d+")
"""Names with the number of a save, or of a layer: those of accelerate, of Ray and of nanotron."""

MIXED = "or the files are of two saves"


def with_doubts(manifest: Manifest, source: Source) -> Manifest:
    """``manifest`` with a note on each pair of counters that differ. These and the reader's own doubts are logged, as a
    command that shows no notes would be silent."""
    found = replace(manifest, notes=(*manifest.notes, *_doubts(manifest, source)), step_claims=())
    doubts: dict[str, list[str]] = {}
    for note in found.notes:
        if note.outcome is Outcome.DOUBTFUL:
            doubts.setdefault(note.why, []).append(note.what)
    if doubts:
        log_warning("reading", "; ".join(f"{join_names(what)}: {why}" for why, what in doubts.items()))
    return found


def _doubts(manifest: Manifest, source: Source) -> Iterator[Note]:
    steps = _optimizer_steps(manifest, source)
    least, most = (min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)) if steps else ("", "")
    if least and steps[least] != steps[most]:
        both = f"{steps[least]:g} in {least} and {steps[most]:g} in {most}"
        why = f"{both}: some parameters began later or got no gradient, {MIXED}"
        yield Note(Outcome.DOUBTFUL, "steps of the optimizer", why)
    run = steps[most] if manifest.step is None and steps else manifest.step
    if run is None:
        return
    is_trainers, own = STATE in source.files, manifest.extra.get("deepspeed")
    skipped = own.get("skipped_steps") if isinstance(own, dict) else None
    made = run - skipped if type(skipped) is int else run
    counted = {run, made, made + 1}  # DeepSpeed may make one to create the optimizer's state
    is_exact = is_trainers or manifest.format.startswith(EXACT)
    if least and steps[most] not in counted and (is_exact or steps[most] <= 0 or run % steps[most]):
        both = f"{steps[most]:g} in {most}, and the run made {run:,}"
        why = f"{both}: steps were skipped, the optimizer began anew, {MIXED}"
        yield Note(Outcome.DOUBTFUL, "step of the optimizer", why)
    for name, value in _last_epochs(manifest.extra):
        if not any(_may_count(value, each, is_exact=is_trainers) for each in (run, made)):
            why = f"it has counted {value:,}, and the run made {run:,} steps: it counts something else, {MIXED}"
            yield Note(Outcome.DOUBTFUL, f"counter of {name}", why)
    for name, named in _named_steps(manifest, source) if manifest.step is not None else ():
        if named is not None and abs(named - run) > 1:  # NeMo counts from 0
            why = f"its files say step {run:,}: it was renamed or counts something else, {MIXED}"
            yield Note(Outcome.DOUBTFUL, f"name {name}", why)


def _optimizer_steps(manifest: Manifest, source: Source) -> dict[str, float]:
    """A step of the optimizer for each file with one, by the file; of archives some, evenly chosen."""
    entries: dict[str, TensorEntry] = {}
    for key, entry in manifest.select_kinds(Kind.STATE, Kind.EXTRA).items():
        is_step = key.slot == STEP if entry.kind is Kind.STATE else _UNPLACED.fullmatch(key.fqn) is not None
        if is_step and entry.numel == 1 and len(entry.shards) == 1:
            entries.setdefault(entry.shards.files[0], entry)
    files = sorted(entries)
    is_plain = all(entry.shards.framing is Framing.RAW for entry in entries.values())
    chosen = files if is_plain else files[:: -(-len(files) // MAX_ITEMS)]
    found: dict[str, Any] = {file: _number(manifest, source, entries[file]) for file in chosen}
    found |= {claim.file: claim.number for claim in manifest.step_claims if claim.counter == OPTIMIZER_STEP_COUNTER}
    found |= {f"param_groups.{n}": group.options.get(STEP) for n, group in enumerate(manifest.groups)}
    return {where: number for where, number in found.items() if is_finite_number(number)}


def _number(manifest: Manifest, source: Source, entry: TensorEntry) -> float | None:
    """The step of ``entry``; None if it is damaged, which reading it finds."""
    at = entry.shards.get_byte_range(0)
    known = manifest.literals.get(at.file)
    with suppress(FormatError):
        if known is None and entry.shards.framing is not Framing.RAW:
            from ckpt_tools.formats.dcp.reader import read_number

            return read_number(source, entry)
        data = source.read(at.file, at.start, at.stop) if known is None else known[at.start : at.stop]
        return decode_number(data, entry.shards.dtype)
    return None


def _last_epochs(extra: Any) -> Iterator[tuple[str, int]]:
    """The counters of the schedulers among the entries."""
    for name, value in extra.items():
        if "scheduler" in str(name):
            for state in value if isinstance(value, list | tuple) else [value]:
                if isinstance(state, dict) and type(last := state.get("last_epoch")) is int:
                    yield str(name), last


def _may_count(last: int, run: float, *, is_exact: bool) -> bool:
    """Whether a scheduler may have counted ``last`` in that many steps: each, or several for each, as accelerate has it
    count those of all processes, or epochs, which are far fewer."""
    if is_exact or not run:
        return abs(last - run) <= (0 if is_exact else 1)
    return last <= run // 2 or abs(last - run * max(1, round(last / run))) <= max(1, round(last / run))


def _named_steps(manifest: Manifest, source: Source) -> Iterator[tuple[str, int | None]]:
    """Names around the tensors, with the steps that they say: of the file or folder that was opened, and of folders in
    it."""
    from ckpt_tools.trainers.run_folders import is_named, step_in

    opened = re.split(r"[/\\]", source.store.url.rstrip("/"))[-1]
    folder = min(manifest.stored_files & source.files.keys(), default="").rpartition("/")[0]
    single = next(iter(source.files)) if len(source.files) == 1 else ""
    names = dict.fromkeys([opened, *folder.split("/"), single.rpartition(".")[0]])
    return ((name, step_in(name)) for name in names if is_named(name) and _NUMBERED.fullmatch(name) is None)
