"""Rules of which checkpoints of a run stay, and why. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UsageError
from ckpt_tools.messages.wording import find_nearest, join_names
from ckpt_tools.runs.listing import RunCheckpoint
from ckpt_tools.runs.steps import check_number
from ckpt_tools.trainers.saved import SavedCheckpoint

_LOWER_IS_BETTER = frozenset(["loss", "error", "perplexity", "ppl", "wer", "cer", "mse", "mae", "rmse", "nll"])
_HIGHER_IS_BETTER = frozenset(
    ["accuracy", "acc", "f1", "bleu", "rouge", "score", "auc", "reward", "precision", "recall"]
)


@dataclass(frozen=True, slots=True)
class BestMetric:
    """A metric and its better end."""

    metric: str
    is_min: bool

    @classmethod
    def parse(cls, text: str) -> BestMetric:
        """Parse ``METRIC``, ``METRIC:min`` or ``METRIC:max``. Raises UsageError."""
        metric, _, direction = text.rpartition(":") if text.endswith((":min", ":max")) else (text, "", "")
        if not metric:
            raise UsageError(f"{format_option('keep_best', text)} names no metric")
        if direction:
            return cls(metric, direction == "min")
        words = set(re.split(r"[^a-z0-9]+", metric.lower()))
        if bool(words & _LOWER_IS_BETTER) == bool(words & _HIGHER_IS_BETTER):
            raise UsageError(
                f"{format_option('keep_best', text)} does not say whether less or more is better; write {metric}:min "
                f"or {metric}:max"
            )
        return cls(metric, bool(words & _LOWER_IS_BETTER))

    def choose_best(self, metrics: Mapping[str, Mapping[str, float]]) -> str:
        """The best of the checkpoints whose metrics are given by their names. Raises UsageError."""
        values = {name: found[self.metric] for name, found in metrics.items() if self.metric in found}
        if not values:
            known = sorted({metric for found in metrics.values() for metric in found})
            shown = sorted(find_nearest(self.metric, known)) if len(known) > 20 else known
            advice = f"its checkpoints have {join_names(shown, 20)}" if known else "its checkpoints have no metrics"
            raise UsageError(f"no checkpoint of the run has the metric {self.metric!r}; {advice}")
        return (min if self.is_min else max)(values, key=lambda name: values[name])


@dataclass(frozen=True, slots=True)
class PruneRules:
    """Options of ``prune`` that say what to keep. ``keep_best`` is the metric whose best checkpoint stays."""

    keep_last: int
    keep_every: int | None = None
    keep_best: BestMetric | None = None
    incomplete: bool = False
    allow_less: bool = False

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            check_number(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class PruneCandidate:
    """A checkpoint, what ``ls`` shows of it, and what matters to pruning alone."""

    member: SavedCheckpoint
    shown: RunCheckpoint
    protection_reason: str | None = None
    """Why it stays whatever the rules say: a link or a file names it, or files in it are not a trainer's."""
    is_recent: bool = False
    """Written to within the last hour, so that it may be a save under way."""

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def step_key(self) -> str:
        """The numbers in its name, empty if it has none; files of one step share them."""
        return self.member.step_key if self.member.is_numbered else ""


@dataclass(frozen=True, slots=True)
class ComparedSteps:
    """Checkpoints that are opened before pruning, by step keys: ``kept_steps`` are the newest complete ones. None of
    them may hold less than ``older_steps``, the newest one that would go and the one with the largest files."""

    kept_steps: Sequence[str]
    older_steps: Sequence[str]


def choose_compared_steps(
    candidates: Sequence[PruneCandidate], keep_reasons: Mapping[str, str | None], rules: PruneRules
) -> ComparedSteps:
    """The checkpoints to open and compare before those go for which ``keep_reasons`` has no reason: none if nothing
    goes, and the newest alone if no complete one goes, or if the user allows less."""
    if all(keep_reasons.values()):
        return ComparedSteps((), ())
    going = [each for each in candidates if keep_reasons[each.name] is None and each.shown.is_complete]
    if not going or rules.allow_less:
        return ComparedSteps(_list_newest_steps(candidates, 1), ())
    # Each one that is compared costs a header read. The newest and the largest that go stand for all of them.
    largest = max(going, key=lambda each: each.shown.file_bytes)
    older_steps = dict.fromkeys((going[0].step_key, largest.step_key))
    return ComparedSteps(_list_newest_steps(candidates, rules.keep_last), list(older_steps))


def find_keep_reasons(
    candidates: Sequence[PruneCandidate], rules: PruneRules, best_name: str | None
) -> dict[str, str | None]:
    """Why each checkpoint stays, by name; None for those that go. ``candidates`` are in order, the newest first."""
    newest = _list_newest_steps(candidates, rules.keep_last)
    keep_reasons = {each.name: _find_keep_reason(each, newest, rules, best_name) for each in candidates}
    kept_name_by_step = {each.step_key: each.name for each in candidates if each.step_key and keep_reasons[each.name]}
    for each in candidates:
        kept_name = kept_name_by_step.get(each.step_key)
        if keep_reasons[each.name] is None and kept_name is not None and each.shown.is_complete:
            keep_reasons[each.name] = f"of the same step as {kept_name}, which stays"
    return keep_reasons


def _list_newest_steps(candidates: Sequence[PruneCandidate], keep_last: int) -> list[str]:
    step_keys = dict.fromkeys(each.step_key for each in candidates if each.shown.is_complete and each.step_key)
    return list(step_keys)[:keep_last]


def _find_keep_reason(
    candidate: PruneCandidate, newest_steps: Sequence[str], rules: PruneRules, best_name: str | None
) -> str | None:
    shown = candidate.shown
    if not shown.is_complete:
        if not rules.incomplete:
            return f"not complete ({shown.problem}); {format_option('incomplete', True)} removes it"
        if candidate.is_recent:
            return "not complete, and written to within the last hour: the save may be under way"
        return candidate.protection_reason
    if not candidate.step_key:
        return "its name has no step"
    if candidate.step_key in newest_steps:
        rank_by_age = newest_steps.index(candidate.step_key)
        return "the newest complete one" if rank_by_age == 0 else f"one of the newest {rules.keep_last}"
    if candidate.name == best_name and rules.keep_best is not None:
        return f"the best by {rules.keep_best.metric}"
    if rules.keep_every is not None and shown.step is None:
        return "its step is not known"
    if rules.keep_every is not None and shown.step is not None and shown.step % rules.keep_every == 0:
        return f"its step is a multiple of {rules.keep_every:,}"
    return candidate.protection_reason
