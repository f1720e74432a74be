"""The works of `works.toml`: conversions, their contestants and targets."""

from __future__ import annotations

import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

from benchmarks import peers
from benchmarks.machine import CKPT_TOOLS

OURS, COPY = "ckpt-tools", "cp -r"
UNCAST, UNMERGED = "ckpt-tools without the cast", "ckpt-tools without the adapter"

LORA = "lora"
"""Kind of input that is a folder with a base model and an adapter."""

LARGE_BYTES = 4_000_000_000
"""Promises are about checkpoints of at least this size; start-up dominates smaller ones."""


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
            return peers.fill_command(peers.COMMANDS[contestant], source, out)
        options = self._options(contestant, ("--to", "--state", "--world-size", "--dtype", "--recipe"))
        is_merge = contestant == OURS and self.source == LORA
        inputs = (source / "base", source / "adapter") if is_merge else (self._input(source),)
        words = _ckpt_tools("merge-lora" if is_merge else "convert", *inputs, out / self.output)
        return [*words, *options, *["--fsync"] * synced]

    def verification(self, contestant: str, source: Path, out: Path) -> list[str]:
        """The command line that compares the output with the source's tensors bit for bit."""
        if self.source == LORA and contestant != UNMERGED:
            return peers.fill_command("-m benchmarks.peers check_merged {source} {out}", source, out)
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
    return [*CKPT_TOOLS, command, *map(str, places), "--quiet"]


WORKS = tuple(
    Work(**{**work, "target": Target(**work.get("target", {}))})
    for work in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["work"]
)
