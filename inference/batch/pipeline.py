"""From items to rows, in the order of the input: threads decode ahead while the model predicts.

Some windows of inputs are decoded ahead, so memory does not grow with the input.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from ckpt_tools.errors import CkptError, FormatError, StoreError

from ..common.errors import describe_error
from ..common.garbage_collection import collect_rarely
from ..models.predictor import Predictor
from ..models.results import BYTES, ModelInput, Prediction
from .items import InputItem, PixelContent, read_content
from .rows import OutputRow, is_finite

WINDOWS_AHEAD = 3  # windows decoded ahead of the one being predicted
WINDOW_PASSES = 16  # forward passes of a window: enough for small costs per window, and for several texts of one length
WINDOW_BYTES = 4 << 20  # limit of a window of large inputs, which then has fewer passes
NUM_READERS = 8  # decoding threads: more than processors, because reading from a store mostly waits
DecodedItem = tuple[InputItem, ModelInput | str, int | None]


@dataclass(frozen=True, slots=True)
class ClassNumbers:
    """Maps a true label of the input to the number of its class."""

    labels: tuple[str, ...] | None
    num_classes: int

    def find_number(self, value: str | int | None) -> int | None:
        """Number of the class, None for an empty cell. Raises FormatError if there is no such class."""
        if value is None or value == "":
            return None
        number = self.labels.index(str(value)) if self.labels and str(value) in self.labels else _parse_number(value)
        if number is None or not 0 <= number < self.num_classes:
            raise FormatError(f"its true label {value!r} is not a class of the model")
        return number


def _parse_number(value: str | int) -> int | None:
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def find_class_numbers(predictor: Predictor) -> ClassNumbers:
    """Those of a classifier; other models have no classes."""
    num_classes = next((spec.shape[1] for spec in predictor.outputs if spec.name == "probabilities"), 0)
    return ClassNumbers(predictor.labels, num_classes)


def takes_texts(predictor: Predictor) -> bool:
    return predictor.inputs[0].datatype == BYTES


def choose_window_size(predictor: Predictor) -> int:
    row_bytes = predictor.inputs[0].row_bytes
    fitting = WINDOW_PASSES if row_bytes is None else WINDOW_BYTES // (row_bytes * predictor.max_batch)
    return predictor.max_batch * max(1, min(WINDOW_PASSES, fitting))


def predict_items(
    items: Iterable[InputItem], predictor: Predictor, *, readers: int = NUM_READERS
) -> Generator[list[OutputRow], None, None]:
    """Rows in the order of ``items``, a window at a time."""
    pool = ThreadPoolExecutor(readers, thread_name_prefix="decode")
    try:
        with collect_rarely():
            for window in _decode_ahead(pool, items, predictor, readers):
                yield predict_window(window, predictor)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _decode_ahead(
    pool: ThreadPoolExecutor, items: Iterable[InputItem], predictor: Predictor, readers: int
) -> Iterator[list[DecodedItem]]:
    remaining, size = iter(items), choose_window_size(predictor)
    started: deque[list[Future[list[DecodedItem]]]] = deque()
    while window := list(islice(remaining, size)):
        are_ready = all(isinstance(item.content, PixelContent) for item in window)
        if not are_ready:
            started.append(_start_decoding(pool, window, predictor, readers))
        while len(started) > (0 if are_ready else WINDOWS_AHEAD):
            yield _finish_decoding(started.popleft())
        if are_ready:
            # Another thread would only take the interpreter from the model.
            yield decode_items(window, predictor)
    while started:
        yield _finish_decoding(started.popleft())


def _start_decoding(
    pool: ThreadPoolExecutor, window: Sequence[InputItem], predictor: Predictor, readers: int
) -> list[Future[list[DecodedItem]]]:
    """Each thread decodes several items: submitting each alone would cost as much as decoding a small image."""
    size = -(-len(window) // readers)
    return [pool.submit(decode_items, window[start : start + size], predictor) for start in range(0, len(window), size)]


def _finish_decoding(futures: Iterable[Future[list[DecodedItem]]]) -> list[DecodedItem]:
    return [each for future in futures for each in future.result()]


def decode_items(items: Sequence[InputItem], predictor: Predictor) -> list[DecodedItem]:
    numbers = find_class_numbers(predictor)
    return [_decode_item(item, predictor, numbers) for item in items]


def _decode_item(item: InputItem, predictor: Predictor, numbers: ClassNumbers) -> DecodedItem:
    truth = None
    try:
        truth = numbers.find_number(item.truth)
        if isinstance(item.content, PixelContent) and _is_input(item.content, predictor):
            return item, item.content.values, truth
        data, name = read_content(item, takes_texts=takes_texts(predictor))
        return item, predictor.decode(data, name), truth
    except Exception as error:
        return item, _describe_failure(error, "it cannot be decoded"), truth


def _describe_failure(error: Exception, what: str) -> str:
    """Why an input has no prediction. Raises ``error`` if it is not of this input alone, but of a store or a device."""
    if isinstance(error, StoreError):
        raise error
    if type(error).__name__ == "AcceleratorError":
        # Of torch: the device takes no more work of this process.
        raise StoreError(f"the device failed ({describe_error(error)})") from error
    return escape_undecodable(
        str(error) if isinstance(error, CkptError) else f"{what} ({type(error).__name__}: {describe_error(error)})"
    )


def _is_input(pixels: PixelContent, predictor: Predictor) -> bool:
    """Whether the model takes the pixels without preparation."""
    reading = predictor.task.reading
    return reading is not None and reading.is_input and pixels.values.shape == predictor.inputs[0].shape[1:]


def predict_window(window: Sequence[DecodedItem], predictor: Predictor) -> list[OutputRow]:
    """Rows with predictions, or with the error of an input that could not be decoded or predicted."""
    predictions = iter(_predict_each([each for _, each, _ in window if not isinstance(each, str)], predictor))
    return [
        _make_row(item, truth, each if isinstance(each, str) else next(predictions)) for item, each, truth in window
    ]


def _predict_each(inputs: Sequence[ModelInput], predictor: Predictor) -> list[Prediction | str]:
    """A prediction for each input, or why the model failed on it alone."""
    try:
        return [*predictor.predict(inputs)]
    except Exception as error:
        reason = _describe_failure(error, "the model failed on it")
    if len(inputs) == 1:
        return [reason]
    half = len(inputs) // 2
    return [*_predict_each(inputs[:half], predictor), *_predict_each(inputs[half:], predictor)]


def _make_row(item: InputItem, truth: int | None, answer: Prediction | str) -> OutputRow:
    name = escape_undecodable(item.name)
    if isinstance(answer, Prediction) and is_finite(answer):
        return OutputRow(name, answer, truth, None, item.fraction)
    error = answer if isinstance(answer, str) else "the model's answer is not a finite number"
    return OutputRow(name, None, truth, error, item.fraction)


def predict_all(items: Iterable[InputItem], predictor: Predictor) -> list[OutputRow]:
    return [row for rows in predict_items(items, predictor) for row in rows]


def escape_undecodable(name: str) -> str:
    """``name`` with bytes that are not UTF-8, which JSON and Parquet cannot hold, as escapes."""
    if name.isascii():
        return name
    try:
        return os.fsencode(name).decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        # Half of a surrogate pair, which JSON can hold.
        return name.encode("utf-8", "backslashreplace").decode()
