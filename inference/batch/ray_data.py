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
from .inputs import Part
from .job import Job
from .pipeline import AHEAD, predict_items, window_size
from .rows import Row

if TYPE_CHECKING:
    import numpy as np

READ_CPUS = 0.1
"""CPUs of a reading task, which mostly waits. More would keep readers and models waiting for each other."""

WINDOWS = 2 * (AHEAD + 1)  # windows per batch of an actor, which decodes ahead within a batch


class Worker:
    """Ray Data actor with a model of its own."""

    def __init__(self, job: Job, digest: str) -> None:
        self.predictor = job.load_predictor()
        if self.predictor.identity.digest != digest:
            raise FormatError(f"{job.model} has other weights on another machine, or was replaced meanwhile")

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list[bytes]]:
        items = (pickle.loads(each) for each in batch["item"])  # noqa: S301  # our own, from reading below
        return {"row": [pickle.dumps(row) for rows in predict_items(items, self.predictor) for row in rows]}


def items_of(row: dict[str, bytes]) -> Iterator[dict[str, bytes]]:
    part: Part = pickle.loads(row["part"])  # noqa: S301  # our own
    for item in part.items():
        yield {"item": pickle.dumps(item)}


def predict_on_ray(
    parts: Sequence[Part], job: Job, predictor: Predictor, workers: int | None
) -> Generator[list[Row], None, None]:
    """Rows in the order of the input. ``predictor`` is the model on this machine, which gives the batch size. Raises
    the CkptError of the first failing worker."""
    if not parts:
        return
    with launchers.cluster((workers or 1) * (job.threads or 1) + 1):
        rows, size = _iterate_rows(parts, job, predictor, workers), window_size(predictor)
        try:
            while window := list(islice(rows, size)):
                yield window
        except CkptError:
            raise
        except Exception as error:
            raise _find_ckpt_error(error) from error


def _iterate_rows(parts: Sequence[Part], job: Job, predictor: Predictor, workers: int | None) -> Iterator[Row]:
    import ray.data

    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    # Ours is the only progress that a user is to see.
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    threads = job.threads or 1
    resources = ray.cluster_resources()
    on_gpu = (job.options.device or "cpu").startswith("cuda")
    fitting = int(resources.get("GPU", 0)) if on_gpu else int((resources.get("CPU", 1) - 1) // threads)
    packed = [{"part": pickle.dumps(part)} for part in parts]
    found = (
        ray.data.from_items(packed, override_num_blocks=len(packed))
        .flat_map(items_of, num_cpus=READ_CPUS)
        .map_batches(
            Worker,
            fn_constructor_args=(job, predictor.identity.digest),
            batch_size=WINDOWS * window_size(predictor),
            concurrency=workers or max(1, fitting),
            num_cpus=threads,
            num_gpus=1 if on_gpu else None,
        )
    )
    for each in found.iter_rows():
        yield pickle.loads(each["row"])  # noqa: S301  # our own


def _find_ckpt_error(error: Exception) -> Exception:
    """The ``CkptError`` that a worker raised, unwrapped from Ray's errors."""
    seen: Any = error
    while seen is not None:
        cause = getattr(seen, "cause", None)
        if isinstance(cause, CkptError):
            return cause
        seen = seen.__cause__
    return error
