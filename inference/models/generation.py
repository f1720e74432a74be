"""Generation of one text by a language model: the request, and the text as its tokens come; without torch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from ckpt_tools.errors import FormatError

from .task import TOKEN_BYTES

REPLACEMENT_CHARACTER = "\ufffd"

Chat = tuple[Mapping[str, str], ...]
"""Messages, each with ``role`` and ``content``."""

TextCallback = Callable[[str], None]
"""Called after each token, and before long work, with the text that is certain since the last call, or none. What it
raises ends the generation."""


@dataclass(frozen=True, slots=True)
class NumberLimits:
    """Allowed values of a number: ``low`` to ``high``, and ``others``."""

    low: float
    high: float
    is_whole: bool = True
    others: tuple[float, ...] = ()

    def check(self, name: str, value: object) -> None:
        """Raises FormatError."""
        kinds = {int} if self.is_whole else {int, float}
        if type(value) in kinds and (value in self.others or self.low <= value <= self.high):  # type: ignore[operator]
            return
        others = "".join(f"{other:g} or " for other in self.others)
        kind = "a whole number" if self.is_whole else "a number"
        raise FormatError(f"{name} is {repr(value)[:60]}; it has to be {others}{kind} from {self.low} to {self.high}")


LIMITS: Mapping[str, NumberLimits] = {
    "max_tokens": NumberLimits(1, 1_000_000),
    # Nearer to 0, a division by it overflows float32.
    "temperature": NumberLimits(0.01, 100, is_whole=False, others=(0,)),
    "top_p": NumberLimits(1e-6, 1, is_whole=False),
    "top_k": NumberLimits(1, 2**31 - 1),
    "seed": NumberLimits(0, 2**63 - 1),
    "repetition_penalty": NumberLimits(0.01, 100, is_whole=False),
}

MAX_STOPS, MAX_STOP_LENGTH = 16, 256
SAMPLING_NAMES = ("top_p", "top_k", "seed")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one text. Raises FormatError for values out of range.

    Without ``temperature`` each token is the most probable one, and 0 is the same. The text ends before
    the first of the texts in ``stop``. If ``is_streamed``, it is given as it grows, else once it is whole.
    """

    prompt: str | Chat
    is_streamed: bool = False
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        for name, limits in LIMITS.items():
            if (value := getattr(self, name)) is not None:
                limits.check(name, value)
                object.__setattr__(self, name, value if limits.is_whole else float(value))
        stops = [isinstance(each, str) and 0 < len(each) <= MAX_STOP_LENGTH for each in self.stop]
        if len(stops) > MAX_STOPS or not all(stops):
            raise FormatError(f"stop has to be up to {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters")
        unused = [name for name in SAMPLING_NAMES if getattr(self, name) is not None]
        if self.temperature is None and unused:
            raise FormatError(f"{unused[0]} is for sampling, which needs a temperature too")

    @property
    def num_bytes(self) -> int:
        """Bytes of the prompt in UTF-8. A message has at least one token."""
        if isinstance(self.prompt, str):
            return len(self.prompt.encode())
        return sum(TOKEN_BYTES + sum(len(text.encode()) for text in each.values()) for each in self.prompt)


@runtime_checkable
class GenerativeTask(Protocol):
    """A task of a language model."""

    def generate(self, request: GenerationRequest, give: TextCallback) -> None:
        """Generate a text. Raises FormatError if the model does not take the prompt."""


def generate_text(task: object, request: GenerationRequest, give: TextCallback) -> None:
    """Generate a text with any task. Raises FormatError if its model generates no text, or as ``GenerativeTask``."""
    if not isinstance(task, GenerativeTask):
        raise FormatError("the model does not generate text")
    task.generate(request, give)


class EndOfTextError(Exception):
    """The text is complete before its number of tokens is reached."""


@dataclass(slots=True)
class GrowingText:
    """The text of the tokens so far. ``give`` gets the parts that later tokens cannot change.

    ``decode`` gives the text of all tokens. Text is held back while it may be the beginning of a stop text or end
    within a character. ``is_byte`` says that a token is one byte of a character, and ``num_loose`` is how many
    characters at the end a tokenizer may change when others follow.
    """

    request: GenerationRequest
    decode: Callable[[Sequence[int]], str]
    give: TextCallback
    is_byte: Callable[[int], bool] = lambda _: False
    num_loose: int = 0
    tokens: list[int] = field(default_factory=list)
    _given: str = ""

    def add_token(self, token: int) -> None:
        """Raises EndOfTextError at a stop text."""
        self.tokens.append(token)
        text = self._decode_certain()
        if self._find_end(text) < len(text):
            raise EndOfTextError
        num_certain = len(text) - measure_stop_overlap(text, self.request.stop)
        self._give_until(text[:num_certain] if self.request.is_streamed else "")

    def finish(self) -> None:
        """Give the rest, up to a stop text."""
        text = self.decode(self.tokens)
        self._give_until(text[: self._find_end(text)])

    def _decode_certain(self) -> str:
        num_whole = len(self.tokens)
        while num_whole and self.is_byte(self.tokens[num_whole - 1]):
            num_whole -= 1
        text = self.decode(self.tokens[:num_whole])
        text = text[: max(0, len(text) - self.num_loose)]
        return text.removesuffix(REPLACEMENT_CHARACTER)

    def _find_end(self, text: str) -> int:
        starts = [text.find(each) for each in self.request.stop]
        return min((start for start in starts if start >= 0), default=len(text))

    def _give_until(self, text: str) -> None:
        if not text.startswith(self._given):
            raise RuntimeError(f"the tokenizer changed {self._given[-40:]!r}, which was given already")
        piece, self._given = text[len(self._given) :], text
        self.give(piece)


def measure_stop_overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins one of ``stops``."""
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)


class FairLock:
    """A lock that threads get in the order in which they asked for it. If ``is_shared``, a generation passes it on
    after each forward pass, so that others wait for one pass of it at a time; else it keeps it to its end."""

    def __init__(self, *, is_shared: bool = True) -> None:
        self.is_shared = is_shared
        self._lock = threading.Lock()
        self._waiting = deque[threading.Event]()
        self._is_taken = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        turn.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_taken = False

    @contextmanager
    def pass_on(self) -> Iterator[None]:
        """Others may have the lock within the block, if it is shared."""
        if not self.is_shared:
            yield
            return
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


def parse_messages(value: Any) -> Chat:
    """Check messages in JSON. Raises FormatError."""
    if not isinstance(value, list) or not value:
        raise FormatError("messages has to be a list with at least one message")
    for number, each in enumerate(value):
        if not isinstance(each, dict) or set(each) != {"role", "content"}:
            raise FormatError(f"message {number} has to be an object with role and content, and nothing else")
        if not all(isinstance(text, str) for text in each.values()):
            raise FormatError(f"the role and the content of message {number} have to be texts")
    return tuple(value)
