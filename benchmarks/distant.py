"""Conversions from and to a distant store, against programs that only move the same bytes.

The store is the suite's own S3 server behind a proxy that adds 50 ms to each answer and limits each connection.
Server, proxy and programs share the machine, which carries about 100 MB/s of all that, so a connection has 4 MB/s: with
20 MB/s the processors would be measured. Where 4 processes have 64 connections, each has 0.5 MB/s.

The other program has 16 connections, or 32 for small files, and is started as our command is.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.distance import LoggedRequest, count_rounds, find_longest_chain, running_distant_server
from benchmarks.measure import ROOT, MeasureError
from benchmarks.runner import CKPT_TOOLS, RunSettings
from benchmarks.turns import Taken, compare_with_promises, format_verdict, take_turns
from tests.support.s3_server import BUCKET, S3Server, running_s3_server

LATENCY_SECONDS, BYTES_PER_SECOND = 0.05, 4e6
NUM_FEW, NUM_MANY, NUM_PARTS = 20, 2000, 4
MAX_EXTRA_ROUNDS = 3

SOURCE, OUT = f"s3://{BUCKET}/model.safetensors", f"s3://{BUCKET}/out"
CONVERT, PEER = [*CKPT_TOOLS, "convert", "--quiet"], [sys.executable, "-m", "benchmarks.peers"]
TO_DCP, TO_UNIVERSAL = ["--to", "dcp", "--world-size", str(NUM_PARTS)], ["--to", "universal"]


@dataclass(frozen=True, slots=True)
class DistantWork:
    """Commands of ours, started together, the other program, and the largest ratio of their times."""

    name: str
    ours: Sequence[Sequence[str]]
    other: Sequence[str]
    max_ratio: float
    bytes_per_second: float = BYTES_PER_SECOND


def list_works(folder: Path) -> list[DistantWork]:
    """The works on the files that ``make_inputs`` makes."""
    model, many, small, out = (str(folder / name) for name in ("model.safetensors", "many", "2000.safetensors", "out"))
    move, put, down = [*PEER, "move_file"], [*PEER, "put_s3_files"], [*CONVERT, SOURCE, f"{out}.safetensors"]
    parts = [[*down, "--part", f"{number}/{NUM_PARTS}"] for number in range(1, NUM_PARTS + 1)]
    return [
        DistantWork("S3 → local", [down], [*move, SOURCE, out], 1.25),
        DistantWork("local → S3", [[*CONVERT, model, f"{OUT}.safetensors"]], [*move, model, f"{OUT}/copy"], 1.25),
        DistantWork(
            "S3 → S3, safetensors → DCP", [[*CONVERT, SOURCE, OUT, *TO_DCP]], [*move, SOURCE, f"{OUT}/copy"], 1.25
        ),
        DistantWork("2,000 small files", [[*CONVERT, small, OUT, *TO_UNIVERSAL]], [*put, many, OUT], 1.5),
        DistantWork("S3 → local: 4 parts, and one process", parts, down, 1 / 3.5, BYTES_PER_SECOND / 8),
    ]


def measure_distance(name: str, settings: RunSettings) -> list[str]:
    """The table of works, and the rounds of requests of `inspect`."""
    with running_s3_server() as server, tempfile.TemporaryDirectory() as folder:
        make_inputs(server, Path(folder), settings.size_bytes)
        works, pairs = list_works(Path(folder)), {}
        for work in works:
            with running_distant_server(server.port, LATENCY_SECONDS, work.bytes_per_second) as distant:

                def take(commands: Sequence[Sequence[str]], endpoint: str = distant.endpoint) -> Taken:
                    taken = run_together(commands, server, endpoint, settings.time_limit)
                    for key in server.keys("out"):
                        server.client().delete_object(Bucket=BUCKET, Key=f"out{key}")
                    for path in Path(folder).glob("out*"):
                        path.unlink()
                    return taken

                turns = {"ours": partial(take, work.ours), "other": partial(take, [work.other])}
                taken = take_turns(turns, settings.runs, warm_up=False)
                pairs[work.name] = (taken["ours"], taken["other"])
        table = compare_with_promises(pairs, {work.name: work.max_ratio for work in works})
        few, many = (log_inspection(server, count) for count in (NUM_FEW, NUM_MANY))
    return [*table, "", *_compare_rounds(few, many)]


def make_inputs(server: S3Server, folder: Path, num_bytes: int) -> None:
    """A model of so many bytes, here and on the server, and universal checkpoints of few and many files on it."""
    import torch
    from safetensors.torch import save_file

    save_file(
        {f"layers.{number}": torch.rand(num_bytes // 96 // 1024, 1024) for number in range(24)},
        folder / "model.safetensors",
    )
    server.upload("", folder)
    for count in (NUM_FEW, NUM_MANY):
        small = folder / f"{count}.safetensors"
        save_file({f"layers.{number}": torch.rand(64) for number in range(count)}, small)
        run_together([[*CONVERT, str(small), f"s3://{BUCKET}/{count}", *TO_UNIVERSAL]], server, server.endpoint, 600)
    run_together([[*CONVERT, str(small), str(folder / "many"), *TO_UNIVERSAL]], server, server.endpoint, 600)


def run_together(commands: Sequence[Sequence[str]], server: S3Server, endpoint: str, time_limit: float) -> Taken:
    """Run commands at once. Raises MeasureError if one fails."""
    environment = {**os.environ, **server.environment, "AWS_ENDPOINT_URL": endpoint}
    start, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    processes = [
        subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for words in commands
    ]
    for words, process in zip(commands, processes, strict=True):
        _, errors = process.communicate(timeout=time_limit)
        if process.returncode:
            raise MeasureError(f"{' '.join(words)[:200]} failed: {errors[-300:]}")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Taken(time.monotonic() - start, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime)


def log_inspection(server: S3Server, count: int) -> list[LoggedRequest]:
    """The requests of `inspect` of the universal checkpoint of so many files."""
    with running_distant_server(server.port, LATENCY_SECONDS, BYTES_PER_SECOND) as distant:
        run_together([[*CKPT_TOOLS, "inspect", f"s3://{BUCKET}/{count}"]], server, distant.endpoint, 600)
    return distant.requests


def _compare_rounds(few: Sequence[LoggedRequest], many: Sequence[LoggedRequest]) -> list[str]:
    rounds = [count_rounds(requests) for requests in (few, many)]
    verdict = format_verdict(rounds[1] <= rounds[0] + MAX_EXTRA_ROUNDS)
    return [
        f"`inspect` of a universal checkpoint of {NUM_MANY:,} files: {len(many):,} requests in {rounds[1]} rounds; of "
        f"{NUM_FEW} files: {len(few)} in {rounds[0]} (at most {MAX_EXTRA_ROUNDS} more: {verdict}). In a round no "
        f"request waits for another's answer, but for a connection: {find_longest_chain(many)} followed one another."
    ]
