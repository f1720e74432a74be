"""Decoder-only language model over bytes, as Llama: RMSNorm, rotary positions, SwiGLU, tied embeddings.

Queries, keys and values have separate matrices, and no shape depends on the number of heads on a worker, so tensor
parallelism can split the heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config.model_names import CONTEXT as CONTEXT
from ..config.model_names import VOCABULARY as VOCABULARY

_ROTARY_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class LanguageModelSizes:
    """Sizes of the model; ``width`` is that of the hidden states, ``hidden`` of the feed-forward layers. Raises
    ``ValueError``."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    hidden: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            if type(value := getattr(self, field.name)) is not int or value < 1:
                raise ValueError(f"{field.name} is a whole number of at least 1, not {value!r}")
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} does not divide over {self.heads} heads of an even size")


class Attention(nn.Module):
    """Causal attention, float [n, t, width] to [n, t, width]."""

    def __init__(self, sizes: LanguageModelSizes) -> None:
        super().__init__()
        self.head_size = sizes.width // sizes.heads
        self.q, self.k, self.v, self.o = (nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotate_positions(q), rotate_positions(k)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


def rotate_positions(x: Tensor) -> Tensor:
    """Rotary position embedding of [n, heads, t, size]."""
    half = x.shape[-1] // 2
    frequencies = _ROTARY_BASE ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device, dtype=torch.float32), frequencies)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, sizes: LanguageModelSizes) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(sizes.width, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class TransformerBlock(nn.Module):
    """One layer: the unit that is sharded and checkpointed."""

    feed_forward_class: Callable[..., nn.Module] = FeedForward

    def __init__(self, sizes: LanguageModelSizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.width)
        self.attention = Attention(sizes)
        self.feed_forward_norm = nn.RMSNorm(sizes.width)
        self.feed_forward = self.feed_forward_class(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class LanguageModel(nn.Module):
    """Bytes int64 [n, t] to logits of the next byte, float [n, t, VOCABULARY]."""

    sizes_class: type[LanguageModelSizes] = LanguageModelSizes

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.sizes = self.sizes_class(**sizes)
        width = self.sizes.width
        self.embed = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        self.layers = nn.ModuleList(self.make_layer(at) for at in range(self.sizes.layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def make_layer(self, at: int) -> nn.Module:
        return TransformerBlock(self.sizes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
