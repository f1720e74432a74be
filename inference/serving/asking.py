"""From a request to the answers of a model: the queue, the deadline, the client that leaves, and what is counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from ckpt_tools.errors import FormatError

from ..models.predictor import Prediction
from .batching import QueueFullError
from .refusals import RETRY_AFTER, Refused
from .repository import NotReadyError, Repository, UnknownModelError, Version

LOG = logging.getLogger(__name__)


@contextmanager
def held(repository: Repository, noted: MutableMapping[str, str], name: str, number: str | None) -> Iterator[Version]:
    """The version that answers a request, which is counted there and ``noted`` for the log. Raises ``Refused`` 404 if
    there is none."""
    try:
        with repository.hold(name, number) as version:
            noted.update(model=name, version=str(version.number))
            with counted(version):
                yield version
    except (UnknownModelError, NotReadyError) as error:
        raise Refused(404, str(error)) from error


@contextmanager
def counted(version: Version) -> Iterator[None]:
    begun = time.perf_counter()
    try:
        yield
    except BaseException as error:
        version.statistics.failed(_reason(error), time.perf_counter() - begun)
        raise
    version.statistics.succeeded(time.perf_counter() - begun)


def _reason(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "CANCELED"
    status = error.status if isinstance(error, Refused) else 500
    return {503: "REJECTED", 504: "REJECTED", 500: "BACKEND"}.get(status, "OTHER")


async def predictions(version: Version, items: Sequence[Tensor], seconds: float) -> list[Prediction]:
    """The answer for each item.

    Raises:
        Refused: 503 if too many wait already, 504 if the model takes longer than ``seconds``, 400 if it does not take
            such items, 500 if it fails.
    """
    try:
        async with asyncio.timeout(seconds):
            return await version.batcher.submit_all(items)
    except QueueFullError as error:
        most = version.batcher.max_waiting
        raise Refused(503, f"{most} inputs wait for the model, which is the limit; try again", RETRY_AFTER) from error
    except TimeoutError as error:
        raise Refused(504, f"the model did not answer within {seconds:g} seconds") from error
    except FormatError as error:
        raise Refused(400, error.message) from error
    except Exception as error:
        LOG.error("the model %s, version %d, failed", version.name, version.number, exc_info=error)
        raise Refused(500, "the model failed on this request; the log of the service says why") from error
