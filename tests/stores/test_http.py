"""What a server of files answers, and what is said of it: nothing there is 3, no or a bad answer is 5."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.cli import reporting
from ckpt_tools.errors import StoreError
from ckpt_tools.messages.progress import log_warning
from ckpt_tools.stores.fsspec import store as fsspec_store
from ckpt_tools.stores.retry import RetryPolicy
from tests.cli.terminals import shown
from tests.support.commands import run_command

NO_PORT = "http://127.0.0.1:9"
"""The port of the service discard, which nobody runs."""


@dataclass
class Server:
    """Sends ``data`` at ``/m.safetensors``; ``statuses`` are answered first, one a request."""

    port: int
    data: bytes
    status: int = 0
    num_failing: int = 1 << 30
    sends_ranges: bool = True
    hangs_up: bool = False

    def url(self, path: str = "m.safetensors") -> str:
        return f"http://127.0.0.1:{self.port}/{path}"


@contextmanager
def serving(data: bytes) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Quietly."""

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            if served.hangs_up:
                self.close_connection = True
                return
            if served.status and served.num_failing > 0:
                served.num_failing -= 1
                self.send_error(served.status)
                return
            if not self.path.startswith("/m.safetensors"):
                self.send_error(404)
                return
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            start, stop = (int(asked[1]), int(asked[2]) + 1) if asked and served.sends_ranges else (0, len(served.data))
            body = served.data[start:stop]
            self.send_response(206 if asked and served.sends_ranges else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Server(server.server_address[1], data)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("http")
    torch.save({"w": torch.arange(300_000, dtype=torch.float32)}, folder / "m.pt")
    ckpt_tools.convert(folder / "m.pt", folder / "m.safetensors")
    return (folder / "m.safetensors").read_bytes()


@pytest.fixture
def server(data):
    with serving(data) as served:
        yield served


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(fsspec_store, "_POLICY", RetryPolicy(attempts=4, base_seconds=0.01, cap_seconds=0.02))


def said_of(url: str, *more: str, code: int = 5) -> list[str]:
    """The lines on stderr of ``inspect --json``, whose stdout stays empty, and which ends with this code."""
    done = run_command("inspect", url, "--json", *more)
    assert (done.code, done.out) == (code, ""), done.err
    return done.err.splitlines()


def test_a_file_is_read(server, tmp_path):
    assert ckpt_tools.inspect(server.url()).num_parameters == 300_000
    ckpt_tools.convert(server.url(), tmp_path / "m.pt")
    assert torch.equal(torch.load(tmp_path / "m.pt")["w"], torch.arange(300_000, dtype=torch.float32))


def test_a_refused_connection_and_an_unknown_host():
    lines = said_of(f"{NO_PORT}/x")
    assert lines[0] == "no answer from 127.0.0.1:9 yet; trying again (2 of 4)"
    assert lines[-1].startswith("Error: http://127.0.0.1:9/x: no answer from 127.0.0.1:9: ")
    assert len(said_of(f"{NO_PORT}/x", "--quiet")) == 1
    assert "hidden" not in "\n".join(said_of("http://me:hidden@127.0.0.1:9/x?X-Amz-Signature=hidden"))
    (*_, last) = said_of("https://no-such-host.invalid/x")
    assert "no-such-host.invalid" in last and "no file or folder" not in last


def test_a_file_that_is_not_there(server):
    assert said_of(server.url("nothing"), code=3) == [f"Error: there is no file or folder {server.url('nothing')}"]


@pytest.mark.parametrize("status", [403, 401])
def test_a_refusal(status, server):
    server.status = status
    (line,) = said_of(server.url())
    assert "access was refused" in line and str(status) in line


@pytest.mark.parametrize("status", [500, pytest.param(503, marks=pytest.mark.extended)])
def test_a_server_that_fails(status, server):
    server.status = status
    lines = said_of(server.url())
    assert lines[0] == f"127.0.0.1:{server.port} answers {status}; trying again (2 of 4)"
    assert f"answers {status}" in lines[-1]


def test_a_server_that_hangs_up(server):
    server.hangs_up = True
    assert "no answer from" in said_of(server.url())[-1]


def test_a_server_that_recovers(server, caplog):
    """Retries are logged from any thread."""
    server.status, server.num_failing = 503, 4
    assert ckpt_tools.inspect(server.url()).num_parameters == 300_000
    assert caplog.messages[0] == f"127.0.0.1:{server.port} answers 503; trying again (2 of 4)"


def test_a_server_without_ranges(server, tmp_path):
    server.sends_ranges = False
    with pytest.raises(StoreError, match=r"sends the whole file where a part is asked for.*download the file first"):
        ckpt_tools.convert(server.url(), tmp_path / "m.pt")


def test_lines_about_retries_are_few(monkeypatch, capsys):
    with reporting.log_to_stderr(quiet=False):
        for _ in range(100):
            log_warning("stores", "again")
        assert capsys.readouterr().err == "again\n"
        monkeypatch.setattr(reporting, "WARNING_INTERVAL_SECONDS", 0)
        log_warning("stores", "again")
        assert capsys.readouterr().err == "again\n"


@pytest.mark.extended
def test_a_bar_is_not_broken_by_a_line(tmp_path):
    """On a terminal: the line stands alone, the bar is drawn again below it and gone in the end."""
    given = [f"endpoint_url={NO_PORT}", "key=a", "secret=b", "retries=3"]
    options = [word for each in given for word in ("--storage-option", each)]
    code, text = shown("convert", "s3://bucket/m", tmp_path / "x.pt", *options, columns=100)
    assert code == 5
    # A line as it stands in the end: what was erased before is gone, codes for colours and the cursor are no text.
    rows = [row.split("\x1b[2K")[-1] for row in text.split("\n")]
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", row).rstrip() for row in rows]
    assert "no answer from 127.0.0.1:9 yet; trying again (2 of 4)" in lines
    assert any(line.startswith("Error: s3://bucket/m: no answer from") for line in lines)
