"""The policy of trying again, without a store."""

import pytest

from ckpt_tools.errors import StoreError
from ckpt_tools.stores.retry import RetryPolicy, TransientError, is_transient, retry_transient

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
    assert retry_transient(call, policy, sleep=waits.append, draw_jitter=lambda: 0.5) == times + 1
    assert waits == [0.5, 1.0, 1.5][:times]


@pytest.mark.parametrize(
    ("error", "said", "calls"), [(None, "busy", 3), (StoreError("refused"), "refused", 1)], ids=["busy", "refused"]
)
def test_the_last_failure_is_raised_as_what_it_means_and_others_end_it_at_once(error, said, calls):
    call = Failing(9, error)
    with pytest.raises(StoreError, match=said):
        retry_transient(call, RetryPolicy(attempts=3), sleep=lambda _: None)
    assert call.calls == calls


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


WORTH = {429: "", 500: "", 503: "SlowDown", 409: "ConditionalRequestConflict", 200: "InternalError"}
NOT_WORTH = {400: "InvalidPart", 403: "AccessDenied", 404: "NoSuchKey", 412: "PreconditionFailed", 416: "InvalidRange"}


def test_what_is_worth_another_attempt():
    worth = [*WORTH.items(), (400, "RequestTimeout"), (400, "BadDigest")]
    assert [each for each in worth if not is_transient(*each)] == []
    assert [each for each in [*NOT_WORTH.items(), (501, "NotImplemented")] if is_transient(*each)] == []
