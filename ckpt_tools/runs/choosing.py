"""The complete checkpoints of a run that an average is over."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UsageError
from ckpt_tools.messages.progress import log_warning
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.runs.listing import check_is_one_run, list_checkpoints
from ckpt_tools.runs.steps import StepSelection
from ckpt_tools.stores.urls import StorageOptions, open_run_source


def choose_run_checkpoints(
    url: str | Path, *, last: int | None, every: int | None, storage_options: StorageOptions
) -> tuple[str, ...]:
    """URLs of the complete checkpoints of the run whose steps are multiples of ``every``, the ``last`` of them, in
    order of their steps; a line on stderr names those that are left out for another reason.

    Raises:
        UsageError: there are fewer than ``last``, two are of one step, or they are of several runs.
        SourceNotFoundError, StoreError: as ``list_checkpoints``.
    """
    selection = StepSelection((), every, last)
    listed = list_checkpoints(open_run_source(url, storage_options), url=str(url)).checkpoints
    steps = {each.url: each.step for each in listed if each.is_complete and each.step is not None}
    chosen = sorted((each for each, step in steps.items() if selection.includes(step)), key=steps.__getitem__)
    left_out = [
        f"{each.name} ({each.problem or 'its step is not known'})"
        for each in listed
        if each.url not in steps and selection.includes(each.step or 0)
    ]
    if left_out:
        log_warning("runs", f"not averaged: {join_names(left_out)}")
    check_is_one_run(str(url), [each.name for each in listed if each.url in chosen])
    for one, other in pairwise(chosen):
        if steps[one] == steps[other]:
            raise UsageError(f"{one} and {other} are both of step {steps[one]:,}; name the sources one by one")
    if last is not None and len(chosen) < last:
        multiples = f" whose steps are multiples of {every:,}" if every else ""
        raise UsageError(
            f"{format_option('last', last)}: {url} has {format_count(len(chosen), 'complete checkpoint')}{multiples}"
        )
    return tuple(chosen[-(last or 0) :])
