"""Mixture-of-experts language model: in every second layer a router sends each token to some of the experts.

No token is dropped. The weights of a layer's experts are stacked, so names and shapes do not depend on the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional

from .language_model import LanguageModel, LanguageModelSizes, TransformerBlock

BALANCE_WEIGHT = 0.01  # weight of the balance in the loss


@dataclass(frozen=True, slots=True)
class MixtureSizes(LanguageModelSizes):
    """Sizes of the model; each token goes to ``chosen`` of the ``experts`` of a layer."""

    experts: int = 4
    chosen: int = 2

    def __post_init__(self) -> None:
        LanguageModelSizes.__post_init__(self)
        if self.chosen > self.experts:
            raise ValueError(f"{self.chosen} chosen experts are more than the {self.experts} experts")


class Experts(nn.Module):
    """Networks like :class:`~training.models.language_model.FeedForward`, each for its own tokens."""

    def __init__(self, sizes: MixtureSizes) -> None:
        super().__init__()
        width, hidden = sizes.width, sizes.hidden
        self.gate, self.up = (nn.Parameter(_draw_weights(sizes.experts, hidden, width)) for _ in range(2))
        self.down = nn.Parameter(_draw_weights(sizes.experts, width, hidden))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Float [m, width] to [m, width]. ``counts``, int64 [s, e], are the lengths of consecutive runs of ``tokens``:
        for each of s senders, one run for each of this worker's e experts. Each run is multiplied separately, so
        results do not depend on other senders."""
        runs = tokens.split(counts.flatten().tolist())
        experts = cycle(zip(*(weight.unbind() for weight in self.list_weights()), strict=True))
        return torch.cat([_feed_forward(run, *expert) for run, expert in zip(runs, experts, strict=False)])

    def list_weights(self) -> Sequence[Tensor]:
        return self.gate, self.up, self.down


def _draw_weights(count: int, rows: int, columns: int) -> Tensor:
    """Matrices initialised as by ``nn.Linear``."""
    return torch.empty(count, rows, columns).uniform_(-(columns**-0.5), columns**-0.5)


def _feed_forward(tokens: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = functional.silu(functional.linear(tokens, gate)) * functional.linear(tokens, up)
    return functional.linear(hidden, down)


class MixtureOfExperts(nn.Module):
    """A router and its experts: float [n, t, width] to [n, t, width], and the imbalance of the routing."""

    def __init__(self, sizes: MixtureSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        self.experts = Experts(sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        odds = self.router(x).float().softmax(-1)
        shares, chosen = odds.topk(self.sizes.chosen)
        shares = (shares / shares.sum(-1, keepdim=True)).unsqueeze(-1).to(x.dtype)
        answers = self._feed_forward(x, chosen.flatten()).unflatten(0, chosen.shape)
        return (answers * shares).sum(-2), compute_imbalance(odds, chosen)

    def _feed_forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Outputs of the chosen experts of each token, float [n * t * chosen, width]."""
        order = chosen.argsort(stable=True)
        copies = x.unsqueeze(-2).expand(*x.shape[:-1], self.sizes.chosen, -1).flatten(0, -2)
        answers = self.experts(copies[order], functional.one_hot(chosen, self.sizes.experts).sum(0, keepdim=True))
        return answers[order.argsort()]


def compute_imbalance(odds: Tensor, chosen: Tensor) -> Tensor:
    """1 if tokens go evenly to the experts, experts / chosen if all go to the same; float32, 0-d. ``odds`` are float
    [n, t, experts], ``chosen`` int64 [n, t, chosen]. It is the mean over the n texts, so it does not depend on how
    texts are divided among workers and micro-batches."""
    experts = odds.shape[-1]
    shares = functional.one_hot(chosen, experts).sum(-2).float().mean(1) / chosen.shape[-1]
    return experts * (shares * odds.mean(1)).sum(-1).mean()


class MixtureBlock(TransformerBlock):
    """One layer with experts."""

    feed_forward_class = MixtureOfExperts
    feed_forward: MixtureOfExperts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = x + self.attention(self.attention_norm(x))
        answers, uneven = self.feed_forward(self.feed_forward_norm(x))
        return x + answers, uneven


class MixtureModel(LanguageModel):
    """Bytes int64 [n, t] to logits of the next byte; in training mode also the auxiliary loss, 0-d."""

    sizes_class = MixtureSizes

    def make_layer(self, at: int) -> nn.Module:
        assert isinstance(self.sizes, MixtureSizes)
        return MixtureBlock(self.sizes) if at % 2 else TransformerBlock(self.sizes)

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        x, uneven = self.embed(tokens), []
        for layer in self.layers:
            if isinstance(layer, MixtureBlock):
                x, one = layer(x)
                uneven.append(one)
            else:
                x = layer(x)
        logits = self.head(self.norm(x))
        return (logits, BALANCE_WEIGHT * torch.stack(uneven).mean()) if self.training else logits
