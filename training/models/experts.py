"""Mixture-of-experts language model: in every second layer a router sends each token to two of four experts.

No token is dropped. The weights of a layer's experts are stacked, so names and shapes do not depend on the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional

from .language_model import HIDDEN, WIDTH, Attention, Block, LanguageModel

EXPERTS = 4
CHOSEN = 2  # number of experts per token
BALANCE_WEIGHT = 0.01  # weight of the balance in the loss


class Experts(nn.Module):
    """EXPERTS networks like :class:`~training.models.language_model.FeedForward`, each for its own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(_drawn(HIDDEN, WIDTH)) for _ in range(2))
        self.down = nn.Parameter(_drawn(WIDTH, HIDDEN))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Float [m, WIDTH] to [m, WIDTH]. ``counts``, int64 [s, e], are the lengths of consecutive runs of ``tokens``:
        for each of s senders, one run for each of this worker's e experts. Each run is multiplied separately, so
        results do not depend on other senders."""
        runs = tokens.split(counts.flatten().tolist())
        experts = cycle(zip(*(weight.unbind() for weight in self.weights()), strict=True))
        return torch.cat([_answers(run, *expert) for run, expert in zip(runs, experts, strict=False)])

    def weights(self) -> Sequence[Tensor]:
        return self.gate, self.up, self.down


def _drawn(rows: int, columns: int) -> Tensor:
    """Matrices initialised as by ``nn.Linear``."""
    return torch.empty(EXPERTS, rows, columns).uniform_(-(columns**-0.5), columns**-0.5)


def _answers(tokens: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = functional.silu(functional.linear(tokens, gate)) * functional.linear(tokens, up)
    return functional.linear(hidden, down)


class MixtureOfExperts(nn.Module):
    """A router and its experts: float [n, t, WIDTH] to [n, t, WIDTH], and the imbalance of the routing."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        odds = self.router(x).float().softmax(-1)
        parts, chosen = odds.topk(CHOSEN)
        parts = parts / parts.sum(-1, keepdim=True)
        answers = self._answers(x, chosen.flatten())
        return (answers.unflatten(0, chosen.shape) * parts.unsqueeze(-1).to(x.dtype)).sum(-2), imbalance(odds, chosen)

    def _answers(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Outputs of the chosen experts of each token, float [n * t * CHOSEN, WIDTH]."""
        order = chosen.argsort(stable=True)
        copies = x.unsqueeze(-2).expand(*x.shape[:-1], CHOSEN, WIDTH).reshape(-1, WIDTH)
        answers = self.experts(copies[order], functional.one_hot(chosen, EXPERTS).sum(0, keepdim=True))
        return answers[order.argsort()]


def imbalance(odds: Tensor, chosen: Tensor) -> Tensor:
    """1 if tokens go evenly to the experts, EXPERTS / CHOSEN if all go to the same; float32, 0-d. ``odds`` are float
    [n, t, EXPERTS], ``chosen`` int64 [n, t, CHOSEN]. It is the mean over the n texts, so it does not depend on how
    texts are divided among workers and micro-batches."""
    shares = functional.one_hot(chosen, EXPERTS).sum(-2).float().mean(1) / CHOSEN
    return EXPERTS * (shares * odds.mean(1)).sum(-1).mean()


class MixtureBlock(nn.Module):
    """One layer with experts: the unit that is sharded and checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.feed_forward_norm = nn.RMSNorm(WIDTH)
        self.feed_forward = MixtureOfExperts()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        answers, uneven = self.feed_forward(self.feed_forward_norm(x))
        return x + answers, uneven


class MixtureModel(LanguageModel):
    """Bytes int64 [n, t] to logits of the next byte; in training mode also the auxiliary loss, 0-d."""

    def new_layer(self, at: int) -> nn.Module:
        return MixtureBlock() if at % 2 else Block()

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
