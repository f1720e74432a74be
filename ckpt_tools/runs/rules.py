"""Rules of which checkpoints of a run stay, and why. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.wording import find_nearest, join_names
from ckpt_tools.errors import UsageError
from ckpt_tools.runs.report import RunCheckpoint

_SMALLER = frozenset(["loss", "error", "perplexity", "ppl", "wer", "cer", "mse", "mae", "rmse", "nll"])
_LARGER = frozenset(["accuracy", "acc", "f1", "bleu", "rouge", "score", "auc", "reward", "precision", "recall"])


@dataclass(frozen=True, slots=True)
class Best:
    """A metric and its better end."""

    metric: str
    is_min: bool

    @classmethod
    def parse(cls, text: str) -> Best:
        """Parse ``METRIC``, ``METRIC:min`` or ``METRIC:max``. Raises UsageError."""
        metric, _, end = text.rpartition(":") if text.endswith((":min", ":max")) else (text, "", "")
        if not metric:
            raise UsageError(f"{format_option('keep_best', text)} names no metric")
        if end:
            return cls(metric, end == "min")
        words = set(re.split(r"[^a-z0-9]+", metric.lower()))
        if bool(words & _SMALLER) == bool(words & _LARGER):
            raise UsageError(
                f"{format_option('keep_best', text)} does not say whether less or more is better; write {metric}:min "
                f"or "
                f"{metric}:max"
            )
        return cls(metric, bool(words & _SMALLER))

    def choose(self, metrics: Mapping[str, Mapping[str, float]]) -> str:
        """The best of the checkpoints whose metrics are given by their names. Raises UsageError."""
        values = {name: found[self.metric] for name, found in metrics.items() if self.metric in found}
        if not values:
            known = sorted({metric for found in metrics.values() for metric in found})
            near = sorted(find_nearest(self.metric, known)) if len(known) > 20 else known
            there = f"its checkpoints have {join_names(near, 20)}" if known else "its checkpoints have no metrics"
            raise UsageError(f"no checkpoint of the run has the metric {self.metric!r}; {there}")
        return (min if self.is_min else max)(values, key=lambda name: values[name])


@dataclass(frozen=True, slots=True)
class PruneRules:
    """Options of ``prune`` that say what to keep. ``best`` is the name of the best checkpoint, if there is a metric."""

    keep_last: int
    keep_every: int | None = None
    keep_best: Best | None = None
    incomplete: bool = False
    allow_less: bool = False

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < 1):
                raise UsageError(f"{format_option(name, number)} is not a number from 1 on")


@dataclass(frozen=True, slots=True)
class Facts:
    """What ``ls`` says of a checkpoint, and what only matters here."""

    shown: RunCheckpoint
    number: str
    """The numbers in its name, empty if it has none; files of one step share them."""
    held: str | None = None
    """Why it stays whatever the rules say: a link or a file names it, or files in it are not a trainer's."""
    is_recent: bool = False
    """Written to within the last hour, so that it may be a save under way."""


@dataclass(frozen=True, slots=True)
class Relied:
    """Checkpoints that pruning relies on: ``kept`` are the newest complete ones. None of them may hold less than the
    ``elders``, which are the newest one that would go, and the one with the largest files."""

    kept: Sequence[str]
    elders: Sequence[str]


def relied(facts: Sequence[Facts], stays: Mapping[str, str | None], rules: PruneRules) -> Relied:
    """The checkpoints to open and compare before those go for which ``stays`` has no reason: none if nothing goes, and
    the newest alone if no complete one goes, or if the user allows less."""
    if all(stays.values()):
        return Relied((), ())
    going = [each for each in facts if stays[each.shown.name] is None and each.shown.is_complete]
    if not going or rules.allow_less:
        return Relied(_last(facts, 1), ())
    largest = max(going, key=lambda each: each.shown.file_bytes)
    return Relied(_last(facts, rules.keep_last), list(dict.fromkeys((going[0].number, largest.number))))


def reasons(facts: Sequence[Facts], rules: PruneRules, best: str | None) -> dict[str, str | None]:
    """Why each checkpoint stays, by name; None for those that go. ``facts`` are in order, the newest first."""
    last = _last(facts, rules.keep_last)
    stays = {each.shown.name: _reason(each, last, rules, best) for each in facts}
    kept = {each.number: each.shown.name for each in facts if each.number and stays[each.shown.name]}
    for each in facts:
        if stays[each.shown.name] is None and each.number in kept and each.shown.is_complete:
            stays[each.shown.name] = f"of the same step as {kept[each.number]}, which stays"
    return stays


def _last(facts: Sequence[Facts], keep_last: int) -> list[str]:
    numbers = dict.fromkeys(each.number for each in facts if each.shown.is_complete and each.number)
    return list(numbers)[:keep_last]


def _reason(each: Facts, last: Sequence[str], rules: PruneRules, best: str | None) -> str | None:
    shown = each.shown
    if not shown.is_complete:
        return _reason_of_incomplete(each, rules)
    if not each.number:
        return "its name has no step"
    if each.number in last:
        number = last.index(each.number)
        return "the newest complete one" if number == 0 else f"one of the newest {rules.keep_last}"
    if shown.name == best and rules.keep_best is not None:
        return f"the best by {rules.keep_best.metric}"
    if rules.keep_every is not None and shown.step is None:
        return "its step is not known"
    if rules.keep_every is not None and shown.step is not None and shown.step % rules.keep_every == 0:
        return f"its step is a multiple of {rules.keep_every:,}"
    return each.held


def _reason_of_incomplete(each: Facts, rules: PruneRules) -> str | None:
    if not rules.incomplete:
        return f"not complete ({each.shown.problem}); {format_option('incomplete', True)} removes it"
    if each.is_recent:
        return "not complete, and written to within the last hour: the save may be under way"
    return each.held
