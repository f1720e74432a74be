"""Images that are posted as forms, and requests that are large, slow, damaged or abandoned, to a real server."""

import io
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image

from inference.serving.__main__ import create_app
from inference.serving.http import server
from inference.serving.settings import MAX_UPLOAD_BYTES, bind_socket, start_listening
from tests.inference.commands import predicted
from tests.inference.conftest import Service, models_of
from tests.inference.serving.helpers import plain_uvicorn_of, read_to_end, run_serve, wait_until

PREDICT = "/predict?model=m"
UNREADABLE = "image.png is not an image file that can be read"


def post(client: httpx.Client, data: bytes, name: str = "image.png") -> httpx.Response:
    return client.post(PREDICT, files={"image": (name, data)})


def test_a_posted_image_gets_the_answer_of_the_batch_script(client, forms, image_folder, tmp_path):
    """Four requests at a time: the answers must not depend on the company either."""
    rows = predicted(forms / "model.pt", image_folder, tmp_path / "batch.jsonl")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda row: post(client, (image_folder / row["name"]).read_bytes()).json(), rows))
    assert answers == [{"label": row["label"], "probabilities": row["probabilities"]} for row in rows]


def of_image(data: bytes) -> dict[str, Any]:
    return {"files": {"image": ("image.png", data)}}


def of_body(content_type: str) -> dict[str, Any]:
    return {"content": b"{}", "headers": {"Content-Type": content_type}}


IMAGE, OTHER = ("image", ("a.png", b"x")), ("picture", ("b.png", b"y"))


@pytest.mark.parametrize(
    ("asked", "status", "sentence"),
    [
        (of_image(b"hello"), 400, UNREADABLE),
        (of_image(bytes(MAX_UPLOAD_BYTES + 1)), 413, "the image is larger than 16 MiB"),
        ({}, 422, "post the image as the one file of a multipart form field named image"),
        ({"files": [IMAGE, IMAGE]}, 422, "the form has 2 fields named image"),
        ({"files": [IMAGE, OTHER]}, 422, "the form has the unknown field 'picture'"),
        (of_body("application/json"), (400, 422), ""),
        (of_body("multipart/form-data; boundary=x"), (400, 422), ""),
    ],
)
def test_what_is_no_form_with_an_image_is_the_clients_error(client, asked, status, sentence):
    response = client.post(PREDICT, **asked)
    assert response.status_code in (status if isinstance(status, tuple) else (status,))
    assert response.json()["detail"].startswith(sentence)
    assert status in (400, 413) or "form field named image" in response.json()["detail"]


def test_damaged_forms_and_metadata_and_clients_that_go_away_fill_no_log(client, service):
    before, headers = service.log.read_text(), {"Content-Type": "multipart/form-data; boundary=edge"}
    for body in (BEGINNING[1:], BEGINNING + b"x\r\n--edge", BEGINNING.replace(b"\r\n", b"\n")):
        assert client.post(PREDICT, content=body, headers=headers).status_code in {400, 422}
    file = io.BytesIO()
    Image.new("L", (28, 28)).save(file, "TIFF")
    for place in (4, 9, 14, 26, 27):
        damaged = bytearray(file.getvalue())
        damaged[place] = 255
        assert post(client, bytes(damaged), "a.tiff").status_code in {200, 400}
    with connected(service.port) as connection:
        connection.sendall(form_head("Content-Length: 5000") + BEGINNING)
    assert client.get("/healthz").json() == {"status": "ok"}
    assert service.log.read_text() == before


def test_the_service_itself_does_not_load_torch(client, service, image_folder):
    assert post(client, (image_folder / "000.png").read_bytes()).status_code == 200
    assert "libtorch" not in Path(f"/proc/{service.process.pid}/maps").read_text()
    (models,) = models_of(psutil.Process(service.process.pid))
    assert "libtorch" in Path(f"/proc/{models.pid}/maps").read_text()


def grey_png(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (side, side), 7).save(file, "png")
    return file.getvalue()


def test_images_that_unpack_to_much_neither_stall_others_nor_fill_the_memory(client, service):
    """A small image is answered while large ones that came before it wait, which it would not be if it had to wait for
    them. How long a large one takes does not matter: they come again until five small ones have overtaken some."""
    small, large, refused = (grey_png(side) for side in (100, 4096, 7995))
    assert len(large) < 2**17
    with ThreadPoolExecutor(30) as pool:
        expected = post(client, small).json()
        before, most, overtaking = tree_bytes(service.process.pid), 0, 0
        bombs = [pool.submit(post, client, refused) for _ in range(10)]
        for _ in range(20):
            slow = [pool.submit(post, client, large) for _ in range(10)]
            # The request for their number is one too.
            wait_until(lambda slow=slow: num_waiting(slow) < 10 or (in_flight(service) > 10 and not num_waiting(bombs)))
            while num_waiting(slow):
                assert post(client, small).json() == expected
                overtaking += num_waiting(slow) > 2
                most = max(most, tree_bytes(service.process.pid))
            assert {each.result().status_code for each in slow} == {200}
            if overtaking >= 5:
                break
        assert overtaking >= 5
        # One of 4096 x 4096 in grey, and what its decoder needs; ten at once would be 160 MB.
        assert most - before < 100 * 2**20
        for each in bombs:
            detail = each.result().json()["detail"]
            assert detail == "image.png has 7995x7995 pixels, more than 16777216 in all"


def num_waiting(requests: list[Future[httpx.Response]]) -> int:
    return sum(not each.done() for each in requests)


def in_flight(service: Service) -> float:
    """The requests over HTTP that the service has taken and not answered."""
    lines = service.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("ckpt_tools_http_requests_in_flight"))


def tree_bytes(pid: int) -> int:
    process = psutil.Process(pid)
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))


# --- large bodies

BEGINNING = b'--edge\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
END = b"\r\n--edge--\r\n"
MEGABYTE = bytes(2**20)


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def form_head(*headers: str) -> bytes:
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


@pytest.mark.parametrize("is_chunked", [True, False], ids=["chunked", "with its length"])
def test_a_large_body_is_refused_while_it_arrives(service, is_chunked):
    before = psutil.Process(service.process.pid).memory_info().rss
    head = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {200 * 2**20}"
    with connected(service.port) as connection:
        connection.sendall(form_head(head) + (chunk(BEGINNING) if is_chunked else BEGINNING))
        sent = send_until_refused(connection, chunk(MEGABYTE) if is_chunked else MEGABYTE, 200)
        answer = connection.recv(65536)
    # The kernel's buffers of both sides take some megabytes more than the service reads.
    assert sent < (40 if is_chunked else 24) * 2**20
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()
    assert psutil.Process(service.process.pid).memory_info().rss - before < 64 * 2**20
    assert list(service.temporary.iterdir()) == []


@pytest.mark.parametrize(
    "head",
    [
        *(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2**30}\r\n\r\n".encode()
            for path in ("/predict", "/v2/models/model.safetensors/infer", "/v2/repository/index")
        ),
        form_head(f"Content-Length: {200 * 2**20}", "Expect: 100-continue"),
    ],
)
def test_a_large_body_that_is_announced_is_refused_before_it_is_sent(service, client, head):
    with connected(service.port) as connection:
        connection.sendall(head)
        received = read_to_end(connection)
    assert received.startswith(b"HTTP/1.1 413 ")
    body = json.loads(received.partition(b"\r\n\r\n")[2])
    assert body == {"detail": "the image is larger than 16 MiB"} if b"/predict" in head else list(body) == ["error"]
    assert client.get("/healthz").status_code == 200


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


# --- heads


@pytest.fixture(scope="module")
def app(forms):
    return create_app(forms / "model.pt")


def test_a_head_that_does_not_come_is_cut_off(app, monkeypatch):
    """Header by header; in this process, so that the wait can be short."""
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.5)
    with plain_uvicorn_of(app, http=server.LimitedHeadProtocol) as url, connected(int(url.rpartition(":")[2])) as slow:
        slow.sendall(b"GET /v2 HTTP/1.1\r\n")
        begun = time.monotonic()
        slow.settimeout(0.1)
        assert not list(dripped(slow, begun + 10))
        assert 0.3 < time.monotonic() - begun < 5


def dripped(slow: socket.socket, end: float) -> Iterator[bytes]:
    """What is answered until the other side closes."""
    while time.monotonic() < end:
        try:
            slow.sendall(b"X: y\r\n")
            if not (data := slow.recv(1)):
                return
            yield data
        except TimeoutError:
            continue
        except OSError:
            return


LIMIT = 2**16
GET = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
CHUNKED = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
LARGE = {
    "one header": GET + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
    "many headers": GET + b"".join(b"h%d: v\r\n" % number for number in range(10_000)) + b"\r\n",
    "a path": GET.replace(b"live", b"y" * 100_000) + b"\r\n",
    "a trailer": CHUNKED + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
}


def sent(connection: socket.socket, data: bytes, size: int) -> bytes:
    """The answer to ``data``, which is sent in pieces of ``size``; empty if the connection is closed before one."""
    try:
        for start in range(0, len(data), size):
            connection.sendall(data[start : start + size])
        return read_to_end(connection)
    except OSError:
        return b""


@pytest.mark.parametrize("size", [700, LIMIT + 1, 10**6])
@pytest.mark.parametrize("which", LARGE)
def test_a_large_head_is_cut_off_in_pieces_of_any_size(service, which, size):
    with connected(service.port) as client:
        assert sent(client, LARGE[which], size) == b""


def test_heads_below_the_limit_are_answered(service):
    """Each request of a connection has the whole limit, also if they come in one packet."""
    head = GET + b"".join(b"h%d: %s\r\n" % (number, b"v" * 6000) for number in range(10)) + b"\r\n"
    one = GET.replace(b"Connection: close\r\n", b"") + b"X: " + b"y" * 40_000 + b"\r\n\r\n"
    for data, size, many in ((head, 700, 1), (head, 10**6, 1), (one * 3 + GET + b"\r\n", 10**6, 4)):
        with connected(service.port) as client:
            assert sent(client, data, size).count(b"HTTP/1.1 200 ") == many


# --- the address


def test_a_port_that_is_taken_stops_the_start(service, forms):
    http, grpc = service.port, service.grpc.rpartition(":")[2]
    for words, port, option in (([f"--port={http}"], http, "--port"), ([f"--grpc-port={grpc}"], grpc, "--grpc-port")):
        done = run_serve(forms / "model.pt", "--port=0", *words)
        assert (done.exit_code, done.stdout) == (5, "")
        told = f"Error: cannot listen on host 127.0.0.1, port {port}: Address already in use; try another {option} or"
        assert done.stderr == f"{told} --host\n"


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("localhost", "localhost")])
def test_an_accepted_connection_sends_at_once(host, shown):
    with bind_socket(host, 0) as listening:
        url = start_listening(listening, host)
        assert url == f"http://{shown}:{listening.getsockname()[1]}"
        with socket.create_connection(listening.getsockname()[:2]):
            accepted, _ = listening.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
