"""A conversion from S3 to S3, against torch's own reader and against moving the same bytes and nothing else.

`python -m benchmarks.s3 convert [--size BYTES] [--rounds N]` makes a DCP checkpoint of FSDP2, puts it on a SeaweedFS
server of its own, and has each of these make an object of the same tensors, in turns:

- ours: `ckpt-tools convert s3://... s3://... --to safetensors`; what of that the server copied itself is printed
- fsspec: torch's FsspecReader loads it, safetensors saves it to a local file, s3fs uploads that
- plain: ranges of 8 MiB of the input are downloaded and uploaded as parts, by as many threads, through the same client

What a service can copy depends on how large shards are, as a part has at least 5 MiB. `--size` alone is the suite's own
Llama, as deep as published models of its size are, of 4 ranks: 2 GB of it are shards of 1.4, 3.9 and 44 MiB. `--hidden`
and `--ranks` make another, as wide as that and as deep as the size allows. Of 2,048 on 2 ranks those of the layers have
8 and 22 MiB, as those of Llama 2 7B on 8 ranks do.

`python -m benchmarks.s3 shares` counts what of models could be copied, by the planner alone and without a server.

Server and client share the machine: the rates are of both together, and only their ratios mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.inputs import BUILD_SECONDS, WEIGHT_BYTES, Cache
from benchmarks.llama import Llama
from benchmarks.measure import Usage, measured
from tests.support.s3_server import BUCKET, S3Server, running_s3_server

ROOT = Path(__file__).parent.parent
PART_BYTES, NUM_THREADS = 8 << 20, 8
TIME_LIMIT = 900.0
SIZE = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Work:
    """A way to make the output, as a command of the input's and the output's URL."""

    name: str
    words: tuple[str, ...]
    after: tuple[str, ...] = ()

    def command(self, source: str, out: str) -> list[str]:
        return [sys.executable, "-m", *self.words, source, out, *self.after]


WORKS = (
    Work("ours", ("ckpt_tools", "convert"), ("--to", "safetensors", "--quiet", "--json")),
    Work("fsspec", ("benchmarks.s3", "fsspec")),
    Work("plain", ("benchmarks.s3", "plain")),
)


def wide(cache: Path, size: int, hidden: int, ranks: int) -> Path:
    """A DCP of about so many bytes and so wide, made if need be."""
    empty = Llama(hidden, 0)
    layers = max(1, round((size / WEIGHT_BYTES - empty.num_elements) / empty.elements_per_layer))
    path = cache / f"dcp-weights-{hidden}x{layers}-{ranks}-ranks"
    if not path.exists():
        partial_path = path.with_name(f"{path.name}.partial")
        shutil.rmtree(partial_path, ignore_errors=True)
        words = ["-m", "benchmarks.s3", "build", str(partial_path), "--hidden", str(hidden), "--layers", str(layers)]
        subprocess.run([sys.executable, *words, "--ranks", str(ranks)], cwd=ROOT, check=True, timeout=BUILD_SECONDS)
        partial_path.rename(path)
    return path


def build(out: str, llama: Llama, ranks: int) -> None:
    """The suite's own way to make weights, by another number of ranks."""
    from benchmarks.builders import rank_main
    from fixtures.launch import Pool

    with tempfile.TemporaryDirectory() as logs, Pool(ranks, log_dir=Path(logs)) as pool:
        pool.run(rank_main, "dcp-weights", out, llama, seconds=BUILD_SECONDS)


def convert(made: Path, rounds: int, names: list[str]) -> None:
    """Every work in turns, on a server that lives as long."""
    size = sum(path.stat().st_size for path in made.iterdir())
    with running_s3_server() as server, tempfile.TemporaryDirectory() as folder:
        source = f"s3://{BUCKET}/in"
        upload(server, "in/", made)
        env = {**os.environ, **server.environment, "TMPDIR": folder}
        found: dict[str, list[Usage]] = {}
        for number in range(rounds):
            for work in (work for work in WORKS if work.name in names):
                out = f"s3://{BUCKET}/out-{work.name}-{number}"
                usage = measured(
                    work.command(source, out), Path(folder, "log"), time_limit=TIME_LIMIT, cwd=ROOT, env=env
                )
                if usage.exit_code:
                    raise SystemExit(f"{work.name} failed:\n{Path(folder, 'log').read_text()[-2000:]}")
                found.setdefault(work.name, []).append(usage)
                said = said_of_copies(Path(folder, "log").read_text()) if work.name == "ours" else ""
                print(described(work.name, usage, size) + said, flush=True)
                remove(server, f"out-{work.name}-{number}")
    summarize(found)


def described(name: str, usage: Usage, size: int) -> str:
    rate = size / usage.seconds / 1e6
    return (
        f"{name:8} {usage.seconds:7.2f} s {rate:6.0f} MB/s, cpu {usage.cpu_seconds:6.2f} s, "
        f"peak {usage.peak_bytes / 1e6:6.0f} MB, written to disk {usage.disk_write_bytes / 1e6:6.0f} MB"
    )


def said_of_copies(report: str) -> str:
    """What of the output the service copied, and what came here of the input, as ours says with --json."""
    done = json.loads(report)
    copied, read = (done[name] / done["bytes_written"] for name in ("bytes_copied", "bytes_read"))
    return f", copied {copied:.1%}, read {read:.1%}"


def summarize(found: Mapping[str, list[Usage]]) -> None:
    medians = {name: statistics.median(usage.seconds for usage in usages) for name, usages in found.items()}
    for name, seconds in medians.items():
        print(f"median {name:8} {seconds:7.2f} s, ours is {seconds / medians['ours']:.2f} times as fast")


def upload(server: S3Server, prefix: str, folder: Path) -> None:
    """As `S3Server.upload`, in constant memory."""
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


def remove(server: S3Server, prefix: str) -> None:
    for key in server.keys(prefix):
        server.client().delete_object(Bucket=BUCKET, Key=prefix + key)


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
    """botocore's, as fast as it gets."""
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
    """What a user of torch does: load all of it, save it, upload it."""
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
    """What of one safetensors file a service copies, and would copy if files were cut every 8 MiB."""
    from fixtures.synthetic import DTYPES, Model

    suite, wide = Llama.of(SIZE // WEIGHT_BYTES), Llama(2048, 5)
    models = {"Llama 2 7B": Model(32, 4096, 11008, 32000)}
    models |= {
        f"Llama of {each.hidden}": Model(each.layers, each.hidden, each.ffn, each.vocab) for each in (suite, wide)
    }
    for name, model in models.items():
        for kind, dtype in DTYPES.items():
            for ranks in (1, 2, 4, 8, 16, 64):
                now, every_8 = share_copied(model, ranks, dtype)
                print(f"{name} {kind:5} {ranks:3} ranks: {now:6.1%}, {every_8:6.1%} at 8 MiB", flush=True)


def share_copied(model: Any, ranks: int, dtype: Any) -> tuple[float, float]:
    """As it is planned, and if files were cut every 8 MiB."""
    from ckpt_tools.core.options import ReadOptions, WriteOptions
    from ckpt_tools.formats.index import written_format
    from ckpt_tools.planning.plan import CopyRules, Plan
    from ckpt_tools.runs.opening import read_checkpoint
    from ckpt_tools.stores.s3.destination import MAX_PARTS, MIN_COPY_BYTES
    from fixtures.synthetic import dcp

    with tempfile.TemporaryDirectory() as folder:
        source, manifest = read_checkpoint(dcp(model.shapes(), ranks, Path(folder, "dcp"), dtype), ReadOptions())
        layout, rules = (
            written_format("safetensors").layout(manifest, WriteOptions()),
            CopyRules(MIN_COPY_BYTES, MAX_PARTS),
        )
        plans = (
            Plan(manifest, layout, rules.task_bytes, 1, copies=rules),
            Plan(manifest, layout, PART_BYTES, 1),
        )
        now, every_8 = (_bytes_copied(plan, source.store) / layout.size_bytes for plan in plans)
    return now, every_8


def _bytes_copied(plan: Any, store: Any) -> int:
    """Of the tasks that a worker would have copied."""
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
    parser.add_argument("what", choices=["convert", "shares", "plain", "fsspec", "build"])
    parser.add_argument("urls", nargs="*")
    parser.add_argument("--size", type=int, default=SIZE, help="bytes of the checkpoint")
    parser.add_argument("--hidden", type=int, help="the model's width")
    parser.add_argument("--ranks", type=int, default=2, help="with --hidden: how many save it")
    parser.add_argument("--layers", type=int, default=1, help="for build alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "benchmarks")
    parser.add_argument("--works", nargs="+", default=[work.name for work in WORKS])
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
        case "build":
            build(given.urls[0], Llama(given.hidden, given.layers), given.ranks)


if __name__ == "__main__":
    main()
