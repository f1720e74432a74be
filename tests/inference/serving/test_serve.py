"""The service as its users meet it: a real server process on loopback, real image files, real HTTP."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from pathlib import Path

import httpx
import psutil
import pytest
import uvicorn
from click.testing import CliRunner
from fastapi import FastAPI
from PIL import Image

from inference.batch import __main__ as batch
from inference.serving.__main__ import create_app
from inference.serving.__main__ import main as serve_command
from inference.serving.settings import MAX_UPLOAD_BYTES, bind, listen
from tests.inference.conftest import CKPT_TOOLS_SERVE, SERVE, Service, running_service
from tests.inference.tiny_models import save_text_model

ROOT = Path(__file__).parents[3]


PREDICT = "/predict?model=m"


def post(client: httpx.Client, data: bytes, name: str = "image.png") -> httpx.Response:
    return client.post(PREDICT, files={"image": (name, data)})


def test_health(client):
    response = client.get("/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_a_posted_image_gets_the_answer_of_the_batch_script(client, forms, image_folder, tmp_path):
    out = tmp_path / "batch.jsonl"
    CliRunner().invoke(batch.main, [f"--model={forms / 'model.pt'}", f"--input={image_folder}", f"--output={out}"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    # Four requests at a time: the answers must not depend on the company either.
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda row: post(client, (image_folder / row["name"]).read_bytes()).json(), rows))
    assert answers == [{"label": row["label"], "probabilities": row["probabilities"]} for row in rows]


def test_other_formats_sizes_and_colours_are_taken(client, image_folder):
    with Image.open(image_folder / "000.png") as image:
        large = image.convert("RGB").resize((280, 280), Image.Resampling.NEAREST)
    data = io.BytesIO()
    large.save(data, "BMP")
    answer = post(client, data.getvalue(), "image.bmp").json()
    assert sum(answer["probabilities"]) == pytest.approx(1)
    assert answer["label"] == answer["probabilities"].index(max(answer["probabilities"]))


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds nothing."""
    chunks = [
        (b"IHDR", struct.pack(">2I5B", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"")),
        (b"IEND", b""),
    ]
    framed = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "image.png is not an image file that can be read"),
        (b"hello", "image.png is not an image file that can be read"),
        (png_header(28, 28), "image.png is a damaged image file"),
        (png_header(10_000, 10_000), "image.png has 10000x10000 pixels"),
        (png_header(60_000, 60_000), "image.png unpacks to too many pixels"),
    ],
)
def test_a_bad_image_is_the_clients_error(client, data, sentence):
    response = post(client, data)
    assert response.status_code == 400
    assert response.json()["detail"].startswith(sentence)


def test_a_truncated_image_is_the_clients_error(client, image_folder):
    response = post(client, (image_folder / "001.png").read_bytes()[:120])
    assert response.status_code == 400
    assert "damaged" in response.json()["detail"]


def test_an_upload_has_a_limit(client):
    response = post(client, bytes(MAX_UPLOAD_BYTES + 1))
    assert (response.status_code, response.json()) == (413, {"detail": "the image is larger than 16 MiB"})


@pytest.mark.parametrize("files", [None, {"picture": b"x"}])
def test_a_request_without_an_image_is_told_how(client, files):
    response = client.post(PREDICT, files=files)
    assert response.status_code == 422
    assert "form field named image" in response.json()["detail"]


# --- what is posted


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ([("image", ("a.png", b"x")), ("image", ("b.png", b"y"))], "the form has 2 fields named image"),
        ([("image", ("a.png", b"x")), ("picture", ("b.png", b"y"))], "the form has the unknown field 'picture'"),
        ([("image", ("a.png", b"x")), ("top_k", (None, b"3"))], "the form has the unknown field 'top_k'"),
        ([("image", (None, b"text"))], "post the image as the one file of a multipart form field named image"),
    ],
)
def test_a_form_that_holds_anything_else_is_refused(client, fields, sentence):
    response = client.post(PREDICT, files=fields)
    assert response.status_code == 422
    assert response.json()["detail"].startswith(sentence)
    assert "form field named image" in response.json()["detail"]


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data", "multipart/form-data; boundary=x"])
def test_a_body_that_is_not_a_form_is_refused(client, content_type):
    response = client.post(PREDICT, content=b"{}", headers={"Content-Type": content_type})
    assert response.status_code in {400, 422}
    assert "form field named image" in response.json()["detail"]


def test_a_damaged_form_is_refused_and_fills_no_log(client, service):
    before, headers = service.log.read_text(), {"Content-Type": "multipart/form-data; boundary=edge"}
    for body in (BEGINNING[1:], BEGINNING + b"x\r\n--edge", BEGINNING.replace(b"\r\n", b"\n")):
        assert client.post(PREDICT, content=body, headers=headers).status_code in {400, 422}
    assert service.log.read_text() == before


def test_damaged_metadata_of_an_image_fills_no_log(client, service):
    before, file = service.log.read_text(), io.BytesIO()
    Image.new("L", (28, 28)).save(file, "TIFF")
    for place in (4, 9, 14, 26, 27):
        damaged = bytearray(file.getvalue())
        damaged[place] = 255
        answer = client.post(PREDICT, files={"image": ("a.tiff", bytes(damaged))})
        assert answer.status_code in {200, 400}
    assert service.log.read_text() == before


def test_the_form_is_described(client):
    described = client.get("/openapi.json").json()["paths"]["/predict"]["post"]["requestBody"]
    assert {*described["content"]["multipart/form-data"]["schema"]["properties"]} == {"image", "text"}


BEGINNING = b'--edge\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
END = b"\r\n--edge--\r\n"


def request_head(*headers: str) -> bytes:
    form = "Content-Type: multipart/form-data; boundary=edge"
    return "\r\n".join([f"POST {PREDICT} HTTP/1.1", "Host: localhost", form, *headers, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def send_until_refused(connection: socket.socket, data: bytes, times: int) -> int:
    """How many bytes the other side took before it closed the connection or all was sent."""
    sent = 0
    try:
        for _ in range(times):
            connection.sendall(data)
            sent += len(data)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return sent


def read_to_end(connection: socket.socket) -> bytes:
    """All that comes until the other side closes: head and body of an answer are packets of their own."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def files_in(folder: Path, process: int) -> list[str]:
    """What a process holds open in a folder, also what has no name there any more."""
    links = [link.readlink() for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()]
    return [str(link) for link in links if link.is_relative_to(folder)]


MEGABYTE = bytes(2**20)


@pytest.mark.parametrize("is_chunked", [True, False], ids=["chunked", "with its length"])
def test_a_large_body_is_refused_while_it_arrives(service, is_chunked):
    before = psutil.Process(service.process.pid).memory_info().rss
    head = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {200 * 2**20}"
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
        connection.sendall(request_head(head) + (chunk(BEGINNING) if is_chunked else BEGINNING))
        sent = send_until_refused(connection, chunk(MEGABYTE) if is_chunked else MEGABYTE, 200)
        answer = connection.recv(65536)
    # The kernel's buffers of both sides take some megabytes more than the service reads.
    assert sent < (40 if is_chunked else 24) * 2**20
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()
    assert psutil.Process(service.process.pid).memory_info().rss - before < 64 * 2**20
    assert list(service.temporary.iterdir()) == []


@pytest.mark.parametrize("path", ["/predict", "/v2/models/model.safetensors/infer", "/v2/repository/index"])
def test_a_gigabyte_is_refused_before_it_is_sent(service, client, path):
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2**30}\r\n\r\n".encode())
        received = read_to_end(connection)
    assert received.startswith(b"HTTP/1.1 413 ")
    body = json.loads(received.partition(b"\r\n\r\n")[2])
    assert list(body) == ["detail" if path == "/predict" else "error"]
    assert client.get("/healthz").status_code == 200


def test_a_large_body_of_declared_length_is_refused_before_it_is_sent(service):
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
        connection.sendall(request_head(f"Content-Length: {200 * 2**20}", "Expect: 100-continue"))
        received = read_to_end(connection)
    assert received.startswith(b"HTTP/1.1 413 ")
    assert received.endswith(b'{"detail":"the image is larger than 16 MiB"}')


def test_an_allowed_body_is_kept_in_memory(service):
    """It is looked at when 12 MB of it are there, and no end."""
    body = BEGINNING + 12 * MEGABYTE
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
        connection.sendall(request_head(f"Content-Length: {len(body) + len(END)}") + body)
        wait_until(lambda: unread_bytes(connection) == 0)
        open_files = files_in(service.temporary, service.process.pid)
        connection.sendall(END)
        answer = connection.recv(65536)
    assert open_files == []
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert list(service.temporary.iterdir()) == []


def unread_bytes(connection: socket.socket) -> int:
    """What was sent and the other process has not read yet, by its queue in the kernel's table."""
    mine, its = connection.getsockname()[1], connection.getpeername()[1]
    total = 0
    for line in chain.from_iterable(table.read_text().splitlines()[1:] for table in Path("/proc/net").glob("tcp*")):
        fields = line.split()
        ports = tuple(int(field.rpartition(":")[2], 16) for field in fields[1:3])
        sending, receiving = (int(part, 16) for part in fields[4].split(":"))
        total += {(mine, its): sending, (its, mine): receiving}.get(ports, 0)
    return total


def wait_until(holds: object, seconds: float = 60) -> None:
    assert callable(holds)
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_client_that_goes_away_leaves_no_traceback(service, client):
    before = service.log.read_text()
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
        connection.sendall(request_head("Content-Length: 5000") + BEGINNING)
    assert client.get("/healthz").status_code == 200
    assert service.log.read_text() == before


# --- the address


def run_serve(*args: object) -> subprocess.CompletedProcess[str]:
    """A start that is refused, in this process."""
    done = CliRunner().invoke(serve_command, list(map(str, args)))
    return subprocess.CompletedProcess(list(map(str, args)), done.exit_code, done.stdout, done.stderr)


@pytest.mark.parametrize("name", ["predict", pytest.param("serve", marks=pytest.mark.extended)])
def test_a_configuration_that_makes_no_sense_is_one_sentence(name, tmp_path):
    folder = save_text_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 0}))
    (tmp_path / "x.txt").write_text("good")
    words = {"predict": [f"--input={tmp_path / 'x.txt'}", f"--output={tmp_path / 'x.jsonl'}"], "serve": ["--port=0"]}
    command = {"predict": batch.main, "serve": serve_command}[name]
    done = CliRunner().invoke(command, ["--model", str(folder), *words[name]])
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (
        4,
        f"Error: {folder / 'config.json'} is not usable: num_attention_heads is 0, and not a number from 1",
    )
    assert "Traceback" not in done.stderr


def test_a_bad_model_stops_the_start(tmp_path):
    done = run_serve(tmp_path / "none.pt")
    assert done.returncode == 3
    assert done.stderr == f"Error: there is no file or folder {tmp_path / 'none.pt'}\n"


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (["--port=99999"], 2, "Error: --port is a number from 0 to 65535, not 99999\n"),
        (["--port=-1"], 2, "Error: --port is a number from 0 to 65535, not -1\n"),
        (["--host=no-such-host.invalid"], 5, "Error: the host no-such-host.invalid cannot be found ("),
        (["--host=" + "a" * 70], 5, "Error: the host " + "a" * 70 + " cannot be found ("),
        (["--host=192.0.2.1", "--port=0"], 5, "Error: cannot listen on host 192.0.2.1, port 0: "),
    ],
)
def test_a_bad_address_is_one_sentence(args, code, sentence, forms):
    done = run_serve(forms / "model.pt", *args)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--runner=ray", "--grpc-port=0"], "--grpc-port does not go with --runner ray: Ray's proxy speaks HTTP"),
        (["--runner=ray", "--quiet-time=5"], "--quiet-time needs --watch"),
        (["--runner=ray", "--drain=5"], "--drain does not go with --runner ray"),
        (["--runner=ray", "--model-control=explicit"], "--model-control does not go with --runner ray"),
        (["--runner=ray", "--access-log"], "--access-log does not go with --runner ray"),
        (["--runner=ray", "--replicas=0"], "there has to be at least one replica"),
        (["--runner=ray", "--replicas=2", "--max-replicas=3"], "--replicas is a fixed number"),
        (["--runner=ray", "--min-replicas=2"], "--min-replicas needs --max-replicas"),
        (["--runner=ray", "--min-replicas=3", "--max-replicas=2"], "--max-replicas may not be below --min-replicas"),
        (["--replicas=2"], "--replicas, --min-replicas and --max-replicas are for --runner ray"),
    ],
)
def test_options_that_do_not_fit_are_refused(words, sentence, forms):
    done = run_serve(forms / "model.safetensors", *words)
    assert (done.returncode, sentence in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr


def test_a_second_service_on_the_same_port_is_refused(service, forms):
    done = run_serve(forms / "model.pt", f"--port={service.port}")
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == (
        f"Error: cannot listen on host 127.0.0.1, port {service.port}: Address already in use; "
        "try another --port or --host\n"
    )


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("localhost", "localhost")])
def test_an_accepted_connection_sends_at_once(host, shown):
    with bind(host, 0) as listening:
        url = listen(listening, host)
        assert url == f"http://{shown}:{listening.getsockname()[1]}"
        with socket.create_connection(listening.getsockname()[:2]):
            accepted, _ = listening.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_kept_alive_connection_is_answered_as_fast_as_by_uvicorn_alone(client, forms):
    """Without TCP_NODELAY each answer takes 40 ms more, 80 times as long; both are asked in turn."""
    with plain_uvicorn(forms / "model.pt") as plain, httpx.Client(base_url=plain, timeout=60) as other:
        seconds: dict[httpx.Client, list[float]] = {client: [], other: []}
        for each in [client, other] * 25:
            begun = time.perf_counter()
            assert each.get("/healthz").status_code == 200
            seconds[each].append(time.perf_counter() - begun)
    assert statistics.median(seconds[client]) < 5 * statistics.median(seconds[other]), seconds


def plain_uvicorn(model: Path) -> AbstractContextManager[str]:
    """The same application as uvicorn serves it by itself, in a thread of this process."""
    return plain_uvicorn_of(create_app(model))


@contextmanager
def plain_uvicorn_of(app: FastAPI) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


# --- the end


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.extended),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.soak),
    ],
)
def test_a_signal_ends_the_service_after_the_requests_in_flight(number, code, forms, image_folder, tmp_path):
    """One client waits on a kept-alive connection, which is closed while another still sends the rest of its request.

    The log would have a second line if anybody had been waited for until the limit.
    """
    body = BEGINNING + (image_folder / "000.png").read_bytes() + END
    with running_service(tmp_path / "serve", None, f"--model=m={forms / 'model.pt'}") as service:
        address = ("127.0.0.1", service.port)
        with (
            socket.create_connection(address, timeout=60) as idle,
            socket.create_connection(address, timeout=60) as connection,
        ):
            idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert idle.recv(65536).startswith(b"HTTP/1.1 200 ")
            connection.sendall(request_head(f"Content-Length: {len(body)}") + body[:100])
            wait_until(lambda: unread_bytes(connection) == 0)
            service.process.send_signal(number)
            read_to_end(idle)
            wait_until(lambda: not is_listening(service.port))
            connection.sendall(body[100:])
            answer = read_to_end(connection)
        assert service.process.wait(60) == code
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"label":' in answer
    assert service.log.read_text() == f"stopped by {number.name}\n"
    assert list(service.temporary.iterdir()) == []


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.extended
def test_a_client_that_hangs_does_not_hold_the_end(forms, tmp_path):
    """Of both commands, which wait beside each other. One is on IPv6, prints an address that works, and has one
    child."""
    with ExitStack() as held:
        services = [
            held.enter_context(
                running_service(
                    tmp_path / module[-1], None, f"--model=m={forms / 'model.pt'}", "--host", host, module=module
                )
            )
            for module, host in ((SERVE, "::1"), (CKPT_TOOLS_SERVE, "127.0.0.1"))
        ]
        assert services[0].url == f"http://[::1]:{services[0].port}"
        assert httpx.get(f"{services[0].url}/healthz").status_code == 200
        (models,) = psutil.Process(services[0].process.pid).children(recursive=True)
        assert "inference.serving.processes.model_process" in models.cmdline()
        clients = [held.enter_context(hanging_client(service)) for service in services]
        for service in services:
            service.process.terminate()
        for service, client in zip(services, clients, strict=True):
            assert client.recv(65536).startswith(b"HTTP/1.1 503 ")
            assert service.process.wait(60) == 143
            assert service.log.read_text().endswith("stopped by SIGTERM\n")


def hanging_client(service: Service) -> socket.socket:
    connection = socket.create_connection((httpx.URL(service.url).host, service.port), timeout=60)
    connection.sendall(request_head("Content-Length: 5000") + BEGINNING)
    wait_until(lambda: unread_bytes(connection) == 0)
    return connection


def test_a_signal_while_the_model_is_loaded_is_one_sentence(forms):
    """The port is bound, and nobody listens on it yet, when the signal comes."""
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "inference.serving", str(forms / "model.pt"), f"--port={port}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: is_bound(port))
        process.terminate()
        assert process.communicate(timeout=60) == ("", "stopped by SIGTERM\n")
    assert process.returncode == 143


ATTEMPTS = 20
"""Starts of a command; the imports of one may be over before it is looked at."""


@pytest.mark.parametrize("module", ["inference.serving", "inference.batch", "inference.demo", "training"])
def test_ctrl_c_during_imports_is_the_end(module, tmp_path):
    """At once and without a traceback; there is nothing to clean up yet."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", module]
    for _ in range(ATTEMPTS):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as process:
            is_interrupted = interrupt_during_imports(process)
            said = process.communicate(timeout=60)[1]
        if is_interrupted:
            break
    assert (is_interrupted, process.returncode, said) == (True, -signal.SIGINT, "")


def interrupt_during_imports(process: subprocess.Popen[str]) -> bool:
    """Send SIGINT while the process imports; it is stopped for the look at it. False if it ended first."""
    while process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        is_importing = process.poll() is None and is_killed_by_interrupts(process.pid)
        if is_importing:
            process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        if is_importing:
            return True
        time.sleep(0.002)
    return False


def is_killed_by_interrupts(pid: int) -> bool:
    """Python has set up its signals, so that SIGPIPE is ignored, and nobody takes SIGINT."""
    status = Path(f"/proc/{pid}/status").read_text()
    ignored, taken = (int(re.findall(rf"{name}:\t(\w+)", status)[0], 16) for name in ("SigIgn", "SigCgt"))
    return bool(ignored & 1 << signal.SIGPIPE - 1) and not taken & 1 << signal.SIGINT - 1


def is_bound(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
