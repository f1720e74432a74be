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
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from ckpt_tools.errors import FormatError

from ..common.errors import translate_file_errors
from .generation import Chat, EndOfTextError, FairLock, GenerationRequest, GrowingText, TextCallback
from .passes import BatchedTask, ForwardPasses
from .positions import count_known_tokens, list_position_limits
from .prediction import (
    Activation,
    TokenSampler,
    choose_activation,
    classify_logits,
    find_device,
    make_embeddings,
    read_config_labels,
)
from .results import BATCH, BYTES, Array, Columns, ModelInput, TensorSpec, make_text_column, predict_by_group
from .task import check_inputs, check_labels, choose_max_bytes, decode_text, list_classifier_outputs

LENGTH_STEP = 16  # classified texts are padded to a multiple of it, by their own length, not by others in the batch
NEW_TOKENS = 64  # default of new tokens without ``max_new_tokens`` in generation_config.json
MASK = "attention_mask"
GENERATION = "generation_config.json"
VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", "vocab.txt", "vocab.bpe"})

BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # of SentencePiece: one byte of a character without a token
NUM_CLEANED = 8  # more than the characters that a tokenizer's clean_up_tokenization changes at once


@dataclass(frozen=True, slots=True, eq=False)
class ModelTokenizer:
    """Tokenizes texts by the tokenizer of transformers that is ``wrapped``. ``limit`` is the most tokens that the model
    takes, and ``num_known`` the number of tokens that it knows; None if it does not say so."""

    wrapped: Any
    fields: tuple[str, ...]
    limit: int | None
    num_known: int | None = None

    @classmethod
    def from_folder(cls, model: Any, folder: Path) -> ModelTokenizer:
        """The tokenizer in ``folder``. Raises FormatError if there is none."""
        import transformers

        if not any(file.name in VOCABULARIES or file.suffix == ".model" for file in folder.iterdir()):
            # transformers would make an empty one.
            raise FormatError("there is no usable tokenizer beside the weights (no file with its vocabulary)")
        with translate_file_errors("there is no usable tokenizer beside the weights"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            fields = tuple(tokenizer("a" if len(tokenizer) else "").keys())
            candidates = (getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length)
            # A tokenizer that states no length has 10**30 there.
            limits = [int(each) for each in candidates if isinstance(each, int) and 0 < each < 10**9]
            limit = min([*limits, *list_position_limits(model, fields)], default=None)
            return cls(tokenizer, fields, limit, count_known_tokens(model))

    def tokenize(self, data: bytes, name: str) -> Array:
        """Tokenize a text. Raises FormatError if not UTF-8, no tokens, too many for the model, or not known to it."""
        text = decode_text(data, name)
        with translate_file_errors(f"{name} cannot be tokenized"):
            return self._check_tokens(self.wrapped(text, verbose=False), name)

    def tokenize_chat(self, messages: Chat) -> Array:
        """Tokens of messages by the tokenizer's chat template, up to where an answer begins. The template runs in the
        sandbox of transformers. Raises FormatError if there is no template or it fails, and as :meth:`tokenize`."""
        if not getattr(self.wrapped, "chat_template", None):
            raise FormatError("the model's tokenizer has no chat template, so it takes text_input, and no messages")
        quiet = {"verbose": False}
        with translate_file_errors("the chat template does not take these messages"):
            encoded = self.wrapped.apply_chat_template(
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
        if self.num_known is not None and largest >= self.num_known:
            raise FormatError(f"{name} has the token {largest:,}; the model knows those below {self.num_known:,}")
        return rows

    @property
    def padding(self) -> int | None:
        """The token that texts are padded with. One that was added for training may be unknown to the model."""
        token: int | None = self.wrapped.pad_token_id
        return token if token is None or self.num_known is None or token < self.num_known else None

    @property
    def has_padding(self) -> bool:
        """Whether a text may be padded. Without a mask the model would take the padding for a part of it."""
        return self.padding is not None and MASK in self.fields

    def to_arguments(self, batch: Tensor) -> dict[str, Tensor]:
        """int64 [n, fields, tokens] as arguments by field name."""
        return {field: batch[:, number] for number, field in enumerate(self.fields)}

    def check_rows(self, inputs: Sequence[ModelInput]) -> None:
        check_inputs(inputs, np.int64, (len(self.fields), BATCH))

    def draw_rows(self, num_rows: int, length: int) -> Tensor:
        """Inputs of random tokens without padding, int64 [num_rows, fields, length]."""
        bound = min(len(self.wrapped), self.num_known or 1)
        ids = torch.randint(bound, (num_rows, length), generator=torch.Generator().manual_seed(0))
        values = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return torch.stack([values.get(field, torch.zeros_like(ids)) for field in self.fields], 1)

    def start_text(self, request: GenerationRequest, give: TextCallback) -> GrowingText:
        """A text that grows by tokens."""

        def decode(tokens: Sequence[int]) -> str:
            text: str = self.wrapped.decode(tokens, skip_special_tokens=True)
            return text

        def is_byte(token: int) -> bool:
            return BYTE_TOKEN.fullmatch(self.wrapped.convert_ids_to_tokens(token) or "") is not None

        return GrowingText(
            request, decode, give, is_byte, NUM_CLEANED if self.wrapped.clean_up_tokenization_spaces else 0
        )

    def pad_row(self, rows: Array, length: int) -> Array:
        """One input, padded at its end with the tokenizer's padding."""
        encoded = {field: rows[number].tolist() for number, field in enumerate(self.fields)}
        padded = self.wrapped.pad(encoded, padding="max_length", max_length=length, padding_side="right")
        return np.array([padded[field] for field in self.fields], np.int64)


class TextTask(BatchedTask):
    """A task that takes texts."""

    __slots__ = ()

    tokenizer: ModelTokenizer
    inputs: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("text", BYTES, (BATCH,)),)

    @property
    def max_bytes(self) -> int:
        return choose_max_bytes(self.tokenizer.limit)


@dataclass(frozen=True, slots=True, eq=False)
class TextClassifier(TextTask):
    """Classifies texts. Without a padding token or attention mask, one text at a time."""

    model: Any
    tokenizer: ModelTokenizer
    labels: tuple[str, ...] | None
    passes: ForwardPasses
    activation: Activation = "softmax"
    num_features: int | None = None

    def __post_init__(self) -> None:
        check_labels(self.labels, self.model.config.num_labels)

    @classmethod
    def from_folder(cls, model: Any, folder: Path, labels: tuple[str, ...] | None, passes: ForwardPasses) -> Self:
        tokenizer = ModelTokenizer.from_folder(model, folder)
        if not tokenizer.has_padding or model.config.pad_token_id is None:
            passes = replace(passes, full_size=1)
        labels = labels or read_config_labels(model.config)
        return cls(model, tokenizer, labels, passes, choose_activation(model.config))

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return list_classifier_outputs(self.model.config.num_labels, self.num_features)

    def decode(self, data: bytes, name: str) -> Array:
        return self.tokenizer.tokenize(data, name)

    def predict(self, inputs: Sequence[ModelInput]) -> Columns:
        self.tokenizer.check_rows(inputs)
        return predict_by_group(inputs, self._choose_padded_length, self._predict_group)

    def _choose_padded_length(self, rows: Array) -> int:
        length = rows.shape[1]
        if self.max_batch == 1:
            return length
        return min(-(-length // LENGTH_STEP) * LENGTH_STEP, self.tokenizer.limit or length + LENGTH_STEP)

    def _predict_group(self, inputs: Sequence[Array], length: int) -> Columns:
        batch = np.stack([self.tokenizer.pad_row(rows, length) if rows.shape[1] < length else rows for rows in inputs])
        logits = self.passes.run(
            torch.from_numpy(batch), self._forward, lambda num_rows: self.tokenizer.draw_rows(num_rows, length)
        )
        return classify_logits(logits, self.activation) if self.num_features is None else make_embeddings(logits)

    @torch.inference_mode()
    def _forward(self, batch: Tensor) -> Tensor:
        return self.model(**self.tokenizer.to_arguments(batch.to(find_device(self.model)))).logits.float().cpu()


@dataclass(frozen=True, slots=True, eq=False)
class TokenGenerator(TextTask):
    """Continues texts with the most probable token each time; texts of one length share a batch."""

    model: Any
    tokenizer: ModelTokenizer
    settings: Any
    passes: ForwardPasses
    turns: FairLock = field(default_factory=FairLock)

    outputs: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("text", BYTES, (BATCH,)),)
    labels: ClassVar[None] = None

    @classmethod
    def from_folder(cls, model: Any, folder: Path, passes: ForwardPasses, *, max_new_tokens: int | None) -> Self:
        tokenizer = ModelTokenizer.from_folder(model, folder)
        settings = _read_generation_settings(model, folder, tokenizer.padding, max_new_tokens)
        return cls(model, tokenizer, settings, passes, FairLock(is_shared=_can_alternate(model, settings)))

    def decode(self, data: bytes, name: str) -> Array:
        return self._check_room(self.tokenizer.tokenize(data, name), name)

    def _check_room(self, rows: Array, name: str) -> Array:
        if rows.shape[1] == self.tokenizer.limit:
            raise FormatError(f"{name} has {rows.shape[1]:,} tokens, which is all that the model takes")
        return rows

    def generate(self, request: GenerationRequest, give: TextCallback) -> None:
        """Generate a text by ``generate`` of transformers, with forward passes of one row. Raises FormatError if the
        model or the chat template does not take the prompt."""
        if isinstance(request.prompt, str):
            rows = self.decode(request.prompt.encode(), "text_input")
        else:
            rows = self._check_room(self.tokenizer.tokenize_chat(request.prompt), "the chat")
        options = {"max_new_tokens": request.max_tokens, "repetition_penalty": request.repetition_penalty}
        changes = {name: value for name, value in options.items() if value is not None}
        sampler = TokenSampler.from_request(request, find_device(self.model))
        text = self.tokenizer.start_text(request, give)
        streamer = _Streamer(self.turns, lambda: give(""), text.add_token, frozenset(_list_end_tokens(self.settings)))
        with suppress(EndOfTextError):
            self._run_generate(torch.from_numpy(rows[None]), streamer, () if sampler is None else (sampler,), **changes)
        text.finish()

    def predict(self, inputs: Sequence[ModelInput]) -> Columns:
        self.tokenizer.check_rows(inputs)
        return predict_by_group(inputs, lambda rows: rows.shape[1], self._predict_group)

    def _predict_group(self, inputs: Sequence[Array], length: int) -> Columns:
        rows = torch.from_numpy(np.stack(inputs))
        chunks = self.passes.split_rows(
            rows, self._compute_first_logits, lambda num_rows: self.tokenizer.draw_rows(num_rows, length)
        )
        sequences = [row for chunk, num_kept in chunks for row in self._run_generate(chunk).sequences[:num_kept].cpu()]
        return {"text": make_text_column([self._decode_text(row[length:]) for row in sequences])}

    def _compute_first_logits(self, batch: Tensor) -> Tensor:
        """Logits of the first two new tokens, float [n, 2, values]: of a pass over the text, and of one token."""
        answer = self._run_generate(batch, max_new_tokens=2, min_new_tokens=2, output_logits=True)
        return torch.stack(answer.logits, 1)

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
        if self.tokenizer.limit is not None:
            settings.max_new_tokens = min(settings.max_new_tokens, self.tokenizer.limit - batch.shape[2])
        settings.min_new_tokens = min(settings.min_new_tokens or 0, settings.max_new_tokens)
        fields = self.tokenizer.to_arguments(batch.to(find_device(self.model)))
        # What a model that continues a text does not take.
        fields.pop("token_type_ids", None)
        streamer = streamer or _Streamer(self.turns)
        with self.turns:
            return self.model.generate(
                **fields, generation_config=settings, streamer=streamer, logits_processor=list(logits_processor)
            )

    def _decode_text(self, row: Tensor) -> str:
        """The text up to the end token; what follows pads it to the longest text of the batch."""
        ends = torch.isin(row, torch.tensor(_list_end_tokens(self.settings))).nonzero()
        tokens = row[: int(ends[0])] if len(ends) else row
        return self.tokenizer.wrapped.decode(tokens, skip_special_tokens=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Streamer:
    """A streamer of ``generate`` of transformers. It calls ``begin`` before the first forward pass. After each it
    passes the turn on, and adds the token of the first row to a text. Raises EndOfTextError at one of ``ends``."""

    turns: FairLock
    begin: Callable[[], None] = lambda: None
    add_token: Callable[[int], None] = lambda _: None
    ends: frozenset[int] = frozenset()

    def put(self, tokens: Tensor) -> None:
        if tokens.ndim > 1:  # the prompt
            self.begin()
            return
        with self.turns.pass_on():
            if (token := int(tokens[0])) in self.ends:
                raise EndOfTextError
            self.add_token(token)

    def end(self) -> None:
        pass


def _can_alternate(model: Any, settings: Any) -> bool:
    """Whether generations may take turns. transformers keeps some caches in the model, and on a GPU it changes how the
    model computes its experts for as long as it generates."""
    has_experts = any("Expert" in type(module).__name__ for module in model.modules())
    return settings.cache_implementation in (None, "dynamic") and not (has_experts and find_device(model).type != "cpu")


def _list_end_tokens(settings: Any) -> list[int]:
    end = settings.eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)


def _read_generation_settings(model: Any, folder: Path, padding: int | None, max_new_tokens: int | None) -> Any:
    """generation_config.json without sampling and beam search. Raises FormatError."""
    from transformers import GenerationConfig

    settings = copy(model.generation_config)
    if (folder / GENERATION).is_file():
        with translate_file_errors(f"{folder / GENERATION} is not usable"):
            settings = GenerationConfig.from_pretrained(folder)
    settings.max_new_tokens = max_new_tokens or settings.max_new_tokens or NEW_TOKENS
    settings.update(do_sample=False, num_beams=1, num_return_sequences=1, max_length=None, min_length=None)
    settings.update(temperature=None, top_p=None, top_k=None)
    if settings.pad_token_id is None:
        settings.pad_token_id = next(iter(_list_end_tokens(settings)), None) if padding is None else padding
    return settings
