"""Limits of a text model: the tokens that it knows, and the positions that it has.

Models count positions differently: RoBERTa begins behind its padding index, OPT and BART at 2, so that their tables
have more rows than they take tokens. So two inputs are tried, and the rows looked up for them compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from .results import Array

EXTRA = 2  # more tokens in the second input


def num_words(model: Any) -> int | None:
    """Rows of the table of tokens; None if the model does not say which one it is, or has none. A number behind them
    would be an error on the CPU, and on a GPU the end of all work of the process."""
    stated = getattr(model.config, "vocab_size", None)
    try:
        return getattr(model.get_input_embeddings(), "num_embeddings", stated)
    except NotImplementedError:
        return stated


def num_positions(model: Any, rows: Array, names: Sequence[str]) -> list[int]:
    """The most tokens that each table of positions allows; empty if the model has none. ``rows`` is one input, int64
    [fields, tokens], and ``names`` are those of its fields."""
    tables = [each for each in model.modules() if "Embedding" in type(each).__name__ and hasattr(each, "weight")]
    if len(tables) < 2 or not rows.shape[1]:
        return []
    middle = rows.shape[1] // 2
    longer = np.insert(rows, [middle] * EXTRA, rows[:, middle : middle + 1], axis=1)
    short, long = (_looked_up(model, each, names) for each in (rows, longer))
    return [
        num_rows - (last - (rows.shape[1] - 1))
        for (num_rows, last), (_, last_of_long) in zip(short, long, strict=False)
        if last_of_long - last == EXTRA
    ]


def _looked_up(model: Any, rows: Array, names: Sequence[str]) -> list[tuple[int, int]]:
    """For each look-up in order: the number of rows of the table, and the last one that is looked up."""
    taken = signature(model.forward).parameters
    batch = torch.from_numpy(rows).unsqueeze(1).to(next(model.parameters()).device)
    fields = {name: batch[number] for number, name in enumerate(names) if name in taken}
    with torch.inference_mode(), _LookUps() as found:
        try:
            model(**fields)
        except Exception:
            # Each text will fail alike, and have this as its error.
            return []
    return found.rows


class _LookUps(TorchFunctionMode):
    """Records the rows that are looked up in the block. Tables of relative positions take a matrix of them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, int]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.nn.functional.embedding:
            numbers, table = (*args, *(kwargs or {}).values())[:2]
            if 0 < numbers.numel() == numbers.shape[-1]:
                self.rows.append((len(table), int(numbers.max())))
        return func(*args, **(kwargs or {}))
