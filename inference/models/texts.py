"""Text models of transformers: classifiers and causal language models.

An input is int64 [fields, tokens]: a row for each field that the tokenizer gives and the model takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ckpt_tools.errors import FormatError

from ..common.errors import one_line
from .prediction import Activation, activation_of, answers, embeddings_of, labels_of_config
from .results import BATCH, Prediction, TensorSpec
from .task import MAX_BATCH, check_inputs, check_labels, classifier_outputs, device_of, in_passes, text_of

BUCKET = 16  # classified texts are padded to a multiple of it, by their own length, not by others in the batch
NEW_TOKENS = 64  # default of new tokens without ``max_new_tokens`` in generation_config.json
VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", "vocab.txt", "vocab.bpe"})

Group = Callable[[Tensor], int]


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Tokenizes texts. ``limit`` is the most tokens that the model takes, if any."""

    tokenizer: Any
    fields: tuple[str, ...]
    limit: int | None

    @classmethod
    def from_folder(cls, model: Any, folder: Path) -> Tokens:
        """The tokenizer in ``folder``. Raises FormatError if there is none."""
        import transformers

        if not any(file.name in VOCABULARIES or file.suffix == ".model" for file in folder.iterdir()):
            # transformers would make an empty one.
            raise FormatError("there is no usable tokenizer beside the weights (no file with its vocabulary)")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
            raise FormatError(f"there is no usable tokenizer beside the weights ({one_line(error)})") from error
        fields = tuple(tokenizer("a" if len(tokenizer) else "").keys())
        return cls(tokenizer, fields, _limit(model.config, tokenizer))

    def of(self, data: bytes, name: str) -> Tensor:
        """Tokenize a text. Raises FormatError if not UTF-8, no tokens, or too many for the model."""
        encoded = self.tokenizer(text_of(data, name), verbose=False)
        rows = torch.tensor([encoded[field] for field in self.fields], dtype=torch.int64)
        num_tokens = rows.shape[1]
        if not num_tokens:
            raise FormatError(f"{name} is an empty text")
        if self.limit is not None and num_tokens > self.limit:
            raise FormatError(f"{name} has {num_tokens:,} tokens; the model takes at most {self.limit:,}")
        return rows

    def named(self, batch: Tensor) -> dict[str, Tensor]:
        """int64 [n, fields, tokens] as arguments by field name."""
        return {field: batch[:, number] for number, field in enumerate(self.fields)}

    def check(self, inputs: Sequence[Tensor]) -> None:
        check_inputs(inputs, torch.int64, (len(self.fields), BATCH))

    def padded(self, rows: Tensor, length: int) -> Tensor:
        """One input, padded at its end with the tokenizer's padding."""
        encoded = {field: rows[number].tolist() for number, field in enumerate(self.fields)}
        found = self.tokenizer.pad(encoded, padding="max_length", max_length=length, padding_side="right")
        return torch.tensor([found[field] for field in self.fields], dtype=torch.int64)


def _limit(config: Any, tokenizer: Any) -> int | None:
    stated = (getattr(config, "max_position_embeddings", None), tokenizer.model_max_length)
    # A tokenizer that states no length has 10**30 there.
    return min((int(each) for each in stated if isinstance(each, int) and 0 < each < 10**9), default=None)


@dataclass(frozen=True, slots=True, eq=False)
class TextLabels:
    """Classifies texts. Without a padding token, one text at a time."""

    model: Any
    tokens: Tokens
    labels: tuple[str, ...] | None
    is_exact: bool = True
    activation: Activation = "softmax"
    num_features: int | None = None

    inputs: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("text", "BYTES", (BATCH,)),)

    def __post_init__(self) -> None:
        check_labels(self.labels, self.model.config.num_labels)

    @classmethod
    def from_folder(cls, model: Any, folder: Path, labels: tuple[str, ...] | None, *, is_exact: bool) -> TextLabels:
        tokens = Tokens.from_folder(model, folder)
        return cls(model, tokens, labels or labels_of_config(model.config), is_exact, activation_of(model.config))

    @property
    def max_batch(self) -> int:
        has_padding = self.tokens.tokenizer.pad_token_id is not None and self.model.config.pad_token_id is not None
        return MAX_BATCH if has_padding else 1

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return classifier_outputs(self.model.config.num_labels, self.num_features)

    def decode(self, data: bytes, name: str) -> Tensor:
        return self.tokens.of(data, name)

    def predict(self, inputs: Sequence[Tensor]) -> list[Prediction]:
        self.tokens.check(inputs)
        return grouped(inputs, self._length, self._predict_group)

    def _length(self, rows: Tensor) -> int:
        length = rows.shape[1]
        if self.max_batch == 1:
            return length
        return min(-(-length // BUCKET) * BUCKET, self.tokens.limit or length + BUCKET)

    def _predict_group(self, inputs: Sequence[Tensor], length: int) -> Iterable[Prediction]:
        batch = torch.stack([self.tokens.padded(rows, length) if rows.shape[1] < length else rows for rows in inputs])
        logits = in_passes(batch, self._forward, max_batch=self.max_batch, is_exact=self.is_exact)
        return answers(logits, self.activation) if self.num_features is None else embeddings_of(logits)

    @torch.inference_mode()
    def _forward(self, batch: Tensor) -> Tensor:
        return self.model(**self.tokens.named(batch.to(device_of(self.model)))).logits.float().cpu()


@dataclass(frozen=True, slots=True, eq=False)
class TextWriter:
    """Continues texts with the most probable token each time; texts of one length share a batch."""

    model: Any
    tokens: Tokens
    settings: Any
    is_exact: bool = True

    inputs: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("text", "BYTES", (BATCH,)),)
    outputs: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("text", "BYTES", (BATCH,)),)
    labels: ClassVar[None] = None

    @classmethod
    def from_folder(cls, model: Any, folder: Path, *, max_new_tokens: int | None, is_exact: bool) -> TextWriter:
        tokens = Tokens.from_folder(model, folder)
        return cls(model, tokens, _settings(model, folder, tokens.tokenizer, max_new_tokens), is_exact)

    @property
    def max_batch(self) -> int:
        return MAX_BATCH

    def decode(self, data: bytes, name: str) -> Tensor:
        found = self.tokens.of(data, name)
        if found.shape[1] == self.tokens.limit:
            raise FormatError(f"{name} has {found.shape[1]:,} tokens, which is all that the model takes")
        return found

    def predict(self, inputs: Sequence[Tensor]) -> list[Prediction]:
        self.tokens.check(inputs)
        return grouped(inputs, lambda rows: rows.shape[1], self._predict_group)

    def _predict_group(self, inputs: Sequence[Tensor], length: int) -> Iterable[Prediction]:
        for start in range(0, len(inputs), self.max_batch):
            chunk = list(inputs[start : start + self.max_batch])
            missing = self.max_batch - len(chunk) if self.is_exact else 0
            written = self._written(torch.stack([*chunk, *chunk[-1:] * missing]))
            yield from (Prediction(text=self._text(row[length:])) for row in written[: len(chunk)])

    @torch.inference_mode()
    def _written(self, batch: Tensor) -> Tensor:
        settings = copy(self.settings)
        if self.tokens.limit is not None:
            settings.max_new_tokens = min(settings.max_new_tokens, self.tokens.limit - batch.shape[2])
        fields = self.tokens.named(batch.to(device_of(self.model)))
        # What a model that continues a text does not take.
        fields.pop("token_type_ids", None)
        return self.model.generate(**fields, generation_config=settings).cpu()

    def _text(self, row: Tensor) -> str:
        """The text up to the end token; what follows pads it to the longest text of the batch."""
        ends = torch.isin(row, torch.tensor(_ends_of(self.settings))).nonzero()
        kept = row[: int(ends[0])] if len(ends) else row
        return self.tokens.tokenizer.decode(kept, skip_special_tokens=True)


def _ends_of(settings: Any) -> list[int]:
    end = settings.eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)


def _settings(model: Any, folder: Path, tokenizer: Any, max_new_tokens: int | None) -> Any:
    """generation_config.json without sampling and beam search."""
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(folder)
    except OSError:
        found = copy(model.generation_config)
    found.max_new_tokens = max_new_tokens or found.max_new_tokens or NEW_TOKENS
    found.update(do_sample=False, num_beams=1, num_return_sequences=1, max_length=None, min_length=None)
    found.update(temperature=None, top_p=None, top_k=None)
    if found.pad_token_id is None:
        first = next(iter(_ends_of(found)), None)
        found.pad_token_id = first if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return found


def grouped(
    inputs: Sequence[Tensor], group: Group, answer: Callable[[Sequence[Tensor], int], Iterable[Prediction]]
) -> list[Prediction]:
    """Predictions in input order; inputs of one group are predicted together."""
    numbers: Mapping[int, list[int]] = defaultdict(list)
    for number, rows in enumerate(inputs):
        numbers[group(rows)].append(number)
    found = {
        number: prediction
        for size, members in numbers.items()
        for number, prediction in zip(members, answer([inputs[n] for n in members], size), strict=True)
    }
    return [found[number] for number in range(len(inputs))]
