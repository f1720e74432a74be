"""Signals to real processes: requests in flight are answered, whoever hangs is not waited for, and the log has one
sentence."""

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx
import numpy as np
import psutil
import pytest

from inference.serving.settings import bind_socket
from tests.inference.conftest import CKPT_TOOLS_SERVE, SERVE, models_of, running_service
from tests.inference.serving.helpers import call, infer_message, read_to_end, wait_until
from tests.inference.serving.http.test_requests import BEGINNING, END, form_head, unread_bytes

Code = grpc.StatusCode
ONE = infer_message(np.zeros((1, 28, 28), np.uint8))


@pytest.mark.parametrize(
    ("number", "code", "module", "hangs"),
    [
        pytest.param(signal.SIGTERM, 143, CKPT_TOOLS_SERVE, True, marks=pytest.mark.extended),
        pytest.param(signal.SIGINT, 130, SERVE, False, marks=pytest.mark.soak),
        pytest.param(signal.SIGHUP, 129, CKPT_TOOLS_SERVE, False, marks=pytest.mark.soak),
    ],
)
def test_a_signal_ends_the_service_after_the_requests_in_flight(
    number, code, module, hangs, forms, image_folder, tmp_path
):
    """The first signal begins the drain, and the second ends it. One client waits on a kept-alive connection, which is
    closed while another still sends the rest of its request, and calls come all the time: each is answered, or was
    never taken. A client that sends no more is sent away. The address is of IPv6."""
    body = BEGINNING + (image_folder / "000.png").read_bytes() + END
    options = [f"--model=m={forms / 'model.pt'}", "--host=::1", "--grpc-port=0", "--drain=60"]
    with running_service(tmp_path / "serve", None, *options, module=module) as service, ExitStack() as stack:
        assert service.url == f"http://[::1]:{service.port}"
        assert httpx.get(f"{service.url}/healthz").status_code == 200
        children = psutil.Process(service.process.pid).children(recursive=True)
        assert children == models_of(psutil.Process(service.process.pid)) and len(children) == 1
        address = ("::1", service.port)
        idle, slow, hanging = (stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(3))
        channel = stack.enter_context(grpc.insecure_channel(service.grpc))
        pool = stack.enter_context(ThreadPoolExecutor(4))
        answers: list[list[grpc.StatusCode]] = [[] for _ in range(4)]

        def ask(codes: list[grpc.StatusCode]) -> None:
            while not codes or codes[-1] is Code.OK:
                try:
                    call(channel, "ModelInfer", ONE)
                    codes.append(Code.OK)
                except grpc.RpcError as error:
                    codes.append(error.code())

        asking = [pool.submit(ask, codes) for codes in answers]
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(65536).startswith(b"HTTP/1.1 200 ")
        slow.sendall(form_head(f"Content-Length: {len(body)}") + body[:100])
        if hangs:
            hanging.sendall(form_head("Content-Length: 5000") + BEGINNING)
        wait_until(lambda: unread_bytes(slow) == unread_bytes(hanging) == 0 and min(map(len, answers)) > 2)
        service.process.send_signal(number)
        wait_until(lambda: not call(channel, "ServerReady").ready)
        service.process.send_signal(number)
        read_to_end(idle)
        wait_until(lambda: not is_listening(address))
        slow.sendall(body[100:])
        answer = read_to_end(slow)
        assert answer.startswith(b"HTTP/1.1 200 ") and b'"label":' in answer
        assert read_to_end(hanging).startswith(b"HTTP/1.1 503 " if hangs else b"")
        for each in asking:
            each.result()
        assert service.process.wait(60) == code
    assert {code for codes in answers for code in codes} == {Code.OK, Code.UNAVAILABLE}
    # There would be a line before it if anybody else had been waited for until the limit.
    assert service.log.read_text().endswith(f"stopped by {number.name}\n")
    assert hangs or service.log.read_text().count("\n") == 1
    assert list(service.temporary.iterdir()) == []


def is_listening(address: tuple[str, int]) -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        return probe.connect_ex(address) == 0


def test_a_signal_while_the_model_is_loaded_is_one_sentence(forms):
    """The port is bound, and nobody listens on it yet, when the signal comes."""
    with bind_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "inference.serving", str(forms / "model.pt"), f"--port={port}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: is_bound(port))
        process.terminate()
        assert process.communicate(timeout=60) == ("", "stopped by SIGTERM\n")
    assert process.returncode == 143


def is_bound(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


@pytest.mark.parametrize("module", ["inference.serving", "inference.batch", "inference.demo", "training"])
def test_ctrl_c_during_imports_is_the_end(module, tmp_path):
    """At once and without a traceback; there is nothing to clean up yet. It comes while click is imported."""
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nopen('later', 'w')\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command, default = [sys.executable, "-m", module], lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    done = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment, check=False, preexec_fn=default
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
    assert not (tmp_path / "later").exists()
