"""A conversion from S3 to S3, against torch's own reader and against moving the same bytes and nothing else.

A DCP checkpoint of FSDP2 is put on a SeaweedFS server of its own, and each of these makes an object of the same
tensors, in turns:

- ours: `ckpt-tools convert s3://... s3://... --to safetensors`, with the shares that the server copied and that we read
- fsspec: torch's FsspecReader loads it, safetensors saves it to a local file, s3fs uploads that
- plain: ranges of 8 MiB of the input are downloaded and uploaded as parts, by as many threads, through the same client

A part has at least 5 MiB, so the size of shards decides what a service can copy. Of 2 GB of the suite's own Llama by 4
ranks, they have 1.4, 3.9 and 44 MiB. The wide one has the hidden size 2,048, and as many layers as the size allows:
shards by 2 ranks have 8 and 22 MiB, as those of Llama 2 7B on 8 ranks do.

Server and client share the machine, so that only ratios of rates mean something.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.inputs import WEIGHT_BYTES, InputCache, fit_llama
from benchmarks.measure import Usage, measure_success
from benchmarks.runner import CKPT_TOOLS, RunSettings
from benchmarks.turns import compute_ratio, make_table, take_turns
from tests.support.s3_server import BUCKET, running_s3_server

WIDE_HIDDEN, WIDE_RANKS = 2048, 2
OURS, SOURCE = "ckpt-tools", f"s3://{BUCKET}/in"
CONTESTANTS = {
    OURS: [*CKPT_TOOLS, "convert", "--to", "safetensors", "--quiet", "--json"],
    "fsspec": [sys.executable, "-m", "benchmarks.peers", "load_and_save_by_fsspec"],
    "plain": [sys.executable, "-m", "benchmarks.peers", "move_s3_objects"],
}
"""Commands that make the output, before the URLs of input and output."""

UPLOAD = "import fsspec, sys; fsspec.filesystem('s3').put(sys.argv[1], f'{sys.argv[2]}/', recursive=True)"


def measure_s3_conversion(name: str, settings: RunSettings) -> list[str]:
    """The table of the contestants, on a server of their own. `s3-wide` has the wide model."""
    inputs = InputCache(settings.data / "inputs")
    if name == "s3-wide":
        model = fit_llama(settings.size_bytes // WEIGHT_BYTES, WIDE_HIDDEN)
        path = inputs.root / f"dcp-weights-{WIDE_HIDDEN}x{model.layers}-{WIDE_RANKS}-ranks"
        source = inputs.build(path, "dcp-weights", model, WIDE_RANKS)
    else:
        source = inputs.get("dcp-weights", settings.size_bytes)
    shares: list[str] = []
    with running_s3_server() as server, tempfile.TemporaryDirectory() as folder:
        env, log = {**server.environment, "TMPDIR": folder}, Path(folder, "log")
        upload = [sys.executable, "-c", UPLOAD, f"{source}/", SOURCE]
        measure_success(upload, log, time_limit=settings.time_limit, env=env)

        def run_contestant(name: str) -> Usage:
            words = [*CONTESTANTS[name], SOURCE, f"s3://{BUCKET}/out"]
            usage = measure_success(words, log, time_limit=settings.time_limit, env=env)
            if name == OURS:
                done = json.loads(log.read_text())
                copied, read = (done[key] / done["bytes_written"] for key in ("bytes_copied", "bytes_read"))
                shares[:] = [f"The server copied {copied:.1%} of our output, and we read {read:.1%} of it."]
            for key in server.keys("out"):
                server.client().delete_object(Bucket=BUCKET, Key=f"out{key}")
            return usage

        turns = take_turns({name: partial(run_contestant, name) for name in CONTESTANTS}, settings.runs)
    header = "contestant | seconds (each run) | time / ours | processor time | memory | bytes on the local disk"
    return [
        *make_table(header, (_format_usages(name, usages, turns[OURS]) for name, usages in turns.items())),
        "",
        *shares,
    ]


def _format_usages(name: str, usages: Sequence[Usage], ours: Sequence[Usage]) -> Iterator[str]:
    yield name
    yield f"{median(usage.seconds for usage in usages):.1f} ({', '.join(f'{usage.seconds:.1f}' for usage in usages)})"
    yield f"{compute_ratio('seconds', usages, ours):.2f}"
    yield f"{median(usage.cpu_seconds for usage in usages):.1f} s"
    for field in ("peak_bytes", "disk_write_bytes"):
        yield f"{max(getattr(usage, field) for usage in usages) / 1e6:,.0f} MB"
