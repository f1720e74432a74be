"""What the documents say that each extra is enough for, done in an environment that has the wheel and that extra."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from fixtures.corpus import make
from tests.packaging.environments import Environment, clean_variables
from tests.support.hub_server import running_hub
from tests.support.s3_server import BUCKET, S3Server

TINY = ["--num-samples=64", "--epochs=1", "--num-workers=2", "--batch-size=32"]
EPOCH = "checkpoints/epoch_0001"

LOAD_INTO = """
import sys
import torch.distributed.checkpoint as dcp
from torch import nn
from ckpt_tools import load_into, storage_reader
whole, layer = sys.argv[1:]
first, second = nn.Module(), nn.Module()
for model in (first, second):
    model.conv_proj = nn.Conv2d(1, 128, 7)
dcp.load(first.state_dict(), storage_reader=storage_reader(whole))
load_into(second, None, layer)
assert first.conv_proj.weight.equal(second.conv_proj.weight)
"""


@dataclass(frozen=True, slots=True)
class Material:
    """A folder with one model as a file and as a DCP of two ranks, images and keys to sign with; and a way to an S3
    server."""

    folder: Path
    start_s3: Callable[[], S3Server]

    @property
    def model(self) -> Path:
        return self.folder / "model.safetensors"

    @property
    def dcp(self) -> Path:
        return self.folder / "dcp"

    @property
    def images(self) -> Path:
        return self.folder / "images"


Check = Callable[[Environment, Material], None]


def converter(environment: Environment, material: Material) -> None:
    """Every command of the converter, without any extra."""
    dcp, zero, file = material.dcp, environment.work / "zero2", environment.work / "model.safetensors"
    assert "dcp" in environment.succeed("inspect", dcp)
    environment.succeed("plan", dcp, file)
    environment.succeed("convert", dcp, file, "--checksum")
    environment.succeed("verify", dcp, file)
    environment.succeed("verify", file)
    environment.succeed("diff", dcp, file)
    environment.succeed("convert", dcp, zero, "--to", "zero2", "--world-size", "3")
    environment.succeed("reshard", zero, environment.work / "zero2-on-2", "--world-size", "2")
    environment.succeed("consolidate", zero, environment.work / "model.pt")
    environment.succeed("scan", zero)
    environment.succeed("clean", environment.work / "model.pt")
    assert "universal" in environment.succeed("formats")
    assert {"train", "predict", "serve"} <= set(environment.succeed("--help").split())


def loading(environment: Environment, material: Material) -> None:
    layer = environment.work / "layer.pt"
    environment.succeed("convert", material.dcp, layer, "--include", "conv_proj.*")
    done = environment.run_python("-c", LOAD_INTO, material.dcp, layer)
    assert done.returncode == 0, done.stderr


def training(environment: Environment, _material: Material) -> None:
    """Both launchers and both engines. Workers find the package by the name that it has in a wheel."""
    for launcher, engine in (("torchrun", "zero2"), ("ray", "fsdp2")):
        out = environment.work / launcher
        environment.succeed("train", f"--engine={engine}", f"--launcher={launcher}", f"--out={out}", *TINY)
        assert json.loads((out / "result.json").read_text())["total"] == 360
        environment.succeed("inspect", out / EPOCH)
    misfit = environment.run("train", "--engine=fsdp2", "--num-workers=3", f"--out={environment.work / 'no'}")
    assert misfit.returncode == 2 and "does not divide over 3 workers" in misfit.stderr


def training_on_s3(environment: Environment, material: Material) -> None:
    server = material.start_s3()
    storage = f"s3://{BUCKET}/{server.new_prefix()}run"
    words = ["--engine=fsdp2", f"--out={environment.work / 'run'}", f"--storage={storage}", *TINY]
    environment.succeed("train", *words, **server.environment)
    environment.succeed("inspect", f"{storage}/{EPOCH}", **server.environment)


def inference(environment: Environment, material: Material) -> None:
    rows = environment.work / "rows.jsonl"
    environment.succeed("predict", "--model", material.model, "--input", "digits", "--output", rows)
    assert len(rows.read_text().splitlines()) == 360
    table = environment.work / "rows.parquet"
    environment.succeed("predict", "--model", material.model, "--input", material.images, "--output", table)
    assert table.read_bytes().startswith(b"PAR1")
    assert environment.run("predict", "--model=missing.pt", "--input=digits", "--output=x.jsonl").returncode == 3
    with _serving(environment, material.model) as address:
        image = next(material.images.iterdir())
        answer = httpx.post(f"{address}/predict", files={"image": image.read_bytes()}, timeout=60)
    assert answer.json()["label"] in range(10), answer.text


@contextmanager
def _serving(environment: Environment, model: Path, *options: str) -> Iterator[str]:
    """The address of ``ckpt-tools serve`` on a port that the system chose."""
    command = [environment.command, "serve", model, "--port=0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_variables()) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().removeprefix("serving on ").strip()
        finally:
            server.terminate()


def ray_cluster(environment: Environment, material: Material) -> None:
    environment.succeed("convert", material.dcp, environment.work / "ray.safetensors", "--runner", "ray", "--workers=2")


def ray_service(environment: Environment, material: Material) -> None:
    with _serving(environment, material.model, "--runner=ray") as address:
        answer = httpx.get(f"{address}/v2/models/model", timeout=60)
    assert answer.json()["parameters"]["format"] == "safetensors", answer.text


def s3(environment: Environment, material: Material) -> None:
    server = material.start_s3()
    there = f"s3://{BUCKET}/{server.new_prefix()}model.safetensors"
    environment.succeed("convert", material.dcp, there, **server.environment)
    environment.succeed("verify", material.dcp, there, **server.environment)


def hub(environment: Environment, material: Material) -> None:
    for name in ("model", "empty"):
        (environment.work / "hub" / "org" / name).mkdir(parents=True)
    shutil.copy(material.model, environment.work / "hub" / "org" / "model")
    with running_hub(environment.work / "hub") as running:
        variables = {"HF_ENDPOINT": running.endpoint, "HF_HUB_DISABLE_XET": "1"}
        environment.succeed("convert", "hf://org/model", "hf://org/empty/dcp", "--to", "dcp", **variables)
        environment.succeed("verify", material.dcp, "hf://org/empty/dcp", **variables)


def signatures(environment: Environment, material: Material) -> None:
    signature = environment.work / "model.sig"
    environment.succeed("sign", material.dcp, "--private-key", material.folder / "key.pem", "--signature", signature)
    environment.succeed("verify", material.dcp, "--public-key", material.folder / "key.pub", "--signature", signature)


def orbax(environment: Environment, _material: Material) -> None:
    environment.succeed("convert", make("orbax").source, environment.work / "orbax.safetensors")


def zstd(environment: Environment, _material: Material) -> None:
    environment.succeed("convert", make("dcp-zstd").source, environment.work / "zstd.safetensors")


CHECKS: dict[str, Check] = {"": converter, "torch": loading, "train": training, "serve": inference}
CHECKS |= {"ray": ray_cluster, "ray-serve": ray_service, "hub": hub, "s3": s3, "sign": signatures}
CHECKS |= {"orbax": orbax, "zstd": zstd, "train,s3": training_on_s3}
"""By the extras that are installed; "" for none."""
