"""The service in operation: who may ask, how long it waits, what it writes down, and how it ends and renews itself."""

from __future__ import annotations

import datetime
import http.client
import json
import signal
import socket
import time

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from inference.serving.http import server
from tests.inference.conftest import running_service
from tests.inference.serving.test_repository import write_checkpoint
from tests.inference.serving.test_serve import read_to_end, run_serve, send_until_refused, wait_until

TOKEN = "s3cret"


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(f"{TOKEN}\n")
    return file


@pytest.fixture(scope="module")
def run_folder(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    write_checkpoint(folder, weights, 1)
    return folder


@pytest.fixture(scope="module")
def service(run_folder, token_file, tmp_path_factory):
    options = [
        "--watch=0.2",
        "--quiet-time=0.2",
        f"--token={token_file}",
        "--access-log",
        "--timeout=0.000001",
        "--drain=2",
    ]
    options += ["--allow-host=Allowed.example", "--architecture=ours"]
    folder = tmp_path_factory.mktemp("operations")
    with running_service(folder, None, f"--model=m={run_folder}@latest", *options) as service:
        yield service


@pytest.fixture(scope="module")
def client(service):
    with httpx.Client(base_url=service.url, timeout=60, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        yield client


# --- who may ask


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer other"}, {"Authorization": TOKEN}])
@pytest.mark.parametrize("path", ["/v2", "/metrics", "/v2/models/m", "/openapi.json", "/none"])
def test_without_the_token_nothing_is_told(service, path, headers):
    answer = service.http.get(path, headers=headers)
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize("path", ["/", "/healthz", "/v2/health/live", "/v2/health/ready"])
def test_a_probe_and_the_page_need_no_token(service, path):
    assert service.http.get(path).status_code == 200


@pytest.mark.parametrize(("origin", "status"), [(None, 200), ("http://evil.example", 403), ("null", 403), ("", 403)])
def test_a_page_of_another_site_may_not_ask(client, origin, status):
    headers = {} if origin is None else {"Origin": origin}
    assert client.post("/v2/repository/index", headers=headers).status_code == status
    assert client.post("/v2/repository/index", headers={"Origin": str(client.base_url).rstrip("/")}).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost", 200),
        ("LOCALHOST.:8000", 200),
        ("page.localhost", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("allowed.example", 200),
    ],
)
def test_a_service_on_loopback_has_no_other_name(client, host, status):
    """A page in a browser can give its own name the address of this machine: its origin is then the host it asks."""
    answer = client.get("/v2", headers={"Host": host, "Origin": f"http://{host}"})
    assert answer.status_code == status
    assert "--allow-host" in answer.text or status == 200


@pytest.mark.parametrize(("content", "code"), [(None, 3), ("", 4), ("two words", 4), ("ü", 4), ("a" * 5000, 4)])
def test_a_token_that_cannot_be_one_stops_the_start(content, code, forms, tmp_path):
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    done = run_serve(forms / "model.pt", f"--token={file}", "--port=0")
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert done.stderr.startswith("Error: --token: ")


# --- ids, deadlines, the log


@pytest.mark.parametrize(("given", "is_kept"), [("my-id.7", True), ("a b", False), ("x" * 200, False), (None, False)])
def test_a_request_has_an_id(client, given, is_kept):
    answer = client.get("/v2", headers={} if given is None else {"X-Request-Id": given})
    assert (answer.headers["X-Request-Id"] == given) == is_kept
    assert 1 <= len(answer.headers["X-Request-Id"]) <= 128


def test_a_request_that_waits_too_long_is_told(client, image_folder):
    """This service gives the model a microsecond."""
    answer = client.post("/predict", files={"image": ("a.png", (image_folder / "000.png").read_bytes())})
    assert (answer.status_code, answer.json()["detail"]) == (504, "the model did not answer within 1e-06 seconds")


def test_each_request_is_a_line_of_json(client, service):
    client.post("/v2/models/m/infer", content=b"x", headers={"X-Request-Id": "looked-for"})
    assert service.process.stdout is not None
    for line in service.process.stdout:
        entry = json.loads(line)
        if entry["request_id"] == "looked-for":
            break
    assert (entry["method"], entry["path"], entry["status"]) == ("POST", "/v2/models/m/infer", 400)
    assert (entry["model"], entry["bytes_in"], entry["client"]) == ("m", 1, "127.0.0.1")
    assert entry["seconds"] > 0
    assert TOKEN not in line.decode()


# --- somebody slow


def test_a_head_that_does_not_come_is_cut_off(service):
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as slow:
        slow.sendall(b"GET /v2 HTTP/1.1\r\n")
        begun = time.monotonic()
        try:
            while time.monotonic() - begun < 4 * server.HEAD_SECONDS:
                slow.sendall(b"X: y\r\n")
                slow.settimeout(0.5)
                try:
                    if slow.recv(1) == b"":
                        break
                except TimeoutError:
                    continue
        except OSError:
            pass
        assert server.HEAD_SECONDS - 1 < time.monotonic() - begun < 4 * server.HEAD_SECONDS


@pytest.mark.parametrize(
    "beginning",
    [b"GET /v2 HTTP/1.1\r\nX: ", b"POST /v2/models/m/infer HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: "],
    ids=["head", "trailer"],
)
def test_a_head_without_end_is_cut_off(beginning, service):
    """What is sent beyond it is the buffers' of the two sockets."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as endless:
        endless.sendall(beginning)
        assert send_until_refused(endless, b"y" * 2**16, 1024) < 32 * 2**20


LIMIT = 2**16
GET = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
CHUNKED = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
CHUNKED += f"Authorization: Bearer {TOKEN}\r\n\r\n0\r\n".encode()
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


@pytest.mark.parametrize("size", [700, 5000, LIMIT - 1, LIMIT + 1, 10**6])
@pytest.mark.parametrize("which", LARGE)
def test_a_large_head_is_cut_off_in_pieces_of_any_size(service, which, size):
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as client:
        assert sent(client, LARGE[which], size) == b""


@pytest.mark.parametrize("size", [700, 10**6])
def test_a_head_below_the_limit_is_answered(service, size):
    head = GET + b"".join(b"h%d: %s\r\n" % (number, b"v" * 6000) for number in range(10)) + b"\r\n"
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as client:
        assert sent(client, head, size).startswith(b"HTTP/1.1 200 ")


def test_each_request_of_a_connection_has_the_whole_limit(service):
    """Also of requests in one packet."""
    one = GET.replace(b"Connection: close\r\n", b"") + b"X: " + b"y" * 40_000 + b"\r\n\r\n"
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as client:
        assert sent(client, one * 3 + GET + b"\r\n", 10**6).count(b"HTTP/1.1 200 ") == 4


def test_another_protocol_is_not_taken_up_and_the_request_is_answered(client):
    """As curl --http2 asks."""
    given = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAAP__"}
    answers = [client.post("/v2/models/m/infer", content=b"x" * 9, headers=given) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [400, 400]


def test_a_body_that_does_not_come_is_refused(forms):
    """In this process, so that the wait can be short."""
    from inference.models.predictor import load_predictor
    from inference.serving.http.app import create_app
    from inference.serving.repository import Repository, Source
    from inference.serving.settings import Settings
    from tests.inference.serving.test_serve import plain_uvicorn_of

    repository = Repository(
        [Source("m", str(forms / "model.pt"))], lambda source: load_predictor(source.url, name=source.name)
    )
    repository.load_all()
    with plain_uvicorn_of(create_app(repository, Settings(body_seconds=0.5))) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as slow:
            slow.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
            answer = read_to_end(slow)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'{"error":"the request took too long to arrive"}' in answer


# --- renewal and the end


def test_a_new_checkpoint_of_the_run_is_served(client, service, run_folder, weights):
    before = client.get("/v2/models/m").json()
    assert before["parameters"]["source"] == "run/step-1"
    write_checkpoint(run_folder, weights, 2)
    wait_until(lambda: client.get("/v2/models/m").json()["versions"] == ["2"])
    after = client.get("/v2/models/m").json()
    assert after["parameters"]["source"] == "run/step-2"
    assert after["parameters"]["digest"] != before["parameters"]["digest"]
    assert service.log.read_text() == f"m: serves {run_folder / 'step-2'}\n"


def test_it_is_not_ready_while_it_ends(service, client):
    """The last test of this service: it goes on for two seconds. A connection is closed with its answer."""
    kept = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    kept.request("GET", "/v2/health/live")
    before = kept.getresponse()
    assert (before.status, before.getheader("Connection"), before.read()) == (200, None, b'{"live":true}')
    service.process.send_signal(signal.SIGTERM)
    wait_until(lambda: httpx.get(f"{service.url}/v2/health/ready").status_code == 503)
    connection = kept.sock
    kept.request("GET", "/v2/health/live")
    last = kept.getresponse()
    assert (last.status, last.headers.get_all("Connection"), last.read()) == (200, ["close"], b'{"live":true}')
    assert kept.sock is None and connection is not None
    for refused in (client.get("/v2", headers={"Authorization": "Bearer x"}), client.get("/none")):
        assert refused.headers.get_list("Connection") == ["close"]
    assert client.get("/v2").status_code == 200
    assert service.process.wait(60) == 143


# --- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A key, and a certificate of 127.0.0.1 that it signs itself."""
    folder, key = tmp_path_factory.mktemp("tls"), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8
    plain = serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, private, plain))
    return folder


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--keyfile={0}/key.pem"], 2),
        (["--certfile={0}/none.pem"], 5),
        (["--certfile={0}/key.pem"], 4),
        (["--certfile={0}/cert.pem"], 4),
    ],
)
def test_a_certificate_that_cannot_be_used_stops_the_start(options, code, certificate, forms):
    done = run_serve(forms / "model.pt", "--port=0", *(option.format(certificate) for option in options))
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert done.stderr.startswith("Error: --")


@pytest.mark.parametrize(
    "options",
    [
        ["--watch=0"],
        ["--watch=nan"],
        ["--quiet-time=-1", "--watch=1"],
        ["--timeout=0"],
        ["--timeout=nan"],
        ["--drain=-1"],
        ["--threads=0"],
    ],
)
def test_a_number_that_makes_no_sense_is_refused(options, forms):
    done = run_serve(forms / "model.pt", "--port=0", *options)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"Error: {options[0].partition('=')[0]} is a number")


def test_no_model_is_refused():
    done = run_serve("--port=0")
    assert done.returncode == 2
    assert done.stderr == "Error: there is no model to serve; name one, as MODEL or by --model NAME=URL\n"
