"""The works: what is converted into what, by whom, and what was promised."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import peers
from benchmarks.inputs import KINDS

OURS, COPY, UNCAST = "ckpt-tools", "cp -r", "ckpt-tools without the cast"

LARGE_BYTES = 4_000_000_000
"""Promises are about checkpoints of at least this size; of smaller ones start-up is a good part."""

TO_COPY, TO_COPY_SYNCED, TO_PEER = 0.9, 1.05, 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """What was promised, as ratios of medians; None where nothing was.

    `copy`: our time over that of `cp -r`, `copy_synced` with fsync of both; `peer`: the best peer's time over ours;
    `uncast`: our time over that of the same work without its cast.
    """

    copy: float | None = None
    copy_synced: float | None = None
    peer: float | None = None
    uncast: float | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """A conversion of an input of kind `source` to `output` (`.` for a folder) with `options`, and who else can do
    it."""

    name: str
    about: str
    source: str
    output: str
    options: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    target: Target = Target()
    scale: int = 1
    """How many times the size that is asked for its input has."""

    def __post_init__(self) -> None:
        assert self.source in KINDS
        assert set(self.rivals) <= set(peers.COMMANDS)

    @property
    def contestants(self) -> tuple[str, ...]:
        uncast = (UNCAST,) if "--dtype" in self.options else ()
        return (OURS, COPY, *uncast, *self.rivals)

    def command(self, contestant: str, source: Path, copied: Path, out: Path, *, synced: bool) -> list[str]:
        """The command line with which a contestant does the work; `copied` is what `cp -r` copies. `out` exists only
        for contestants that write files into it."""
        if contestant == COPY:
            return _copy(copied, out, synced=synced)
        if contestant in peers.COMMANDS:
            return peers.COMMANDS[contestant](source, out)
        options = self._uncast_options() if contestant == UNCAST else self.options
        return [*_ckpt_tools("convert", self._input(source), out / self.output), *options, *["--fsync"] * synced]

    def verification(self, contestant: str, source: Path, out: Path) -> list[str]:
        """The command line that says whether what was written holds the source's tensors bit for bit."""
        options = self._uncast_options() if contestant == UNCAST else self.options
        shared = [word for pair in _pairs(options) if pair[0] in ("--dtype", "--state") for word in pair]
        written = out / self.output
        return [*_ckpt_tools("verify", self._input(source), written if written.exists() else out), *shared]

    def _uncast_options(self) -> tuple[str, ...]:
        return tuple(word for pair in _pairs(self.options) if pair[0] != "--dtype" for word in pair)

    def _input(self, source: Path) -> Path:
        return peers.only_file(source) if self.source in ("safetensors", "torch") else source


def can_sync(contestant: str) -> bool:
    """Whether the contestant is measured with fsync too. Peers have no such option (DCP's writer always syncs)."""
    return contestant not in peers.COMMANDS


def _pairs(options: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    return zip(options[::2], options[1::2], strict=True)


def _ckpt_tools(command: str, source: Path, target: Path) -> list[str]:
    return [sys.executable, "-m", "ckpt_tools", command, str(source), str(target), "--quiet"]


def _copy(copied: Path, out: Path, *, synced: bool) -> list[str]:
    """`sync` with names is fsync of each of them, folders too."""
    if not synced:
        return ["cp", "-r", str(copied), str(out)]
    return ["sh", "-c", 'cp -r "$1" "$2" && find "$2" -exec sync {} +', "copy", str(copied), str(out)]


_EXPORT = Target(copy=TO_COPY, copy_synced=TO_COPY_SYNCED, peer=TO_PEER)

_OF_ONE_SIZE = (
    Work(
        "dcp-safetensors",
        "DCP, 4 ranks, weights → safetensors",
        "dcp-weights",
        peers.WEIGHTS,
        rivals=("merge_fsdp_weights",),
        target=_EXPORT,
    ),
    Work(
        "hf-safetensors",
        "DCP in Hugging Face shards, 4 ranks → safetensors",
        "hf-weights",
        peers.WEIGHTS,
        rivals=("consolidate_safetensors_files",),
        target=_EXPORT,
    ),
    Work(
        "dcp-torch",
        "DCP, 4 ranks, with AdamW → .pt",
        "dcp",
        "training.pt",
        ("--state", "all"),
        rivals=("dcp_to_torch",),
        target=_EXPORT,
    ),
    Work("dcp-zero3", "DCP, 4 ranks, with AdamW → ZeRO-3, 4 ranks", "dcp", ".", ("--to", "zero3", "--world-size", "4")),
    Work(
        "zero3-safetensors",
        "ZeRO-3, weights → safetensors, fp32",
        "zero3",
        peers.WEIGHTS,
        rivals=("zero_to_fp32",),
        target=_EXPORT,
    ),
    Work(
        "zero3-safetensors-all",
        "ZeRO-3, with AdamW → safetensors",
        "zero3",
        "training.safetensors",
        ("--state", "all"),
        target=Target(copy=TO_COPY, copy_synced=TO_COPY_SYNCED),
    ),
    Work(
        "zero3-bf16",
        "ZeRO-3, weights → safetensors, bf16",
        "zero3",
        peers.WEIGHTS,
        ("--dtype", "bfloat16"),
        rivals=("zero_to_torch bf16",),
        target=Target(peer=TO_PEER, uncast=1.2),
    ),
    Work(
        "zero2-safetensors",
        "ZeRO-2, weights → safetensors, fp32",
        "zero2",
        peers.WEIGHTS,
        rivals=("zero_to_fp32",),
        target=_EXPORT,
    ),
    Work(
        "zero3-universal",
        "ZeRO-3, with AdamW → universal",
        "zero3",
        ".",
        ("--to", "universal"),
        rivals=("ds_to_universal",),
        target=Target(peer=10.0),
    ),
    Work(
        "safetensors-dcp",
        "safetensors → DCP, 4 ranks",
        "safetensors",
        ".",
        ("--to", "dcp", "--world-size", "4"),
        rivals=("load_file, dcp.save",),
        target=Target(peer=TO_PEER),
    ),
    Work(
        "torch-dcp",
        ".pt with AdamW → DCP, 4 ranks",
        "torch",
        ".",
        ("--to", "dcp", "--world-size", "4"),
        rivals=("torch_to_dcp",),
        target=Target(peer=TO_PEER),
    ),
    Work(
        "dcp8-dcp3",
        "DCP, 8 ranks, with AdamW → DCP, 3 ranks",
        "dcp8",
        ".",
        ("--to", "dcp", "--world-size", "3"),
        rivals=("dcp.load, dcp.save by 3 ranks",),
    ),
    Work(
        "tp-safetensors",
        "DCP, 4 ranks, cut along the inner axis → safetensors",
        "tp-weights",
        peers.WEIGHTS,
        rivals=("merge_fsdp_weights",),
        target=Target(copy=1.5),
    ),
)
"""In the order in which they are done: those of one input together, since inputs are deleted where the disk is full."""

_OF_TWO_SIZES = ("dcp-safetensors", "dcp-torch", "zero3-safetensors-all")
"""Start-up, and the memory that the system lets nobody fill before it is written out, make size matter."""


def _twice(work: Work) -> Work:
    return replace(work, name=f"{work.name}-x2", about=f"{work.about}, twice the size", scale=2)


WORKS = (*_OF_ONE_SIZE, *(_twice(work) for work in _OF_ONE_SIZE if work.name in _OF_TWO_SIZES))
