"""Rules on the elements of tensors: on one checkpoint alone, and beside the previous one. Pure.

No rule is for weights that may be constant: vectors (biases, norms, scales of layers, class tokens), buffers, the
matrix of an adapter that begins at zero, scales of quantized weights, and all weights at step 0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod, sqrt

from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, StateKey
from ckpt_tools.core.summary import TensorStats
from ckpt_tools.messages.wording import format_count
from ckpt_tools.verification.health.numbering import ExpertId
from ckpt_tools.verification.health.report import HealthFinding, HealthRule

STEP_SLOT = "step"
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "square_avg", "sum")
FIRST_MOMENTS = ("exp_avg", "momentum_buffer", "exp_inf")

MIN_STEPS = 2
"""Behind a matrix of zeros (an adapter's B, a gate) all gradients of the first step are zero."""

MAX_RATIO = 10
"""Between two saves of a run that works, the root mean square of a matrix changes by far less."""

MAX_VECTOR_RATIO = 100
"""The same for biases and norms, many of which begin near zero."""

MIN_RMS = 0.01
"""The root mean square of a weight that counts as this large at least where it grows: what begins at zero grows by any
factor."""

MAX_WEIGHT = 2.0**64
"""The square of a larger weight is infinite in float32: whatever sums squares, as norms do, gives NaN with it."""

_ZERO_AT_BEGIN = re.compile(r"(?:^|\.)(?:lora_B|lora_b|lora_up|lora_embedding_A)(?:\.|$)")
_CONSTANT_NAME = re.compile(r"(?:norm|scale|gamma|ln_?\w?)[^.]*(?:\.\w+)?$")
_MASK_NAME = re.compile(r"mask|(?:^|\.)attn\.(?:bias|masked_bias)$")


@dataclass(frozen=True, slots=True)
class MeasuredTensor:
    """The figures of a tensor, or of one expert in a fused tensor; ``bare_name`` is its name without wrappers, and
    ``digest`` the hash of what was read."""

    key: StateKey
    bare_name: str
    kind: Kind
    stats: TensorStats
    digest: bytes = b""
    expert: ExpertId | None = None
    row: int | None = None

    @property
    def name(self) -> str:
        return self.key.fqn if self.row is None else f"{self.key.fqn}[{self.row}]"

    @property
    def is_weight(self) -> bool:
        return self.key.slot == MASTER or (self.key.slot == WEIGHT and self.kind is Kind.PARAMETER)

    @property
    def is_floating(self) -> bool:
        return "float" in self.stats.dtype and self.stats.norm is not None

    @property
    def is_vector(self) -> bool:
        """Whether one dim at most has more than one element."""
        return sum(extent > 1 for extent in self.stats.shape) < 2

    @property
    def is_zero(self) -> bool:
        stats = self.stats
        return stats.num_read > 0 and stats.num_zeros == stats.num_read

    @property
    def is_constant(self) -> bool:
        stats = self.stats
        return stats.min is not None and stats.min == stats.max and not (stats.num_nan or stats.num_inf)

    @property
    def rms(self) -> float:
        """The root mean square of the elements that were read."""
        return (self.stats.norm or 0.0) / sqrt(max(1, self.stats.num_read))

    @property
    def identity(self) -> tuple[str, str, int | None]:
        """Equal for one tensor in all checkpoints of the run."""
        return self.bare_name, self.key.slot, self.row

    @property
    def read_text(self) -> str:
        """``, in the N elements that were read`` for a sample; empty for a whole tensor."""
        num_read = self.stats.num_read
        return "" if num_read == prod(self.stats.shape) else f", in the {num_read:,} elements that were read"

    def make_finding(self, rule: HealthRule, what: str, value: float | None = None) -> HealthFinding:
        return HealthFinding(rule, self.name, what, self.key.slot, value)


@dataclass(frozen=True)
class MeasuredCheckpoint:
    """All tensors of a checkpoint that were measured. ``steps`` are those of the optimizer by parameter, ``step`` is
    that of the checkpoint, and ``trained`` the parameters in groups of the optimizer or with state; None if they are
    not known."""

    tensors: Sequence[MeasuredTensor]
    steps: Mapping[str, float]
    step: int | None
    trained: frozenset[str] | None

    @cached_property
    def by_identity(self) -> Mapping[tuple[str, str, int | None], MeasuredTensor]:
        return {each.identity: each for each in self.tensors}

    @cached_property
    def mastered(self) -> frozenset[str]:
        return frozenset(each.key.fqn for each in self.tensors if each.key.slot == MASTER)


def find_non_finite(tensors: Sequence[MeasuredTensor]) -> Iterator[HealthFinding]:
    """Tensors with NaN or infinities, and weights that are as good as infinite. A mask may have infinities, and so may
    a single number of the user's: the best loss before the first evaluation."""
    for each in tensors:
        stats = each.stats
        is_mask = each.kind is Kind.BUFFER or _MASK_NAME.search(each.key.fqn) is not None
        may_be_infinite = is_mask or (each.kind is Kind.EXTRA and stats.num_read == 1)
        num_inf = 0 if may_be_infinite else stats.num_inf or 0
        counts = [f"{number:,} {name}" for number, name in ((stats.num_nan or 0, "NaN"), (num_inf, "Inf")) if number]
        if counts:
            what = f"{' and '.join(counts)} of {format_count(stats.num_read, 'element')}"
            yield each.make_finding(HealthRule.NON_FINITE, what, (stats.num_nan or 0) + num_inf)
        elif each.is_weight and not is_mask:
            largest = max(-(stats.min or 0), stats.max or 0)
            if largest > MAX_WEIGHT:
                what = f"an element of {largest:.3g}, whose square is infinite in float32"
                yield each.make_finding(HealthRule.NON_FINITE, what, largest)


def find_constant_weights(checkpoint: MeasuredCheckpoint) -> Iterator[HealthFinding]:
    if checkpoint.step == 0:
        return
    for each in checkpoint.tensors:
        stats, name = each.stats, each.key.fqn
        if not each.is_weight or not each.is_floating or each.is_vector:
            continue
        if each.is_zero:
            if checkpoint.step is not None or not _ZERO_AT_BEGIN.search(name):
                yield each.make_finding(HealthRule.ZERO, f"all elements are zero{each.read_text}", 0.0)
        elif each.is_constant and not _CONSTANT_NAME.search(name):
            yield each.make_finding(HealthRule.CONSTANT, f"all elements are {stats.min:.6g}{each.read_text}", stats.min)


def find_wrong_moments(checkpoint: MeasuredCheckpoint) -> Iterator[HealthFinding]:
    """Second moments below zero, and moments that are all zero though the parameter was trained."""
    states = [each for each in checkpoint.tensors if each.is_floating and each.kind is Kind.STATE]
    active_slots = {each.key.slot for each in states if not each.is_zero}
    dead: dict[ExpertId, list[MeasuredTensor]] = {}
    for each in states:
        slot, lowest = each.key.slot, each.stats.min
        if slot in SECOND_MOMENTS and lowest is not None and lowest < 0:
            yield each.make_finding(HealthRule.NEGATIVE_MOMENT, f"the least is {lowest:.6g}", lowest)
        if slot not in (*FIRST_MOMENTS, *SECOND_MOMENTS) or not each.is_zero:
            continue
        step = checkpoint.steps.get(each.key.fqn, checkpoint.step)
        if step >= MIN_STEPS if step is not None else slot in active_slots:
            if each.expert is not None and slot in active_slots:
                dead.setdefault(each.expert, []).append(each)
            else:
                when = "while others are not" if step is None else f"at step {step:g}"
                yield each.make_finding(HealthRule.ZERO_MOMENT, f"all elements are zero {when}{each.read_text}", 0.0)
    for expert, tensors in dead.items():
        what = f"{format_count(len(tensors), 'moment')} all zero: it never had a gradient"
        yield HealthFinding(HealthRule.DEAD_EXPERT, f"{expert.group}.{expert.number}", what, tensors[0].key.slot)


def find_other_steps(checkpoint: MeasuredCheckpoint, is_expert: Callable[[str], bool]) -> Iterator[HealthFinding]:
    """Parameters at another step of the optimizer than most are. An expert is not trained in each step."""
    steps = {name: step for name, step in checkpoint.steps.items() if not is_expert(name)}
    counts = Counter(steps.values())
    usual = max(counts, key=lambda step: (counts[step], step), default=0.0)
    for step in sorted(counts.keys() - {usual}):
        name = next(name for name, each in steps.items() if each == step)
        others = f" and {counts[step] - 1:,} more" if counts[step] > 1 else ""
        what = f"step {step:g}{others}; step {usual:g} of {format_count(counts[usual], 'parameter')}"
        yield HealthFinding(HealthRule.STEP, name, what, STEP_SLOT, step)


def find_changes(current: MeasuredCheckpoint, previous: MeasuredCheckpoint) -> Iterator[HealthFinding]:
    """Weights that changed too much since ``previous``, and those that did not change while others did."""
    pairs = [
        (each, before)
        for each in current.tensors
        if each.is_weight and each.is_floating and (before := previous.by_identity.get(each.identity)) is not None
        if before.stats.shape == each.stats.shape and before.is_floating
    ]
    for each, before in pairs:
        yield from _find_jump(each, before)
    unchanged = [each for each, old in pairs if (each.digest, each.stats.dtype) == (old.digest, old.stats.dtype)]
    if len(unchanged) == len(pairs):
        if pairs and (current.step is None or current.step != previous.step):
            what = f"none of {format_count(len(pairs), 'weight')} has changed"
            yield unchanged[0].make_finding(HealthRule.FROZEN, what, len(pairs))
        return
    dead = _find_dead_experts([each for each, _ in pairs], unchanged)
    for expert, tensors in dead.items():
        what = f"none of its {format_count(len(tensors), 'weight')} has changed, and those of other experts have"
        yield HealthFinding(HealthRule.DEAD_EXPERT, f"{expert.group}.{expert.number}", what, value=len(tensors))
    for each in unchanged:
        if each.expert not in dead and _should_change(each, current):
            what = (
                f"it has the same bits as before{each.read_text}, and {len(pairs) - len(unchanged):,} weights changed"
            )
            yield each.make_finding(HealthRule.FROZEN, what)


def _should_change(each: MeasuredTensor, checkpoint: MeasuredCheckpoint) -> bool:
    """Whether training changes the bits of ``each``: if there is an optimizer, it is in it. A vector of 16 bits may
    stay the same, as updates that are small beside its values are rounded away."""
    if each.key.fqn in checkpoint.mastered and each.key.slot == WEIGHT:
        return False  # its master is judged
    if checkpoint.trained is None or (checkpoint.trained and each.key.fqn not in checkpoint.trained):
        return False
    return not each.is_zero and (not each.is_vector or each.stats.dtype in ("float32", "float64"))


def _find_dead_experts(
    tensors: Sequence[MeasuredTensor], unchanged: Sequence[MeasuredTensor]
) -> dict[ExpertId, list[MeasuredTensor]]:
    """Experts without any change, in groups where another one changed."""
    unchanged_ids = {id(each) for each in unchanged}
    changed = {each.expert for each in tensors if each.expert is not None and id(each) not in unchanged_ids}
    active_groups = {expert.group for expert in changed if expert is not None}
    dead: dict[ExpertId, list[MeasuredTensor]] = {}
    for each in unchanged:
        if each.expert is not None and each.expert not in changed and each.expert.group in active_groups:
            dead.setdefault(each.expert, []).append(each)
    return dead


def _find_jump(each: MeasuredTensor, before: MeasuredTensor) -> Iterator[HealthFinding]:
    if any(stats.num_nan or stats.num_inf for stats in (each.stats, before.stats)):
        return  # the norm is that of the others
    limit = MAX_VECTOR_RATIO if each.is_vector else MAX_RATIO
    has_grown = before.rms > 0 and each.rms > limit * max(before.rms, MIN_RMS)
    has_shrunk = before.rms >= MIN_RMS and each.rms * limit < before.rms
    if has_grown or has_shrunk:
        ratio = each.rms / before.rms
        times = f"{ratio:.3g} times as much" if ratio >= 1 else f"{1 / ratio if ratio else inf:.3g} times less"
        what = f"its norm was {before.stats.norm:.6g} and is {each.stats.norm:.6g}, {times}"
        yield each.make_finding(HealthRule.JUMP, what, ratio)
