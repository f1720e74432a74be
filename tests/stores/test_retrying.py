"""The policy of trying again, without a store."""

from __future__ import annotations

import pytest

from ckpt_tools.errors import StoreError
from ckpt_tools.stores.retry import RetryPolicy, TransientError, is_transient, retried

pytestmark = pytest.mark.quick


class Failing:
    """Fails that often, then gives its number."""

    def __init__(self, times: int, error: Exception | None = None) -> None:
        self.times, self.calls = times, 0
        self.error = error or TransientError(StoreError("busy", path="f"))

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return self.calls


@pytest.mark.parametrize("times", [0, 1, 3])
def test_the_first_success_counts(times):
    call, waits = Failing(times), []
    policy = RetryPolicy(attempts=4, base_seconds=1.0, cap_seconds=3.0)
    assert retried(call, policy, sleep=waits.append, fraction=lambda: 0.5) == times + 1
    assert waits == [0.5, 1.0, 1.5][:times]


def test_the_last_failure_is_raised_as_what_it_means():
    call = Failing(9)
    with pytest.raises(StoreError, match="busy"):
        retried(call, RetryPolicy(attempts=3), sleep=lambda _: None)
    assert call.calls == 3


def test_other_errors_end_it_at_once():
    call = Failing(9, StoreError("refused"))
    with pytest.raises(StoreError, match="refused"):
        retried(call, RetryPolicy(), sleep=lambda _: None)
    assert call.calls == 1


@pytest.mark.parametrize("failures", [1, 2, 10, 10_000])
def test_waits_are_jittered_over_all_of_a_growing_interval(failures):
    policy = RetryPolicy(attempts=5, base_seconds=0.5, cap_seconds=8.0)
    longest = min(8.0, 0.5 * 2 ** min(failures - 1, 64))
    assert policy.wait_seconds(failures, 0.0) == 0.0
    assert policy.wait_seconds(failures, 0.25) == longest / 4
    assert policy.wait_seconds(failures, 0.999) < longest


@pytest.mark.parametrize(("attempts", "base", "cap"), [(0, 1.0, 1.0), (1, -1.0, 1.0), (1, 2.0, 1.0)])
def test_a_policy_that_makes_no_sense(attempts, base, cap):
    with pytest.raises(ValueError):
        RetryPolicy(attempts, base, cap)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (503, "SlowDown", True),
        (500, "", True),
        (429, "", True),
        (409, "ConditionalRequestConflict", True),
        (400, "RequestTimeout", True),
        (400, "BadDigest", True),
        (200, "InternalError", True),
        (400, "InvalidPart", False),
        (403, "AccessDenied", False),
        (404, "NoSuchKey", False),
        (412, "PreconditionFailed", False),
        (416, "InvalidRange", False),
        (501, "NotImplemented", False),
    ],
)
def test_what_is_worth_another_attempt(status, code, expected):
    assert is_transient(status, code) == expected
