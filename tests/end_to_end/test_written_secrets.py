"""What the tool writes never holds a credential: not the output, nor what lies beside it while a run is under way."""

from __future__ import annotations

from typing import Any

import pytest

import ckpt_tools
from tests.support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY

pytestmark = pytest.mark.extended

TOKEN = "token-4711-of-nobody"
"""Of the environment, which no request of the tests' server needs."""


def test_no_file_holds_a_secret(s3, checkpoint, tmp_path, monkeypatch):
    made = checkpoint("fsdp2", "plain", 2).checkpoint
    prefix = s3.new_prefix()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    options = {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": s3.endpoint}
    found: dict[str, bytes] = {}

    def look(*_: int) -> None:
        found.update({str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()})
        found.update(s3.files(prefix))

    up = f"s3://{BUCKET}/{prefix}up"
    steps: list[tuple[Any, Any]] = [(made, up), (up, tmp_path / "down"), (up, f"s3://{BUCKET}/{prefix}again")]
    for source, destination in steps:
        reach: dict[str, Any] = {"storage_options": options, "on_progress": look}
        ckpt_tools.convert(source, destination, to="dcp", checksum=True, resume=True, **reach)
        look()
    names = " ".join(found)
    assert all(f"{each}/.metadata" in names for each in ("up", "down", "again"))
    assert any(b'"plan"' in data for data in found.values()), "no journal was seen"
    for name, data in found.items():
        assert not any(secret.encode() in data for secret in (SECRET_KEY, "another-secret", TOKEN)), name
