"""Prediction on a Ray cluster with Ray Data: tasks read the input, and actors with a model each predict.

Rows come back in the order of the input and are written by the same writer, so the file is the same as from one
machine, and a stopped run can be resumed with either runner.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from ckpt_tools.errors import CkptError, FormatError

from ..common.training_package import launchers
from ..models.predictor import Predictor
from .inputs import InputPart
from .model_setup import ModelSetup
from .pipeline import WINDOWS_AHEAD, choose_window_size, predict_items
from .rows import OutputRow

if TYPE_CHECKING:
    import numpy as np

READ_CPUS = 0.1
"""CPUs of a reading task, which mostly waits. More would keep readers and models waiting for each other."""

BATCH_WINDOWS = 2 * (WINDOWS_AHEAD + 1)  # windows of a batch of an actor, which decodes ahead within a batch


class PredictingActor:
    """Ray Data actor with a model of its own."""

    def __init__(self, setup: ModelSetup, digest: str) -> None:
        self.predictor = setup.load_predictor()
        if self.predictor.identity.digest != digest:
            raise FormatError(f"{setup.model} has other weights on another machine, or was replaced meanwhile")

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list[bytes]]:
        items = (pickle.loads(each) for each in batch["item"])  # noqa: S301  # our own, from reading below
        return {"row": [pickle.dumps(row) for rows in predict_items(items, self.predictor) for row in rows]}


def unpack_items(row: dict[str, bytes]) -> Iterator[dict[str, bytes]]:
    part: InputPart = pickle.loads(row["part"])  # noqa: S301  # our own
    for item in part.items():
        yield {"item": pickle.dumps(item)}


def predict_on_ray(
    parts: Sequence[InputPart], setup: ModelSetup, predictor: Predictor, workers: int | None
) -> Generator[list[OutputRow], None, None]:
    """Rows in the order of the input. ``predictor`` is the model on this machine, which gives the batch size. Raises
    the CkptError of the first failing worker."""
    if not parts:
        return
    with launchers.cluster((workers or 1) * (setup.threads or 1) + 1):
        rows, size = _iterate_rows(parts, setup, predictor, workers), choose_window_size(predictor)
        try:
            while window := list(islice(rows, size)):
                yield window
        except CkptError:
            raise
        except Exception as error:
            raise _find_ckpt_error(error) from error


def _iterate_rows(
    parts: Sequence[InputPart], setup: ModelSetup, predictor: Predictor, workers: int | None
) -> Iterator[OutputRow]:
    import ray.data

    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    # Ours is the only progress that a user is to see.
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    threads = setup.threads or 1
    resources = ray.cluster_resources()
    on_gpu = (setup.options.device or "cpu").startswith("cuda")
    fitting = int(resources.get("GPU", 0)) if on_gpu else int((resources.get("CPU", 1) - 1) // threads)
    packed = [{"part": pickle.dumps(part)} for part in parts]
    packed_rows = (
        ray.data.from_items(packed, override_num_blocks=len(packed))
        .flat_map(unpack_items, num_cpus=READ_CPUS)
        .map_batches(
            PredictingActor,
            fn_constructor_args=(setup, predictor.identity.digest),
            batch_size=BATCH_WINDOWS * choose_window_size(predictor),
            concurrency=workers or max(1, fitting),
            num_cpus=threads,
            num_gpus=1 if on_gpu else None,
        )
    )
    for each in packed_rows.iter_rows():
        yield pickle.loads(each["row"])  # noqa: S301  # our own


def _find_ckpt_error(error: Exception) -> Exception:
    """The ``CkptError`` that a worker raised, unwrapped from Ray's errors."""
    outer: Any = error
    while outer is not None:
        cause = getattr(outer, "cause", None)
        if isinstance(cause, CkptError):
            return cause
        outer = outer.__cause__
    return error
