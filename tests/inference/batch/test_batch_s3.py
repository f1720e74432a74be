"""The batch command with model, input and output on a real S3 server, killed in the middle and gone on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import s3fs
from click.testing import CliRunner, Result
from pyarrow import parquet

from inference.batch.__main__ import main
from tests.inference.batch.test_batch import rows_of
from tests.support.s3_server import BUCKET, S3Server

pytestmark = pytest.mark.extended

PART_ROWS = 30

KILLED = """
import os, signal, sys
from inference.batch import pipeline, remote_output
from inference.batch.__main__ import main

pipeline.PASSES = 1
remote_output.PART_ROWS = int(sys.argv.pop(1))
store, stored = remote_output.RemoteWriter.store, []

def store_and_die(writer):
    store(writer)
    stored.append(1)
    if len(stored) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

remote_output.RemoteWriter.store = store_and_die
main()
"""
"""As if somebody ran ``kill -9`` when two parts are there: others wait, or nothing but to put them together."""

Predict = Callable[..., Result]


@pytest.fixture(scope="module")
def prefix(s3_server, forms, image_folder):
    """Where the model lies, and 40 images: as files, as cells of a Parquet file, and 80 lines that name them."""
    found = s3_server.new_prefix()
    images = {file.name: file.read_bytes() for file in sorted(image_folder.glob("*.png"))}
    cells = pa.BufferOutputStream()
    parquet.write_table(pa.table({"image": [*images.values()] * 2, "number": range(80)}), cells)
    lines = "".join(json.dumps({"path": f"images/{name}", "truth": 1}) + "\n" for name in [*images] * 2)
    s3_server.put(
        found,
        {
            "model.safetensors": (forms / "model.safetensors").read_bytes(),
            **{f"images/{name}": data for name, data in images.items()},
            "cells.parquet": cells.getvalue().to_pybytes(),
            "lines.jsonl": lines.encode(),
        },
    )
    return found


@pytest.fixture
def predict(s3_server, prefix, monkeypatch):
    """The command with these names below the prefix."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    return lambda *args: CliRunner().invoke(main, words(prefix, *args))


def words(prefix: str, source: str, output: str, *args: str) -> list[str]:
    base = f"s3://{BUCKET}/{prefix}"
    return [
        f"--model={base}model.safetensors",
        f"--input={base}{source}",
        f"--output={base}{output}",
        "--threads=1",
        *args,
    ]


def written(server: S3Server, key: str, folder: Path) -> list[dict[str, Any]]:
    file = folder / key.rpartition("/")[2]
    file.write_bytes(server.files(key)[""])
    return rows_of(file)


@pytest.mark.parametrize(
    ("source", "output", "num_rows"),
    [
        pytest.param("images/*.png", "a/out.parquet", 40, marks=pytest.mark.soak),
        pytest.param("cells.parquet", "b/out.jsonl", 80, marks=pytest.mark.soak),
        ("lines.jsonl", "c/out.parquet", 80),
    ],
)
def test_a_run_that_is_killed_goes_on_and_each_row_is_there_once(
    source,
    output,
    num_rows,
    predict,
    prefix,
    s3_server,
    tmp_path,
    monkeypatch,
):
    monkeypatch.setattr("inference.batch.remote_output.PART_ROWS", PART_ROWS)
    whole = predict(source, f"whole/{output}")
    assert whole.exit_code == 0, whole.output
    command = [sys.executable, "-c", KILLED, "15", *words(prefix, source, output)]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = s3_server.keys(prefix + output)
    assert "" not in left
    assert len([key for key in left if "/rows-" in key]) == 2
    refused = predict(source, output)
    assert (refused.exit_code, "--resume continues with them" in refused.stderr) == (8, True)
    assert predict(source, output, "--resume").exit_code == 0
    assert s3_server.keys(prefix + output) == [""]
    assert not s3_server.open_uploads(prefix)
    rows = written(s3_server, prefix + output, tmp_path)
    assert len(rows) == len({row["name"] for row in rows}) == num_rows
    assert rows == written(s3_server, f"{prefix}whole/{output}", tmp_path)


def test_answers_are_those_of_local_files(predict, prefix, s3_server, forms, image_folder, tmp_path):
    assert predict("images/*.png", "d/out.jsonl").exit_code == 0
    local = tmp_path / "local.jsonl"
    args = [f"--model={forms / 'model.safetensors'}", f"--input={image_folder}", f"--output={local}", "--threads=1"]
    assert CliRunner().invoke(main, args).exit_code == 0
    assert written(s3_server, f"{prefix}d/out.jsonl", tmp_path) == rows_of(local)


def test_a_file_that_is_gone_is_a_row_and_a_bucket_that_is_not_there_is_the_end(predict, prefix, s3_server, tmp_path):
    lines = "".join(json.dumps({"path": f"images/{name}.png"}) + "\n" for name in ("000", "none", "001"))
    s3_server.put(prefix, {"gone.jsonl": lines.encode()})
    done = predict("gone.jsonl", "e/out.jsonl")
    assert done.exit_code == 6, done.stderr
    errors = [row["error"] for row in written(s3_server, f"{prefix}e/out.jsonl", tmp_path)]
    assert errors[0] is errors[2] is None
    assert "none.png cannot be read" in errors[1]
    missing = CliRunner().invoke(main, [*words(prefix, "none/*.png", "f/out.jsonl")])
    lines = [line for line in missing.stderr.splitlines() if "nothing says what the model is" not in line]
    assert (missing.exit_code, len(lines)) == (3, 1), missing.stderr
