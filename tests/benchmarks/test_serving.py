"""What `make bench` measures of the service: its clients count what comes, and its tables come from the journal."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.inference import KIND, SERVE, reported
from benchmarks.journal import Journal
from benchmarks.load import put_on, request, written
from benchmarks.serving import JSON, LOOP, Turn

STATUS = {b"good": 200, b"bad": 503}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(STATUS[body])
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def asking(body: bytes) -> bytes:
    return request("/", body, "text/plain")


def test_the_clients_count_answers_that_are_whole(port: int) -> None:
    found = put_on(port, [asking(b"good")], 4, 0.5)
    assert 0 < len(found.seconds) <= found.asked
    assert found.answers == {0: b"good".hex()}
    assert all(0 < each < found.ended - found.began + 2 for each in found.seconds)


def test_an_answer_that_is_an_error_ends_the_measurement(port: int, tmp_path: Path) -> None:
    file = written([asking(b"good"), asking(b"bad")], tmp_path / "requests")
    command = [sys.executable, "-m", "benchmarks.load", str(port), str(file), "2", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "the service answered HTTP/1.1 503 Service Unavailable\n")


def test_the_table_compares_the_service_round_by_round(tmp_path: Path) -> None:
    rates = {LOOP: (1000, 100), JSON: (900, 90), "LitServe": (300, 30)}
    found = {who: [asdict(Turn(rate, 0.05, 0.08, 0.001, 4 * 10**8)) for rate in each] for who, each in rates.items()}
    journal = Journal(tmp_path / "results.jsonl")
    journal.add({"kind": KIND, "code": "x", "works": [SERVE], "found": found, "missing": ["BentoML"]})
    lines = reported(journal)
    assert "| bare loop | 550 | 0.90 | 0.85 | 50 ms | 80 ms | 1.00 ms | 400 MB |" in lines
    assert "| LitServe | 165 | 3.00 | 1.5 | 50 ms | 80 ms | 1.00 ms | 400 MB |" in lines
    assert "| BentoML: not installed | | | | | | | |" in lines
