"""What `make bench` measures of the service: its clients count what comes, and its tables have the promises."""

from __future__ import annotations

import pytest

from benchmarks.measure import MeasureError
from benchmarks.serving import BINARY, EIGHT, JSON, LOOP, ONE, PNG, ROW, Loaded, Requests, Turn, rows

pytestmark = pytest.mark.extended

SAID = """Running 5s test @ http://127.0.0.1:35583
  1 threads and 64 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency   112.62ms   41.09ms 401.20ms   71.20%
  Latency Distribution
     50%  950.00us
     75%   60.00ms
     90%  101.00ms
     99%    1.25s
  2667 requests in 5.00s, 1.02MB read
{more}Requests/sec:    533.48
Transfer/sec:    208.40KB
"""


def test_what_wrk_says_is_read():
    assert Loaded.of(SAID.format(more="")) == Loaded(2667, 533.48, 0.00095, 1.25)


@pytest.mark.parametrize(
    "more", ["  Non-2xx or 3xx responses: 3\n", "  Socket errors: connect 0, read 2, write 0, timeout 0\n"]
)
def test_an_answer_that_is_an_error_ends_the_measurement(more):
    with pytest.raises(MeasureError, match="not every request was answered: " + more.strip()[:12]):
        Loaded.of(SAID.format(more=more))


def test_any_byte_can_be_asked():
    script = Requests("/p", [bytes([0, 34, 92]), b"a"], {"A": "b"}).script()
    assert script.startswith('local bodies, n = {"\\000\\034\\092","\\097"}, 0\nwrk.method = "POST"\n')
    assert 'wrk.headers["A"] = "b"\n' in script


def test_the_table_compares_the_service_round_by_round():
    rates = {
        LOOP: (1000, 100), ROW: (200, 200), JSON: (900, 90), BINARY: (900, 90), PNG: (500, 50), EIGHT: (400, 40),
        ONE: (100, 10), "LitServe": (300, 30),
    }  # fmt: skip
    lines = rows({who: [Turn(rate, 0.05, 0.08, 0.001, 4 * 10**8) for rate in each] for who, each in rates.items()})
    assert "| bare loop | 550 | 50.0 ms | 80.0 ms | 1.00 ms | 400 MB |" in lines
    assert "| ours, PNG / bare loop | 0.50 | at least 0.6 |" in lines
    assert "| ours, JSON / LitServe | 3.00 | at least 1.5 |" in lines
    assert "| ours, JSON, 8 clients / ours, JSON, 1 client | 4.00 | at least 3 |" in lines
    assert "| p50 of ours, JSON, 1 client | 50.0 ms | at most 103.0 ms |" in lines
    assert "| memory above LitServe's | 0 MB | at most 100 MB |" in lines
