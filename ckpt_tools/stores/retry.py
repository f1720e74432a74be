"""Retries: which failures are worth another attempt, and how long to wait before it. Pure.

A failure is transient where the same request may well succeed a moment later: the service is overloaded, a connection
broke, a body ended early. Waits grow exponentially and are drawn from the whole interval ("full jitter"), so that
clients that failed together do not return together. A request that is repeated must be harmless when done twice.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckpt_tools.errors import CkptError
from ckpt_tools.messages.progress import log_warning
from ckpt_tools.process.credentials import mask_raised_errors, mask_secrets

Result = TypeVar("Result")

TRANSIENT_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""409 is what S3 answers where two requests met at one key; it asks for the later one to be sent again."""

TRANSIENT_CODES = frozenset(
    {
        *("SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded", "BandwidthLimit"),
        *("InternalError", "ServiceUnavailable", "RequestTimeout", "RequestTimeoutException"),
        *("OperationAborted", "ConditionalRequestConflict"),
        *("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"),
    }
)
"""Error codes of S3 and compatible services for those failures, and for bodies that arrived damaged."""


class TransientError(Exception):
    """Another attempt may succeed; ``error`` is raised if none does, ``trouble`` describes the failure until then."""

    def __init__(self, error: CkptError, trouble: str = "no answer from the store yet") -> None:
        super().__init__(str(error))
        self.error = error
        self.trouble = trouble


def host_of(url: str) -> str:
    """The host and port of a URL, without the credentials that it may hold."""
    return mask_secrets(url).partition("://")[2].partition("/")[0].rpartition("@")[2] or "the store"


def is_transient(status: int, code: str) -> bool:
    """True if an HTTP status and an error code are worth another attempt."""
    return status in TRANSIENT_STATUSES or code in TRANSIENT_CODES


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most ``attempts`` in all, and waits of up to ``base_seconds``, twice that, ... ``cap_seconds`` between them.

    The defaults give up after 16 s of waiting on average: a service that sheds load recovers within seconds, and a
    rerun that resumes loses nothing.
    """

    attempts: int = 10
    base_seconds: float = 0.1
    cap_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.base_seconds < 0 or self.cap_seconds < self.base_seconds:
            raise ValueError(f"{self} is not valid")

    def wait_seconds(self, num_failures: int, jitter: float) -> float:
        """Seconds to wait after so many failures; ``jitter``, from ``[0, 1)``, is the share of the longest wait."""
        doublings = min(num_failures - 1, 64)
        return float(min(self.cap_seconds, self.base_seconds * 2**doublings) * jitter)


def retry_transient(
    call: Callable[[], Result],
    policy: RetryPolicy,
    *,
    sleep: Callable[[float], None] = time.sleep,
    draw_jitter: Callable[[], float] = random.random,
) -> Result:
    """Result of the first attempt of ``call`` without a ``TransientError``. Failed attempts are logged as warnings.

    Raises:
        CkptError: the last attempt's, where all failed. Whatever else ``call`` raises ends it at once.
    """
    num_failures = 0
    with mask_raised_errors():
        while True:
            try:
                return call()
            except TransientError as failure:
                num_failures += 1
                if num_failures == policy.attempts:
                    raise failure.error from failure
                log_warning("stores", f"{failure.trouble}; trying again ({num_failures + 1} of {policy.attempts})")
                sleep(policy.wait_seconds(num_failures, draw_jitter()))
