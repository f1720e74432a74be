"""The service as its users meet it: a real server process on loopback, real image files, real HTTP."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from PIL import Image

from inference import batch
from inference.serve import MAX_UPLOAD_BYTES


@pytest.fixture(scope="module")
def client(forms: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of ``python -m inference.serve`` on a port that the system chose."""
    command = [sys.executable, "-m", "inference.serve", str(forms / "model.safetensors"), "--port", "0"]
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr, stdout=subprocess.PIPE) as server:
        try:
            with httpx.Client(base_url=_announced_address(server), timeout=30) as client:
                yield client
        finally:
            server.terminate()
    assert "Traceback" not in log.read_text()


def _announced_address(server: subprocess.Popen[bytes]) -> str:
    assert server.stdout is not None
    line = server.stdout.readline().decode()
    assert line.startswith("serving on http://127.0.0.1:"), line
    return line.removeprefix("serving on ").strip()


def post(client: httpx.Client, data: bytes, name: str = "image.png") -> httpx.Response:
    return client.post("/predict", files={"image": (name, data)})


def test_health(client: httpx.Client) -> None:
    response = client.get("/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_a_posted_image_gets_the_answer_of_the_batch_script(
    client: httpx.Client, forms: Path, image_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "batch.jsonl"
    CliRunner().invoke(batch.main, [str(forms / "model.pt"), f"--images={image_folder}", f"--out={out}"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    # Four requests at a time: the answers must not depend on the company either.
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda row: post(client, (image_folder / row["name"]).read_bytes()).json(), rows))
    assert answers == [{"label": row["label"], "probabilities": row["probabilities"]} for row in rows]


def test_other_formats_sizes_and_colours_are_taken(client: httpx.Client, image_folder: Path) -> None:
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
def test_a_bad_image_is_the_clients_error(client: httpx.Client, data: bytes, sentence: str) -> None:
    response = post(client, data)
    assert response.status_code == 400
    assert response.json()["detail"].startswith(sentence)


def test_a_truncated_image_is_the_clients_error(client: httpx.Client, image_folder: Path) -> None:
    response = post(client, (image_folder / "001.png").read_bytes()[:120])
    assert response.status_code == 400
    assert "damaged" in response.json()["detail"]


def test_an_upload_has_a_limit(client: httpx.Client) -> None:
    response = post(client, bytes(MAX_UPLOAD_BYTES + 1))
    assert (response.status_code, response.json()) == (413, {"detail": "the image is larger than 16 MiB"})


@pytest.mark.parametrize("files", [None, {"picture": b"x"}])
def test_a_request_without_an_image_is_told_how(client: httpx.Client, files: dict[str, bytes] | None) -> None:
    response = client.post("/predict", files=files)
    assert response.status_code == 422
    assert "form field named image" in response.json()["detail"]


def test_a_bad_model_stops_the_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "inference.serve", str(tmp_path / "none.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr == f"error: there is no model file {tmp_path / 'none.pt'}\n"
