"""Compares what the files of a checkpoint say of how far its run was, so that files of two saves are seen.

What ranks say must agree, which ``Manifest`` checks: their readers hand it over in ``optimizer_steps``. The other
counters can differ in a genuine save: steps skipped for overflow, an optimizer that began anew, gradient accumulation,
a scheduler of epochs. So what differs there is a note, and a warning in every command.
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
from ckpt_tools.core.shards import Framing
from ckpt_tools.core.step_claims import OPTIMIZER_STEP_COUNTER, is_finite_number
from ckpt_tools.errors import FormatError
from ckpt_tools.messages.progress import log_warning
from ckpt_tools.messages.wording import join_names
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.transformers import STATE_FILE

STEP = "step"

MAX_ARCHIVES_READ = 32
"""Files of which a step is read if each step is an archive of its own, as in a DCP: it takes three reads, and a store
may need 0.1 s for one."""

EXACT_FORMATS = ("zero", "universal", "megatron", "nanotron")
"""Formats whose trainers count the optimizer's steps, and nothing else."""

_NUMBERED_STEP = re.compile(r"(?:.*\.)?state\.\d+\.step")
"""The step of a numbered parameter, where no name is known for the number."""

_NUMBERED_FOLDER = re.compile(r"\d+|checkpoint_\d+")
"""Names with the number of a save, or of a layer: those of accelerate, of Ray and of nanotron."""

MIXED_SAVES = "or the files are of two saves"


def add_step_doubts(manifest: Manifest, source: Source) -> Manifest:
    """``manifest`` with a note on each pair of counters that differ. These and the reader's own doubts are logged, as a
    command that shows no notes would be silent."""
    noted_manifest = replace(manifest, notes=(*manifest.notes, *_iter_step_doubts(manifest, source)), step_claims=())
    names_by_reason: dict[str, list[str]] = {}
    for note in noted_manifest.notes:
        if note.outcome is Outcome.DOUBTFUL:
            names_by_reason.setdefault(note.why, []).append(note.what)
    if names_by_reason:
        log_warning("reading", "; ".join(f"{join_names(what)}: {why}" for why, what in names_by_reason.items()))
    return noted_manifest


def _iter_step_doubts(manifest: Manifest, source: Source) -> Iterator[Note]:
    # Four sources of one number: the optimizer's ``step`` tensors, compared among each other and with the run's step,
    # schedulers' counters, and the name of the folder. Differences can be genuine, so each is a note that gives the
    # usual reasons first.
    optimizer_steps = _read_optimizer_steps(manifest, source)
    first_file = min(optimizer_steps, key=optimizer_steps.__getitem__, default="")
    last_file = max(optimizer_steps, key=optimizer_steps.__getitem__, default="")
    first_step, last_step = optimizer_steps.get(first_file), optimizer_steps.get(last_file)
    if first_step != last_step:
        both = f"{first_step:g} in {first_file} and {last_step:g} in {last_file}"
        why = f"{both}: some parameters began later or got no gradient, {MIXED_SAVES}"
        yield Note(Outcome.DOUBTFUL, "steps of the optimizer", why)
    run_steps = last_step if manifest.step is None else manifest.step
    if run_steps is None:
        return
    is_from_transformers, deepspeed_state = STATE_FILE in source.files, manifest.extra.get("deepspeed")
    skipped = deepspeed_state.get("skipped_steps") if isinstance(deepspeed_state, dict) else None
    applied_steps = run_steps - skipped if type(skipped) is int else run_steps
    # DeepSpeed may make one more to create the optimizer's state.
    if last_step is not None and last_step not in (run_steps, applied_steps, applied_steps + 1):
        is_exact = is_from_transformers or manifest.format.startswith(EXACT_FORMATS)
        if is_exact or last_step <= 0 or run_steps % last_step:
            both = f"{last_step:g} in {last_file}, and the run made {run_steps:,}"
            why = f"{both}: steps were skipped, the optimizer began anew, {MIXED_SAVES}"
            yield Note(Outcome.DOUBTFUL, "step of the optimizer", why)
    for name, value in _iter_scheduler_counters(manifest.extra):
        counts = (run_steps, applied_steps)
        if not any(_is_possible_count(value, each, is_exact=is_from_transformers) for each in counts):
            both = f"it has counted {value:,}, and the run made {run_steps:,} steps"
            yield Note(Outcome.DOUBTFUL, f"counter of {name}", f"{both}: it counts something else, {MIXED_SAVES}")
    for name, named_step in _iter_named_steps(manifest, source) if manifest.step is not None else ():
        if named_step is not None and abs(named_step - run_steps) > 1:  # NeMo counts from 0
            why = f"its files say step {run_steps:,}: it was renamed or counts something else, {MIXED_SAVES}"
            yield Note(Outcome.DOUBTFUL, f"name {name}", why)


def _read_optimizer_steps(manifest: Manifest, source: Source) -> dict[str, float]:
    """A step of the optimizer for each file with one, by the file; of archives some, evenly chosen."""
    entries: dict[str, TensorEntry] = {}
    for key, entry in manifest.select_kinds(Kind.STATE, Kind.EXTRA).items():
        is_step = key.slot == STEP if entry.kind is Kind.STATE else _NUMBERED_STEP.fullmatch(key.fqn) is not None
        if is_step and entry.numel == 1 and len(entry.shards) == 1:
            entries.setdefault(entry.shards.files[0], entry)
    files = sorted(entries)
    is_plain = all(entry.shards.framing is Framing.RAW for entry in entries.values())
    chosen_files = files if is_plain else files[:: -(-len(files) // MAX_ARCHIVES_READ)]
    step_by_file: dict[str, Any] = {file: _read_step(manifest, source, entries[file]) for file in chosen_files}
    step_by_file |= {
        claim.file: claim.number for claim in manifest.step_claims if claim.counter == OPTIMIZER_STEP_COUNTER
    }
    step_by_file |= {f"param_groups.{n}": group.options.get(STEP) for n, group in enumerate(manifest.groups)}
    return {where: number for where, number in step_by_file.items() if is_finite_number(number)}


def _read_step(manifest: Manifest, source: Source, entry: TensorEntry) -> float | None:
    """The step of ``entry``; None if it is damaged, which reading it finds."""
    byte_range = entry.shards.get_byte_range(0)
    literal = manifest.literals.get(byte_range.file)
    with suppress(FormatError):
        if literal is None and entry.shards.framing is not Framing.RAW:
            from ckpt_tools.formats.dcp.reader import read_number

            return read_number(source, entry)
        start, stop = byte_range.start, byte_range.stop
        data = source.read(byte_range.file, start, stop) if literal is None else literal[start:stop]
        return decode_number(data, entry.shards.dtype)
    return None


def _iter_scheduler_counters(extra: Any) -> Iterator[tuple[str, int]]:
    """The counters of the schedulers among the entries."""
    for name, value in extra.items():
        if "scheduler" in str(name):
            for state in value if isinstance(value, list | tuple) else [value]:
                if isinstance(state, dict) and type(last_epoch := state.get("last_epoch")) is int:
                    yield str(name), last_epoch


def _is_possible_count(last_epoch: int, run_steps: float, *, is_exact: bool) -> bool:
    """Whether a scheduler may have counted ``last_epoch`` in that many steps: each, or several for each, as accelerate
    has it count those of all processes, or epochs, which are far fewer."""
    if is_exact or not run_steps:
        return abs(last_epoch - run_steps) <= (0 if is_exact else 1)
    num_processes = max(1, round(last_epoch / run_steps))
    return last_epoch <= run_steps // 2 or abs(last_epoch - run_steps * num_processes) <= num_processes


def _iter_named_steps(manifest: Manifest, source: Source) -> Iterator[tuple[str, int | None]]:
    """Names around the tensors, with the steps that they say: of the file or folder that was opened, and of folders in
    it."""
    from ckpt_tools.trainers.saved import is_checkpoint_name, parse_step

    opened_name = re.split(r"[/\\]", source.store.url.rstrip("/"))[-1]
    tensor_folder = min(manifest.stored_files & source.files.keys(), default="").rpartition("/")[0]
    single_file = next(iter(source.files)) if len(source.files) == 1 else ""
    names = dict.fromkeys([opened_name, *tensor_folder.split("/"), single_file.rpartition(".")[0]])
    checkpoint_names = filter(is_checkpoint_name, names)
    return ((name, parse_step(name)) for name in checkpoint_names if _NUMBERED_FOLDER.fullmatch(name) is None)
