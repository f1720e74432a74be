"""The outputs of two models for the same inputs, their differences, and limits of these. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ckpt_tools.errors import FormatError, UsageError

P95_PER_MEAN = 4
"""The limit of the KL divergence's 95th percentile, as a multiple of that of its mean."""

MIN_COSINE = 0.99


@dataclass(frozen=True, slots=True)
class DifferenceLimits:
    """The largest differences allowed of two models: the mean KL divergence of their logits in nats, and the relative
    difference of a layer's output. Raises UsageError if one is not a number from 0."""

    max_kl: float = 0.025
    max_difference: float = 0.2

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value >= 0:
                raise UsageError(f"--{name.replace('_', '-')} is a number from 0, not {value}")


@dataclass(frozen=True, slots=True)
class LayerOutputs:
    """The results of a model: the output of its embeddings and of each layer, [n, tokens, size], and the logits,
    [n, tokens, values] or [n, classes]. On the CPU, in fp32."""

    states: tuple[Tensor, ...]
    logits: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.states, self.logits)

    @property
    def is_finite(self) -> bool:
        return all(bool(each.isfinite().all()) for each in self.tensors)


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """The difference of the outputs of one layer: the ``largest`` difference of two elements, and the ``relative`` one
    of two vectors of a token, |a - b| / |a|, the largest of all tokens. Not finite if an element is not."""

    layer: str
    largest: float
    relative: float


@dataclass(frozen=True, slots=True)
class ForwardReport:
    """The differences between two checkpoints' models. ``noise`` is the largest difference of SRC from itself, computed
    twice. The KL divergence is that of SRC from DST in nats; ``kl_p95`` and ``cosine`` (the mean) are of all tokens,
    ``top_1`` is the part of them with the same most probable value."""

    model: str
    inputs: str
    noise: float
    layers: tuple[LayerDifference, ...]
    kl_mean: float
    kl_p95: float
    cosine: float
    top_1: float
    limits: DifferenceLimits

    @property
    def reasons(self) -> tuple[str, ...]:
        """Sentences about figures beyond their limits, of layers the first alone. NaN is beyond every limit."""
        most, kl = self.limits.max_difference, self.limits.max_kl
        layers = [each for each in self.layers if not each.relative <= most][:1]
        sentences = [f"{each.layer}: relative difference {each.relative:.3g} is more than {most:g}" for each in layers]
        for what, value, limit in (("mean", self.kl_mean, kl), ("p95", self.kl_p95, P95_PER_MEAN * kl)):
            if not value <= limit:
                sentences.append(f"logits: {what} KL {value:.3g} is more than {limit:g}")
        if not self.cosine >= MIN_COSINE:
            sentences.append(f"logits: cosine {self.cosine:.3g} is less than {MIN_COSINE:g}")
        return tuple(sentences)

    @property
    def same(self) -> bool:
        """Whether everything is within its limit."""
        return not self.reasons

    def to_json(self) -> dict[str, Any]:
        """The fields, ``reasons`` and ``same``; numbers that are not finite as text."""
        fields: dict[str, Any] = _replace_infinities({**asdict(self), "reasons": self.reasons, "same": self.same})
        return fields


def _replace_infinities(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _replace_infinities(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_replace_infinities(each) for each in value]
    return repr(value) if isinstance(value, float) and not isfinite(value) else value


def make_report(
    model: str, inputs: str, reference: LayerOutputs, again: LayerOutputs, other: LayerOutputs, limits: DifferenceLimits
) -> ForwardReport:
    """The report of SRC's two passes and DST's one. Raises FormatError if the two models give tensors of other shapes,
    or if the reference is not finite, so that nothing could be compared with it."""
    shapes, others = ([tuple(each.shape) for each in outputs.tensors] for outputs in (reference, other))
    if shapes != others:
        raise FormatError(f"the {model} of SRC gives tensors of the shapes {shapes}, that of DST {others}")
    if not reference.is_finite:
        raise FormatError("the model of SRC computes NaN or infinities, and nothing can be compared with these")
    noise = max(float((a - b).abs().max()) for a, b in zip(reference.tensors, again.tensors, strict=True))
    names = ["embeddings", *(f"layer {number}" for number in range(len(reference.states) - 1))]
    layers = tuple(map(_compare_layer, names, reference.states, other.states))
    p_logits, q_logits = (each.logits.double().flatten(0, -2) for each in (reference, other))
    log_p, log_q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    # Rounding may leave it a little below 0.
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)
    cosine = torch.nn.functional.cosine_similarity(p_logits, q_logits, dim=-1, eps=1e-300)
    agreement = (p_logits.argmax(-1) == q_logits.argmax(-1)).double()
    mean, p95, cosine_mean, top_1 = map(float, (kl.mean(), kl.quantile(0.95), cosine.mean(), agreement.mean()))
    return ForwardReport(model, inputs, noise, layers, mean, p95, cosine_mean, top_1, limits)


def _compare_layer(name: str, reference: Tensor, other: Tensor) -> LayerDifference:
    difference = reference.double() - other.double()
    distance, size = difference.norm(dim=-1), reference.double().norm(dim=-1)
    # A vector of zeros is as far from any other as can be.
    relative = torch.where(distance == 0, distance, distance / size)
    return LayerDifference(name, float(difference.abs().max()), float(relative.max()))
