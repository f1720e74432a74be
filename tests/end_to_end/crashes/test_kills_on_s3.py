"""A conversion to S3, killed at any request: nobody sees half of it, ``--resume`` sends only what was not there yet."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.end_to_end.crashes.cases import done_bytes
from tests.end_to_end.crashes.runs import Call, Runs, sampled
from tests.support.s3_server import BUCKET, S3Server

pytestmark = pytest.mark.extended

PARTIAL = "ckpt-tools-partial"

POINTS_IN_SAMPLE = 5

OUTPUTS = {"dcp": ("out", ["--to", "dcp", "--world-size", "2"]), "file": ("out.safetensors", [])}
"""A folder, whose ``.metadata`` makes it a checkpoint, and a single object."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """24 MB: three parts of an upload."""
    path = tmp_path_factory.mktemp("s3") / "weights.pt"
    torch.save({"a": torch.rand(2, 1 << 20), "b": torch.rand(2, 2 << 20)}, path)
    return path


@pytest.fixture(scope="module")
def runs(s3_server, tmp_path_factory):
    found = Runs(tmp_path_factory.mktemp("s3-runs") / "runs", s3_server.environment)
    yield found
    found.close()


@dataclass(frozen=True, slots=True)
class Target:
    """Somewhere in the bucket where nothing is yet."""

    server: S3Server
    prefix: str
    name: str

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self.prefix}{self.name}"

    def _all(self) -> Mapping[str, bytes]:
        return self.server.files(self.prefix)

    def visible(self) -> dict[str, bytes]:
        return {key: data for key, data in self._all().items() if PARTIAL not in key}

    def noted_bytes(self) -> int:
        log = [data for key, data in sorted(self._all().items()) if PARTIAL in key and "/log/" in key]
        return done_bytes(b"".join(log))

    def is_left_alone(self) -> bool:
        """Nothing of ours is left."""
        return not any(PARTIAL in key for key in self._all()) and not self.server.open_uploads(self.prefix)


def new_target(server: S3Server, name: str) -> Target:
    return Target(server, server.new_prefix(), name)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.timeout(1800)
def test_killed_at_every_request(output, weights, runs, s3_server, soak):
    name, options = OUTPUTS[output]
    command = ("convert", weights, *options, "--workers", "1", "--quiet", "--resume")
    first = new_target(s3_server, name)
    runs.warm(*command[:2], first.url, *command[2:])
    expected = first.visible()
    watched = new_target(s3_server, name)
    trace = runs.run(*command[:2], watched.url, *command[2:], strace=["-e", "trace=sendto,kill"]).trace
    assert watched.visible() == expected
    for number in sampled(range(1, _most_sends(trace) + 1), None if soak else POINTS_IN_SAMPLE):
        target = new_target(s3_server, name)
        words = (*command[:2], target.url, *command[2:])
        assert runs.killed_at(Call("sendto", number), *words).code in (-9, 0)
        seen = target.visible()
        assert seen == expected or (".metadata" not in str(seen.keys()) and f"{name}" not in seen)
        _resume(runs, target, words, expected)


def test_a_short_run_without_a_log_is_done_again(weights, runs, s3_server):
    """Killed once its uploads hold data: they are found without it, and what they hold is sent again."""
    name, options = OUTPUTS["dcp"]
    target = new_target(s3_server, name)
    words = ("convert", weights, target.url, *options, "--workers", "1", "--quiet")
    number = 1
    while not s3_server.open_uploads(target.prefix):
        assert runs.killed_at(Call("sendto", number), *words).code == -9
        number += 10
    assert (target.visible(), target.noted_bytes()) == ({}, 0)
    done = runs.run(*words, "--resume")
    assert (done.code, json.loads(done.stdout)["bytes_recovered"]) == (0, 0), done.stderr
    assert ".metadata" in {key.rpartition("/")[2] for key in target.visible()}
    assert target.is_left_alone()


def _resume(runs: Runs, target: Target, words: tuple[str | Path, ...], expected: Mapping[str, bytes]) -> None:
    was_complete, noted = target.visible() == expected, target.noted_bytes()
    done = runs.run(*words)
    if was_complete:
        assert done.code == 8, done.stderr
        assert runs.run("clean", target.url).code == 0
    else:
        assert done.code == 0, done.stderr
        assert json.loads(done.stdout)["bytes_recovered"] == noted
    assert target.visible() == expected
    assert target.is_left_alone()


def _most_sends(trace: str) -> int:
    """How often the thread sends that sends most."""
    threads = re.findall(r"^(\d+) +sendto\(", trace, re.MULTILINE)
    return max(map(threads.count, set(threads)))
