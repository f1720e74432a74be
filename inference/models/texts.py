"""Text models of transformers: classifiers and causal language models.

An input is int64 [fields, tokens]: a row for each field that the tokenizer gives and the model takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ckpt_tools.errors import FormatError

from ..common.errors import translate_file_errors
from .generation import Chat, EndOfTextError, FairLock, Generation, Give, GrowingText
from .passes import InPasses, Passes
from .positions import num_positions, num_words
from .prediction import (
    Activation,
    TokenSampler,
    activation_of,
    classify_logits,
    device_of,
    embeddings_of,
    labels_of_config,
)
from .results import BATCH, BYTES, Array, Columns, ModelInput, TensorSpec, predict_by_group, text_column
from .task import check_inputs, check_labels, classifier_outputs, max_bytes_of, text_of

BUCKET = 16  # classified texts are padded to a multiple of it, by their own length, not by others in the batch
NEW_TOKENS = 64  # default of new tokens without ``max_new_tokens`` in generation_config.json
MASK = "attention_mask"
GENERATION = "generation_config.json"
VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", "vocab.txt", "vocab.bpe"})

BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # of SentencePiece: one byte of a character without a token
CLEANED = 8  # more than the characters that a tokenizer's clean_up_tokenization changes at once


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Tokenizes texts. ``limit`` is the most tokens that the model takes, and ``num_words`` the number of tokens that
    it knows; None if it does not say so."""

    tokenizer: Any
    fields: tuple[str, ...]
    limit: int | None
    num_words: int | None = None

    @classmethod
    def from_folder(cls, model: Any, folder: Path) -> Tokens:
        """The tokenizer in ``folder``. Raises FormatError if there is none."""
        import transformers

        if not any(file.name in VOCABULARIES or file.suffix == ".model" for file in folder.iterdir()):
            # transformers would make an empty one.
            raise FormatError("there is no usable tokenizer beside the weights (no file with its vocabulary)")
        with translate_file_errors("there is no usable tokenizer beside the weights"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            fields = tuple(tokenizer("a" if len(tokenizer) else "").keys())
            stated = (getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length)
            # A tokenizer that states no length has 10**30 there.
            limits = [int(each) for each in stated if isinstance(each, int) and 0 < each < 10**9]
            limit = min([*limits, *num_positions(model, fields)], default=None)
            return cls(tokenizer, fields, limit, num_words(model))

    def tokenize(self, data: bytes, name: str) -> Array:
        """Tokenize a text. Raises FormatError if not UTF-8, no tokens, too many for the model, or not known to it."""
        text = text_of(data, name)
        with translate_file_errors(f"{name} cannot be tokenized"):
            return self._check_tokens(self.tokenizer(text, verbose=False), name)

    def tokenize_chat(self, messages: Chat) -> Array:
        """Tokens of messages by the tokenizer's chat template, up to where an answer begins. The template runs in the
        sandbox of transformers. Raises FormatError if there is no template or it fails, and as :meth:`of`."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise FormatError("the model's tokenizer has no chat template, so it takes text_input, and no messages")
        quiet = {"verbose": False}
        with translate_file_errors("the chat template does not take these messages"):
            encoded = self.tokenizer.apply_chat_template(
                [dict(each) for each in messages], add_generation_prompt=True, return_dict=True, tokenizer_kwargs=quiet
            )
        return self._check_tokens(encoded, "the chat")

    def _check_tokens(self, encoded: Mapping[str, Sequence[int]], name: str) -> Array:
        rows = np.array([encoded[field] for field in self.fields], np.int64)
        num_tokens = rows.shape[1]
        if not num_tokens:
            raise FormatError(f"{name} is an empty text")
        if self.limit is not None and num_tokens > self.limit:
            raise FormatError(f"{name} has {num_tokens:,} tokens; the model takes at most {self.limit:,}")
        largest = int(rows[self.fields.index("input_ids")].max())
        if self.num_words is not None and largest >= self.num_words:
            raise FormatError(f"{name} has the token {largest:,}; the model knows those below {self.num_words:,}")
        return rows

    @property
    def padding(self) -> int | None:
        """The token that texts are padded with. One that was added for training may be unknown to the model."""
        found: int | None = self.tokenizer.pad_token_id
        return found if found is None or self.num_words is None or found < self.num_words else None

    @property
    def has_padding(self) -> bool:
        """Whether a text may be padded. Without a mask the model would take the padding for a part of it."""
        return self.padding is not None and MASK in self.fields

    def to_arguments(self, batch: Tensor) -> dict[str, Tensor]:
        """int64 [n, fields, tokens] as arguments by field name."""
        return {field: batch[:, number] for number, field in enumerate(self.fields)}

    def check_rows(self, inputs: Sequence[ModelInput]) -> None:
        check_inputs(inputs, np.int64, (len(self.fields), BATCH))

    def random_rows(self, many: int, length: int) -> Tensor:
        """Inputs of random tokens without padding, int64 [many, fields, length]."""
        known = min(len(self.tokenizer), self.num_words or 1)
        ids = torch.randint(known, (many, length), generator=torch.Generator().manual_seed(0))
        values = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return torch.stack([values.get(field, torch.zeros_like(ids)) for field in self.fields], 1)

    def start_text(self, request: Generation, give: Give) -> GrowingText:
        """A text that grows by tokens."""

        def decode(tokens: Sequence[int]) -> str:
            found: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
            return found

        def is_byte(token: int) -> bool:
            return BYTE_TOKEN.fullmatch(self.tokenizer.convert_ids_to_tokens(token) or "") is not None

        return GrowingText(
            request, decode, give, is_byte, CLEANED if self.tokenizer.clean_up_tokenization_spaces else 0
        )

    def pad_row(self, rows: Array, length: int) -> Array:
        """One input, padded at its end with the tokenizer's padding."""
        encoded = {field: rows[number].tolist() for number, field in enumerate(self.fields)}
        found = self.tokenizer.pad(encoded, padding="max_length", max_length=length, padding_side="right")
        return np.array([found[field] for field in self.fields], np.int64)


class TakesTexts(InPasses):
    """The input of a task of texts."""

    __slots__ = ()

    tokens: Tokens
    inputs: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("text", BYTES, (BATCH,)),)

    @property
    def max_bytes(self) -> int:
        return max_bytes_of(self.tokens.limit)


@dataclass(frozen=True, slots=True, eq=False)
class TextLabels(TakesTexts):
    """Classifies texts. Without a padding token or attention mask, one text at a time."""

    model: Any
    tokens: Tokens
    labels: tuple[str, ...] | None
    passes: Passes
    activation: Activation = "softmax"
    num_features: int | None = None

    def __post_init__(self) -> None:
        check_labels(self.labels, self.model.config.num_labels)

    @classmethod
    def from_folder(cls, model: Any, folder: Path, labels: tuple[str, ...] | None, passes: Passes) -> TextLabels:
        tokens = Tokens.from_folder(model, folder)
        if not tokens.has_padding or model.config.pad_token_id is None:
            passes = replace(passes, full=1)
        return cls(model, tokens, labels or labels_of_config(model.config), passes, activation_of(model.config))

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return classifier_outputs(self.model.config.num_labels, self.num_features)

    def decode(self, data: bytes, name: str) -> Array:
        return self.tokens.tokenize(data, name)

    def predict(self, inputs: Sequence[ModelInput]) -> Columns:
        self.tokens.check_rows(inputs)
        return predict_by_group(inputs, self._padded_length, self._predict_group)

    def _padded_length(self, rows: Array) -> int:
        length = rows.shape[1]
        if self.max_batch == 1:
            return length
        return min(-(-length // BUCKET) * BUCKET, self.tokens.limit or length + BUCKET)

    def _predict_group(self, inputs: Sequence[Array], length: int) -> Columns:
        batch = np.stack([self.tokens.pad_row(rows, length) if rows.shape[1] < length else rows for rows in inputs])
        logits = self.passes.run(
            torch.from_numpy(batch), self._forward, lambda many: self.tokens.random_rows(many, length)
        )
        return classify_logits(logits, self.activation) if self.num_features is None else embeddings_of(logits)

    @torch.inference_mode()
    def _forward(self, batch: Tensor) -> Tensor:
        return self.model(**self.tokens.to_arguments(batch.to(device_of(self.model)))).logits.float().cpu()


@dataclass(frozen=True, slots=True, eq=False)
class TextWriter(TakesTexts):
    """Continues texts with the most probable token each time; texts of one length share a batch."""

    model: Any
    tokens: Tokens
    settings: Any
    passes: Passes
    turns: FairLock = field(default_factory=FairLock)

    outputs: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("text", BYTES, (BATCH,)),)
    labels: ClassVar[None] = None

    @classmethod
    def from_folder(cls, model: Any, folder: Path, passes: Passes, *, max_new_tokens: int | None) -> TextWriter:
        tokens = Tokens.from_folder(model, folder)
        settings = _generation_settings(model, folder, tokens.padding, max_new_tokens)
        return cls(model, tokens, settings, passes, FairLock(is_shared=_may_alternate(model, settings)))

    def decode(self, data: bytes, name: str) -> Array:
        return self._with_room(self.tokens.tokenize(data, name), name)

    def _with_room(self, rows: Array, name: str) -> Array:
        if rows.shape[1] == self.tokens.limit:
            raise FormatError(f"{name} has {rows.shape[1]:,} tokens, which is all that the model takes")
        return rows

    def generate(self, request: Generation, give: Give) -> None:
        """Generate a text by ``generate`` of transformers, with forward passes of one row. Raises FormatError if the
        model or the chat template does not take the prompt."""
        if isinstance(request.prompt, str):
            rows = self.decode(request.prompt.encode(), "text_input")
        else:
            rows = self._with_room(self.tokens.tokenize_chat(request.prompt), "the chat")
        stated = {"max_new_tokens": request.max_tokens, "repetition_penalty": request.repetition_penalty}
        changes = {name: value for name, value in stated.items() if value is not None}
        draw, text = TokenSampler.from_request(request, device_of(self.model)), self.tokens.start_text(request, give)
        streamer = _Streamer(self.turns, lambda: give(""), text.add, frozenset(_ends_of(self.settings)))
        with suppress(EndOfTextError):
            self._run_generate(torch.from_numpy(rows[None]), streamer, () if draw is None else (draw,), **changes)
        text.finish()

    def predict(self, inputs: Sequence[ModelInput]) -> Columns:
        self.tokens.check_rows(inputs)
        return predict_by_group(inputs, lambda rows: rows.shape[1], self._predict_group)

    def _predict_group(self, inputs: Sequence[Array], length: int) -> Columns:
        rows = torch.from_numpy(np.stack(inputs))
        chunks = self.passes.split_rows(rows, self._first_logits, lambda many: self.tokens.random_rows(many, length))
        written = [(self._run_generate(chunk).sequences, kept) for chunk, kept in chunks]
        return {
            "text": text_column(
                [self._decode_text(row[length:]) for found, kept in written for row in found[:kept].cpu()]
            )
        }

    def _first_logits(self, batch: Tensor) -> Tensor:
        """Logits of the first two new tokens, float [n, 2, values]: of a pass over the text, and of one token."""
        found = self._run_generate(batch, max_new_tokens=2, min_new_tokens=2, output_logits=True)
        return torch.stack(found.logits, 1)

    @torch.inference_mode()
    def _run_generate(
        self,
        batch: Tensor,
        streamer: _Streamer | None = None,
        logits_processor: Sequence[TokenSampler] = (),
        **changes: Any,
    ) -> Any:
        settings = copy(self.settings)
        settings.update(return_dict_in_generate=True, **changes)
        if self.tokens.limit is not None:
            settings.max_new_tokens = min(settings.max_new_tokens, self.tokens.limit - batch.shape[2])
        settings.min_new_tokens = min(settings.min_new_tokens or 0, settings.max_new_tokens)
        fields = self.tokens.to_arguments(batch.to(device_of(self.model)))
        # What a model that continues a text does not take.
        fields.pop("token_type_ids", None)
        given = streamer or _Streamer(self.turns)
        with self.turns:
            return self.model.generate(
                **fields, generation_config=settings, streamer=given, logits_processor=list(logits_processor)
            )

    def _decode_text(self, row: Tensor) -> str:
        """The text up to the end token; what follows pads it to the longest text of the batch."""
        ends = torch.isin(row, torch.tensor(_ends_of(self.settings))).nonzero()
        kept = row[: int(ends[0])] if len(ends) else row
        return self.tokens.tokenizer.decode(kept, skip_special_tokens=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Streamer:
    """A streamer of ``generate`` of transformers. It calls ``begin`` before the first forward pass. After each it
    passes the turn on, and adds the token of the first row to a text. Raises EndOfTextError at one of ``ends``."""

    turns: FairLock
    begin: Callable[[], None] = lambda: None
    add: Callable[[int], None] = lambda _: None
    ends: frozenset[int] = frozenset()

    def put(self, tokens: Tensor) -> None:
        if tokens.ndim > 1:  # the prompt
            self.begin()
            return
        with self.turns.pass_on():
            if (token := int(tokens[0])) in self.ends:
                raise EndOfTextError
            self.add(token)

    def end(self) -> None:
        pass


def _may_alternate(model: Any, settings: Any) -> bool:
    """Whether generations may take turns. transformers keeps some caches in the model, and on a GPU it changes how the
    model computes its experts for as long as it generates."""
    has_experts = any("Expert" in type(module).__name__ for module in model.modules())
    return settings.cache_implementation in (None, "dynamic") and not (has_experts and device_of(model).type != "cpu")


def _ends_of(settings: Any) -> list[int]:
    end = settings.eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)


def _generation_settings(model: Any, folder: Path, padding: int | None, max_new_tokens: int | None) -> Any:
    """generation_config.json without sampling and beam search. Raises FormatError."""
    from transformers import GenerationConfig

    found = copy(model.generation_config)
    if (folder / GENERATION).is_file():
        with translate_file_errors(f"{folder / GENERATION} is not usable"):
            found = GenerationConfig.from_pretrained(folder)
    found.max_new_tokens = max_new_tokens or found.max_new_tokens or NEW_TOKENS
    found.update(do_sample=False, num_beams=1, num_return_sequences=1, max_length=None, min_length=None)
    found.update(temperature=None, top_p=None, top_k=None)
    if found.pad_token_id is None:
        found.pad_token_id = next(iter(_ends_of(found)), None) if padding is None else padding
    return found
