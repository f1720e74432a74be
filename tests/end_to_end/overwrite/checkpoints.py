"""One tiny training state in every format, as the bytes of its files."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import ckpt_tools
from tests.support.files import files_below

FOLDERS = ("dcp", "zero1", "zero2", "zero3", "universal", "safetensors", "torch", "sharded")
SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt"}
TAG = "step1"

Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Made:
    """By format, the files of a folder; by the suffix of a file, its bytes; lists of digests and a signature."""

    folders: Mapping[str, Files]
    files: Mapping[str, bytes]
    digests: bytes


@cache
def made() -> Made:
    with TemporaryDirectory() as name:
        root = Path(name)
        torch.save(_state(), root / "made.pt")
        for each in FOLDERS:
            to = "safetensors" if each == "sharded" else each
            cut = {"max_shard_size": "100"} if each == "sharded" else {}
            options = {"tag": TAG} if each.startswith(("zero", "universal")) else {}
            size = {"world_size": 2} if each == "dcp" or each.startswith("zero") else {}
            ckpt_tools.convert(root / "made.pt", root / each, to=to, **cut, **options, **size)
        for suffix in SUFFIXES.values():
            ckpt_tools.convert(root / "made.pt", root / f"one{suffix}")
        ckpt_tools.checksum(root / "one.pt", output=root / "list.json")
        return Made(
            {each: files_below(root / each) for each in FOLDERS},
            {suffix: (root / f"one{suffix}").read_bytes() for suffix in SUFFIXES.values()},
            (root / "list.json").read_bytes(),
        )


def _state() -> dict[str, object]:
    model = torch.nn.Linear(5, 7)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
