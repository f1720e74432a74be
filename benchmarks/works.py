"""The works: conversions, their contestants and targets."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import peers
from benchmarks.peers import WEIGHTS

ROPE = Path(__file__).with_name("rope.toml")

OURS, COPY = "ckpt-tools", "cp -r"
UNCAST, UNMERGED = "ckpt-tools without the cast", "ckpt-tools without the adapter"

LORA = "lora"
"""Kind of input that is a folder with a base model and an adapter."""

LARGE_BYTES = 4_000_000_000
"""Promises are about checkpoints of at least this size; start-up dominates smaller ones."""

TO_COPY, TO_COPY_SYNCED, TO_PEER = 0.9, 1.05, 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """Promised ratios of medians; None: nothing was promised.

    `copy`: our time over that of `cp -r`, `copy_synced` with fsync of both; `peer`: the best peer's time over ours;
    `plain`: our time over that of the same work without its cast or adapter.
    """

    copy: float | None = None
    copy_synced: float | None = None
    peer: float | None = None
    plain: float | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """A conversion of an input of kind `source` to `output` (`.` for a folder), and the peer that can do it too."""

    name: str
    about: str
    source: str
    output: str
    target: Target = Target()
    peer: str = ""
    options: str = ""
    scale: int = 1
    """Size of its input, in units of ``--size``."""

    @property
    def plain(self) -> str:
        """The contestant that does the same without a cast or adapter, if there is one."""
        return UNMERGED if self.source == LORA else UNCAST if "--dtype" in self.options else ""

    @property
    def contestants(self) -> tuple[str, ...]:
        return tuple(filter(None, (OURS, COPY, self.plain, self.peer)))

    def command(self, contestant: str, source: Path, copied: Path, out: Path, *, synced: bool) -> list[str]:
        """The contestant's command line; `cp -r` copies `copied`, and the others write files into the folder `out`."""
        if contestant == COPY:
            if not synced:
                return ["cp", "-r", str(copied), str(out)]
            # With fsync of every file and folder of the copy.
            return ["sh", "-c", 'cp -r "$1" "$2" && find "$2" -exec sync {} +', "copy", str(copied), str(out)]
        if contestant in peers.COMMANDS:
            return peers.COMMANDS[contestant](source, out)
        options = self._options(contestant, ("--to", "--state", "--world-size", "--dtype", "--recipe"))
        is_merge = contestant == OURS and self.source == LORA
        inputs = (source / "base", source / "adapter") if is_merge else (self._input(source),)
        words = _ckpt_tools("merge-lora" if is_merge else "convert", *inputs, out / self.output)
        return [*words, *options, *["--fsync"] * synced]

    def verification(self, contestant: str, source: Path, out: Path) -> list[str]:
        """The command line that compares the output with the source's tensors bit for bit."""
        if self.source == LORA and contestant != UNMERGED:
            return peers.function("check_merged")(source, out)
        options, written = self._options(contestant, ("--dtype", "--state", "--recipe")), out / self.output
        return [*_ckpt_tools("verify", self._input(source), written if written.exists() else out), *options]

    def _options(self, contestant: str, names: tuple[str, ...]) -> list[str]:
        words = shlex.split(self.options)
        pairs = (pair for pair in zip(words[::2], words[1::2], strict=True) if pair[0] in names)
        return [word for pair in pairs if (contestant, pair[0]) != (UNCAST, "--dtype") for word in pair]

    def _input(self, source: Path) -> Path:
        if self.source == LORA:
            return source / "base"
        return peers.only_file(source) if self.source in ("safetensors", "torch") else source


def _ckpt_tools(command: str, *places: Path) -> list[str]:
    return [sys.executable, "-m", "ckpt_tools", command, *map(str, places), "--quiet"]


_EXPORT = Target(copy=TO_COPY, copy_synced=TO_COPY_SYNCED, peer=TO_PEER)
_AS_FILE = replace(_EXPORT, peer=None)
_OF_PEER = Target(peer=TO_PEER)
_CAST = Target(peer=TO_PEER, plain=1.2)

_OF_ONE_SIZE = (
    Work(
        "dcp-safetensors", "DCP, 4 ranks, weights → safetensors", "dcp-weights", WEIGHTS, _EXPORT, "merge_fsdp_weights"
    ),
    Work(
        "hf-safetensors",
        "DCP in Hugging Face shards, 4 ranks → safetensors",
        "hf-weights",
        WEIGHTS,
        _EXPORT,
        "consolidate_safetensors_files",
    ),
    Work("dcp-torch", "DCP, 4 ranks, with AdamW → .pt", "dcp", "training.pt", _EXPORT, "dcp_to_torch", "--state all"),
    Work("dcp-zero3", "DCP, 4 ranks, with AdamW → ZeRO-3, 4 ranks", "dcp", ".", options="--to zero3 --world-size 4"),
    Work("zero3-safetensors", "ZeRO-3, weights → safetensors, fp32", "zero3", WEIGHTS, _EXPORT, "zero_to_fp32"),
    Work(
        "zero3-safetensors-all",
        "ZeRO-3, with AdamW → safetensors",
        "zero3",
        "training.safetensors",
        _AS_FILE,
        options="--state all",
    ),
    Work(
        "zero3-bf16",
        "ZeRO-3, weights → safetensors, bf16",
        "zero3",
        WEIGHTS,
        _CAST,
        "zero_to_torch bf16",
        "--dtype bfloat16",
    ),
    Work("zero2-safetensors", "ZeRO-2, weights → safetensors, fp32", "zero2", WEIGHTS, _EXPORT, "zero_to_fp32"),
    Work(
        "zero3-universal",
        "ZeRO-3, with AdamW → universal",
        "zero3",
        ".",
        Target(peer=10.0),
        "ds_to_universal",
        "--to universal",
    ),
    Work(
        "safetensors-dcp",
        "safetensors → DCP, 4 ranks",
        "safetensors",
        ".",
        _OF_PEER,
        "load_file, dcp.save",
        "--to dcp --world-size 4",
    ),
    Work(
        "torch-dcp", ".pt with AdamW → DCP, 4 ranks", "torch", ".", _OF_PEER, "torch_to_dcp", "--to dcp --world-size 4"
    ),
    Work(
        "dcp8-dcp3",
        "DCP, 8 ranks, with AdamW → DCP, 3 ranks",
        "dcp8",
        ".",
        peer="dcp.load, dcp.save by 3 ranks",
        options="--to dcp --world-size 3",
    ),
    Work(
        "experts-hub",
        "DCP of a mixture of experts, 4 ranks → safetensors with each expert's own tensors",
        "dcp-experts",
        ".",
        Target(copy=1.3),
        options="--to safetensors --recipe qwen3_moe",
    ),
    Work(
        "lora",
        "safetensors in bf16 and a LoRA adapter of rank 16 → safetensors, merged",
        LORA,
        ".",
        Target(plain=1.5, peer=TO_PEER),
        "merge_and_unload",
        "--to safetensors",
    ),
    Work(
        "megatron-hub",
        "Megatron-Core torch_dist of stacked layers, 4 ranks → safetensors of the hub",
        "megatron",
        ".",
        Target(copy=1.3),
        options="--to safetensors --recipe megatron_llama",
    ),
    Work(
        "rope-hub",
        "DCP, 4 ranks, rows of query and key in pairs → safetensors with halves",
        "dcp-weights",
        ".",
        Target(copy=2.0),
        options=f"--to safetensors --recipe {shlex.quote(str(ROPE))}",
    ),
    Work(
        "tp-safetensors",
        "DCP, 4 ranks, cut along the inner axis → safetensors",
        "tp-weights",
        WEIGHTS,
        Target(copy=1.5),
        "merge_fsdp_weights",
    ),
)
"""In the order of measurement: works of one input together, since inputs are deleted where the disk is full."""

_OF_TWO_SIZES = ("dcp-safetensors", "dcp-torch", "zero3-safetensors-all")
"""Start-up and the kernel's limit of dirty pages make size matter."""

WORKS = (
    *_OF_ONE_SIZE,
    *(
        replace(work, name=f"{work.name}-x2", about=f"{work.about}, twice the size", scale=2)
        for work in _OF_ONE_SIZE
        if work.name in _OF_TWO_SIZES
    ),
)
