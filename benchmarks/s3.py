"""A conversion from S3 to S3, against torch's own reader and against moving the same bytes and nothing else.

`python -m benchmarks.s3 convert [--size BYTES] [--rounds N]` makes a DCP checkpoint of FSDP2, puts it on a SeaweedFS
server of its own, and has each of these make an object of the same tensors, in turns:

- ours: `ckpt-tools convert s3://... s3://... --to safetensors`; what of that the server copied itself is printed
- fsspec: torch's FsspecReader loads it, safetensors saves it to a local file, s3fs uploads that
- plain: ranges of 8 MiB of the input are downloaded and uploaded as parts, by as many threads, through the same client

A part has at least 5 MiB, so the size of shards decides what a service can copy. `--size` alone is the suite's own
Llama by 4 ranks: 2 GB of it are shards of 1.4, 3.9 and 44 MiB. `--hidden` and `--ranks` make another of that width, as
deep as the size allows. Shards of 2,048 on 2 ranks have 8 and 22 MiB, as those of Llama 2 7B on 8 ranks do.

`python -m benchmarks.s3 shares` computes the shares that could be copied, by the planner alone and without a server.

Server and client share the machine, so that only ratios of rates mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.inputs import WEIGHT_BYTES, Cache, Llama
from benchmarks.machine import ROOT
from benchmarks.measure import Usage, measured
from tests.support.s3_server import BUCKET, S3Server, running_s3_server

PART_BYTES, NUM_THREADS = 8 << 20, 8
TIME_LIMIT = 900.0
SIZE = 2_000_000_000


WORKS = {
    "ours": ("ckpt_tools", "convert", "--to", "safetensors", "--quiet", "--json"),
    "fsspec": ("benchmarks.s3", "fsspec"),
    "plain": ("benchmarks.s3", "plain"),
}
"""Ways to make the output: modules with arguments, before the URLs of input and output."""


def wide(cache: Path, size: int, hidden: int, ranks: int) -> Path:
    """A DCP of about that size and width, made if needed."""
    empty = Llama(hidden, 0)
    layers = max(1, round((size / WEIGHT_BYTES - empty.num_elements) / empty.elements_per_layer))
    path = cache / f"dcp-weights-{hidden}x{layers}-{ranks}-ranks"
    return Cache(cache).made(path, "dcp-weights", Llama(hidden, layers), ranks)


def convert(made: Path, rounds: int, names: list[str]) -> None:
    """Measure every work in turns, on a server of its own."""
    size = sum(path.stat().st_size for path in made.iterdir())
    with running_s3_server() as server, tempfile.TemporaryDirectory() as folder:
        source = f"s3://{BUCKET}/in"
        upload(server, "in/", made)
        env = {**os.environ, **server.environment, "TMPDIR": folder}
        found: dict[str, list[Usage]] = {}
        for number in range(rounds):
            for name in (name for name in WORKS if name in names):
                out, log = f"out-{name}-{number}", Path(folder, "log")
                command = [sys.executable, "-m", *WORKS[name], source, f"s3://{BUCKET}/{out}"]
                usage = measured(command, log, time_limit=TIME_LIMIT, cwd=ROOT, env=env)
                if usage.exit_code:
                    raise SystemExit(f"{name} failed:\n{log.read_text()[-2000:]}")
                found.setdefault(name, []).append(usage)
                copies = shown_copies(log.read_text()) if name == "ours" else ""
                print(described(name, usage, size) + copies, flush=True)
                for key in server.keys(out):
                    server.client().delete_object(Bucket=BUCKET, Key=out + key)
    medians = {name: statistics.median(usage.seconds for usage in usages) for name, usages in found.items()}
    for name, seconds in medians.items():
        print(f"median {name:8} {seconds:7.2f} s, ours is {seconds / medians['ours']:.2f} times as fast")


def described(name: str, usage: Usage, size: int) -> str:
    rate = size / usage.seconds / 1e6
    return (
        f"{name:8} {usage.seconds:7.2f} s {rate:6.0f} MB/s, cpu {usage.cpu_seconds:6.2f} s, "
        f"peak {usage.peak_bytes / 1e6:6.0f} MB, written to disk {usage.disk_write_bytes / 1e6:6.0f} MB"
    )


def shown_copies(report: str) -> str:
    """Shares of the output that the service copied, and of the input that was read, from the report of --json."""
    done = json.loads(report)
    copied, read = (done[name] / done["bytes_written"] for name in ("bytes_copied", "bytes_read"))
    return f", copied {copied:.1%}, read {read:.1%}"


def upload(server: S3Server, prefix: str, folder: Path) -> None:
    """Upload a folder in constant memory."""
    client = server.client()
    for path in (path for path in folder.rglob("*") if path.is_file()):
        key = f"{prefix}{path.relative_to(folder).as_posix()}"
        with path.open("rb") as file:
            send(client, key, partial(_read, file), path.stat().st_size, num_threads=1)


def _read(file: Any, start: int) -> bytes:
    file.seek(start)
    return bytes(file.read(PART_BYTES))


def send(client: Any, key: str, read: Callable[[int], bytes], size: int, *, num_threads: int) -> None:
    """An object of `size` bytes in parts, each read when it is sent."""
    to = {"Bucket": BUCKET, "Key": key}
    to["UploadId"] = client.create_multipart_upload(**to)["UploadId"]

    def part(start: int) -> dict[str, Any]:
        number = start // PART_BYTES + 1
        return {"PartNumber": number, "ETag": client.upload_part(**to, PartNumber=number, Body=read(start))["ETag"]}

    with ThreadPoolExecutor(num_threads) as pool:
        parts = list(pool.map(part, range(0, size, PART_BYTES) or (0,)))
    client.complete_multipart_upload(**to, MultipartUpload={"Parts": parts})


def plain(source: str, out: str) -> None:
    """Every byte of the input's files, downloaded and uploaded."""
    client = fast_client()
    prefix, target = (url.removeprefix(f"s3://{BUCKET}/") for url in (source, out))
    for found in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")["Contents"]:
        key, size = found["Key"], found["Size"]

        def read(start: int, key: str = key, size: int = size) -> bytes:
            wanted = f"bytes={start}-{min(start + PART_BYTES, size) - 1}"
            return bytes(client.get_object(Bucket=BUCKET, Key=key, Range=wanted)["Body"].read())

        send(client, target + key.removeprefix(prefix), read, size, num_threads=NUM_THREADS)


def fast_client() -> Any:
    """botocore's client without checksums and signatures of bodies."""
    import botocore.session
    from botocore.config import Config

    config = Config(
        max_pool_connections=NUM_THREADS,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"payload_signing_enabled": False},
    )
    return botocore.session.Session().create_client("s3", config=config)


def by_fsspec(source: str, out: str) -> None:
    """The usual way in torch: load all of it, save it, upload it."""
    import fsspec
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import fsspec_filesystem
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    reader = fsspec_filesystem.FsspecReader(source)
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        save_file(dict(tensors_of(state)), path)
        fsspec.filesystem("s3").put_file(str(path), f"{out.removeprefix('s3://')}/{path.name}")


def tensors_of(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from tensors_of(value, f"{prefix}{name}.")
        elif hasattr(value, "dtype"):
            yield prefix + name, value


def shares() -> None:
    """Print the shares of safetensors files that a service copies, and would copy if files were cut every 8 MiB."""
    from fixtures.synthetic import DTYPES, Model

    suite, wide = Llama.of(SIZE // WEIGHT_BYTES), Llama(2048, 5)
    models = {"Llama 2 7B": Model(32, 4096, 11008, 32000)}
    for each in (suite, wide):
        models[f"Llama of {each.hidden}"] = Model(each.layers, each.hidden, each.ffn, each.vocab)
    for name, model in models.items():
        for kind, dtype in DTYPES.items():
            for ranks in (1, 2, 4, 8, 16, 64):
                now, every_8 = share_copied(model, ranks, dtype)
                print(f"{name} {kind:5} {ranks:3} ranks: {now:6.1%}, {every_8:6.1%} at 8 MiB", flush=True)


def share_copied(model: Any, ranks: int, dtype: Any) -> tuple[float, float]:
    from ckpt_tools.core.options import ReadOptions, WriteOptions
    from ckpt_tools.formats.index import written_format
    from ckpt_tools.planning.plan import CopyRules, Plan
    from ckpt_tools.runs.opening import read_checkpoint
    from ckpt_tools.stores.s3.destination import MAX_PARTS, MIN_COPY_BYTES
    from fixtures.synthetic import dcp

    with tempfile.TemporaryDirectory() as folder:
        source, manifest = read_checkpoint(dcp(model.shapes(), ranks, Path(folder, "dcp"), dtype), ReadOptions())
        layout = written_format("safetensors").layout(manifest, WriteOptions())
        rules = CopyRules(MIN_COPY_BYTES, MAX_PARTS)
        plans = (Plan(manifest, layout, rules.task_bytes, 1, copies=rules), Plan(manifest, layout, PART_BYTES, 1))
        now, every_8 = (_bytes_copied(plan, source.store) / layout.size_bytes for plan in plans)
    return now, every_8


def _bytes_copied(plan: Any, store: Any) -> int:
    """Bytes of the tasks that a worker would have copied."""
    from ckpt_tools.planning.tasks import steps
    from ckpt_tools.stores.file_destination import StoreDestination
    from ckpt_tools.stores.memory import MemoryStore
    from ckpt_tools.stores.s3.destination import MIN_COPY_BYTES
    from ckpt_tools.transfer.crc_board import LocalBoard
    from ckpt_tools.transfer.execute import Worker
    from ckpt_tools.transfer.tensor_reader import TensorReader

    target, files = StoreDestination(MemoryStore({})), plan.layout.files
    worker = Worker(plan, TensorReader(store, plan.task_bytes), target, LocalBoard())
    large = (task for task in plan.tasks() if task.num_bytes >= MIN_COPY_BYTES)
    return sum(task.num_bytes for task in large if worker._single(list(steps(files[task.file], task))) is not None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.s3", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["convert", "shares", "plain", "fsspec"])
    parser.add_argument("urls", nargs="*")
    parser.add_argument("--size", type=int, default=SIZE, help="size of the checkpoint in bytes")
    parser.add_argument("--hidden", type=int, help="width of the model")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks that save it, with --hidden")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "benchmarks")
    parser.add_argument("--works", nargs="+", default=list(WORKS))
    given = parser.parse_args()
    match given.what:
        case "convert":
            known = Cache(given.cache).get("dcp-weights", given.size) if given.hidden is None else None
            made = known or wide(given.cache, given.size, given.hidden, given.ranks)
            convert(made, given.rounds, given.works)
        case "shares":
            shares()
        case "plain":
            plain(*given.urls)
        case "fsspec":
            by_fsspec(*given.urls)


if __name__ == "__main__":
    main()
