"""Limits of a text model: the tokens that it knows, and the positions that it has.

Models count positions differently: RoBERTa begins behind its padding index, OPT and BART at 2, so that their tables
have more rows than they take tokens. So a text of one repeated token is tried: the tables in which consecutive rows are
looked up for it are those of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .prediction import find_device

NUM_TOKENS = 4  # of the text that is tried: fewer than any table of positions has


def count_known_tokens(model: Any) -> int | None:
    """Rows of the table of tokens; None if the model does not say which one it is, or has none. A number behind them
    would be an error on the CPU, and on a GPU the end of all work of the process."""
    vocab_size = getattr(model.config, "vocab_size", None)
    try:
        return getattr(model.get_input_embeddings(), "num_embeddings", vocab_size)
    except NotImplementedError:
        return vocab_size


def list_position_limits(model: Any, fields: Sequence[str]) -> list[int]:
    """The most tokens that each table of positions allows; empty if the model has none. ``fields`` are the names of a
    tokenizer's rows."""
    tables = [each for each in model.modules() if "Embedding" in type(each).__name__ and hasattr(each, "weight")]
    if len(tables) < 2:
        return []
    padding = getattr(model.config, "pad_token_id", None)
    token = 2 if padding != 2 else 3
    values = {"input_ids": token, "attention_mask": 1}
    parameters = signature(model.forward).parameters
    text = {
        name: torch.full((1, NUM_TOKENS), values.get(name, 0), device=find_device(model))
        for name in fields
        if name in parameters
    }
    # What fails behind the tables will fail for each text alike, and be its error.
    with torch.inference_mode(), _LookUps() as look_ups, suppress(Exception):
        model(**text)
    return [
        num_rows - rows[0]
        for num_rows, rows in look_ups.tables
        if rows[:NUM_TOKENS] == list(range(rows[0], rows[0] + NUM_TOKENS))
    ]


class _LookUps(TorchFunctionMode):
    """Records the size of each table and the rows that are looked up in the block. Tables of relative positions take a
    matrix of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[int, list[int]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.embedding:
            numbers, table = (*args, *(kwargs or {}).values())[:2]
            if 0 < numbers.numel() == numbers.shape[-1]:
                self.tables.append((len(table), numbers.flatten().tolist()))
        return func(*args, **(kwargs or {}))
