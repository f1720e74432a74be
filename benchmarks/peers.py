"""Peers without a command line, as functions: `python -m benchmarks.peers NAME SRC DST`.

`works.toml` has the commands of all peers.
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

WEIGHTS = "model.safetensors"
"""File of weights that peers and we write."""

PART_BYTES, NUM_THREADS = 8 << 20, 16
"""How files are moved from and to S3; small ones by twice as many."""


def fill_command(command: str, source: Path, out: Path) -> list[str]:
    """The command line with the places in it."""
    latest = source / "latest"
    tag = latest.read_text().strip() if latest.exists() else ""
    return [sys.executable, *(word.format(source=source, out=out, tag=tag) for word in command.split())]


def find_only_file(folder: Path) -> Path:
    """The file of an input of one file."""
    (file,) = folder.iterdir()
    return file


def merge_fsdp_weights(source: str, out: str) -> None:
    from accelerate.utils import merge_fsdp_weights as merge

    merge(source, out, safe_serialization=True)


def consolidate_safetensors_files(source: str, out: str) -> None:
    from safetensors import safe_open
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files as consolidate

    names: set[str] = set()
    for path in Path(source).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    consolidate(source, out, dict.fromkeys(sorted(names), 1), num_threads=os.cpu_count() or 1)


def merge_and_unload(source: str, out: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(Path(source, "base"), dtype="auto")
    PeftModel.from_pretrained(base, Path(source, "adapter")).merge_and_unload().save_pretrained(out)


def check_merged(source: str, out: str) -> None:
    """Raises AssertionError unless ``out`` is the base model of ``source`` with its adapter, a tensor at a time."""
    import json

    import torch
    from safetensors import safe_open

    paths = (Path(source, "base", WEIGHTS), Path(source, "adapter", f"adapter_{WEIGHTS}"), Path(out, WEIGHTS))
    files: list[Any] = [safe_open(path, framework="pt") for path in paths]
    base, adapter, merged = files
    names, known = set(base.keys()), set(adapter.keys())
    settings = json.loads(Path(source, "adapter", "adapter_config.json").read_text())
    assert names == set(merged.keys()), "other names"
    for name in names:
        wanted, module = base.get_tensor(name), f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in known:
            a, b = (adapter.get_tensor(f"{module}.lora_{part}.weight") for part in "AB")
            wanted = (wanted + b @ a * (settings["lora_alpha"] / settings["r"])).to(wanted.dtype)
        torch.testing.assert_close(merged.get_tensor(name), wanted, rtol=2**-7, atol=2**-20)


def safetensors_to_dcp(source: str, out: str) -> None:
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict_saver import save

    save(load_file(find_only_file(Path(source))), checkpoint_id=out, no_dist=True)


def dcp_by_3_ranks(source: str, out: str) -> None:
    """A job on 3 ranks that loads a checkpoint of 8 and saves its own: torch has no tool that reshards files."""
    from fixtures.launch import Pool

    with tempfile.TemporaryDirectory() as logs, closing(Pool(3, log_dir=Path(logs))) as pool:
        pool.run(load_and_save, source, out, seconds=3600)


def load_and_save(source: str, out: str) -> None:
    """Load every tensor, cut along dim 0 over the ranks, and save the same tree."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, empty

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, object] = {}
    metadata = FileSystemReader(source).read_metadata()
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            state[key] = None
        elif len(entry.size):
            state[key] = empty(*entry.size, dtype=entry.properties.dtype, device_mesh=mesh, placements=[Shard(0)])
        else:
            state[key] = torch.empty((), dtype=entry.properties.dtype)
    load(state, checkpoint_id=source)
    save(unflatten_state_dict(state, metadata.planner_data), checkpoint_id=out)


def make_s3_client() -> Any:
    """botocore's, without checksums and signatures of bodies."""
    import botocore.session
    from botocore.config import Config

    config = Config(
        max_pool_connections=2 * NUM_THREADS,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"payload_signing_enabled": False},
    )
    return botocore.session.Session().create_client("s3", config=config)


def parse_s3_url(url: str) -> dict[str, str]:
    bucket, key = url.removeprefix("s3://").split("/", 1)
    return {"Bucket": bucket, "Key": key}


def move_s3_objects(source: str, out: str) -> None:
    """Download and upload every byte of the input's files."""
    at = parse_s3_url(f"{source}/")
    for found in make_s3_client().list_objects_v2(Bucket=at["Bucket"], Prefix=at["Key"])["Contents"]:
        move_file(f"s3://{at['Bucket']}/{found['Key']}", f"{out}/{found['Key'].removeprefix(at['Key'])}")


def move_file(source: str, out: str) -> None:
    """Copy a file from or to S3, or both, range by range."""
    client = make_s3_client()
    if source.startswith("s3://"):
        size = client.head_object(**parse_s3_url(source))["ContentLength"]

        def read_range(start: int) -> bytes:
            wanted = f"bytes={start}-{start + PART_BYTES - 1}"
            return bytes(client.get_object(**parse_s3_url(source), Range=wanted)["Body"].read())
    else:
        size, file = Path(source).stat().st_size, os.open(source, os.O_RDONLY)

        def read_range(start: int) -> bytes:
            return os.pread(file, PART_BYTES, start)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        if not out.startswith("s3://"):
            file = os.open(out, os.O_WRONLY | os.O_CREAT)
            list(pool.map(lambda start: os.pwrite(file, read_range(start), start), range(0, size, PART_BYTES)))
            return
        upload = parse_s3_url(out)
        upload["UploadId"] = client.create_multipart_upload(**upload)["UploadId"]

        def move_part(start: int) -> dict[str, Any]:
            number, body = start // PART_BYTES + 1, read_range(start)
            return {"PartNumber": number, "ETag": client.upload_part(**upload, PartNumber=number, Body=body)["ETag"]}

        parts = list(pool.map(move_part, range(0, size, PART_BYTES)))
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})


def put_s3_files(source: str, out: str) -> None:
    """Put all files of a folder, which are small."""
    client, paths = make_s3_client(), [path for path in Path(source).rglob("*") if path.is_file()]

    def put_file(path: Path) -> None:
        client.put_object(**parse_s3_url(f"{out}/{path.relative_to(source)}"), Body=path.read_bytes())

    with ThreadPoolExecutor(2 * NUM_THREADS) as pool:
        list(pool.map(put_file, paths))


def load_and_save_by_fsspec(source: str, out: str) -> None:
    """The usual way in torch: load all of it, save it, upload it."""
    import fsspec
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import fsspec_filesystem
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    reader = fsspec_filesystem.FsspecReader(source)
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        save_file(flatten_state_dict(state)[0], path)
        fsspec.filesystem("s3").put_file(str(path), f"{out.removeprefix('s3://')}/{path.name}")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
