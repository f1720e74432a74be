"""Conversions: the works of `works.toml`, each done in turn by us, by ``cp -r`` of the bytes that it writes, and by the
peer that can do it too.

Ratios are of medians within one work, whose runs alternate within minutes: a machine that is slow for a while is slow
for all. A contestant that fails or takes too long is noted with the reason and not run again.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import caching
from benchmarks.inputs import InputCache
from benchmarks.measure import MeasureError, Usage, measure_command
from benchmarks.peers import fill_command, find_only_file
from benchmarks.runner import CKPT_TOOLS, DURABLE, LOADED, WARM, WAYS, Record, RunSettings, say
from benchmarks.turns import take_turns

OURS, COPY = "ckpt-tools", "cp -r"
UNCAST, UNMERGED = "ckpt-tools without the cast", "ckpt-tools without the adapter"

LORA = "lora"
"""Kind of input that is a folder with a base model and an adapter."""

INPUT_ROOM, WORK_ROOM = 1.3, 3.6
"""Disk space in sizes of the state: for an input, and for a work: the copied output and the new one, which of
`ds_to_universal` with its temporary files is 2.4 times its input."""

BALLAST = 4
"""Memory kept from the host, in sizes of the state: the input, the copied output, a new one, and its writers."""

_TABLES = tomllib.loads(Path(__file__).with_name("works.toml").read_text())

PEERS: Mapping[str, str] = _TABLES["peers"]
"""What Python runs as each peer, by its name in tables."""

SYNCING: Collection[str] = _TABLES["syncing"]
"""Peers that always sync, as DCP's writer does. They are measured durable, and the others warm."""

BUSY_PROGRAM = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
"""Takes a processor until its parent is gone."""


@dataclass(frozen=True, slots=True)
class Work:
    """A conversion of an input of kind `source` to `output` (`.` for a folder), the peer that can do it too, and the
    promised ratios: `works.toml` says what they mean."""

    name: str
    about: str
    source: str
    output: str
    target: Mapping[str, float] = field(default_factory=dict)
    peer: str = ""
    options: str = ""

    @property
    def plain(self) -> str:
        """The contestant that does the same without a cast or adapter, if there is one."""
        return UNMERGED if self.source == LORA else UNCAST if "--dtype" in self.options else ""

    @property
    def contestants(self) -> tuple[str, ...]:
        return tuple(filter(None, (OURS, COPY, self.plain, self.peer)))

    def list_slots(self, ways: Collection[str] = WAYS) -> list[tuple[str, str]]:
        """Contestants and their ways; a peer has one."""
        return [(who, way) for who in self.contestants for way in ways if who not in PEERS or way == self.way_of_peer]

    @property
    def way_of_peer(self) -> str:
        return DURABLE if self.peer in SYNCING else WARM

    def build_command(self, contestant: str, source: Path, copied: Path, out: Path, *, synced: bool) -> list[str]:
        """The contestant's command line; `cp -r` copies `copied`, and the others write files into the folder `out`."""
        if contestant == COPY:
            if not synced:
                return ["cp", "-r", str(copied), str(out)]
            # With fsync of every file and folder of the copy.
            return ["sh", "-c", 'cp -r "$1" "$2" && find "$2" -exec sync {} +', "copy", str(copied), str(out)]
        if contestant in PEERS:
            return fill_command(PEERS[contestant], source, out)
        options = self._select_options(contestant, ("--to", "--state", "--world-size", "--dtype", "--recipe"))
        is_merge = contestant == OURS and self.source == LORA
        inputs = (source / "base", source / "adapter") if is_merge else (self._get_input_path(source),)
        words = _ckpt_tools("merge-lora" if is_merge else "convert", *inputs, out / self.output)
        return [*words, *options, *["--fsync"] * synced]

    def build_verification(self, contestant: str, source: Path, out: Path) -> list[str]:
        """The command line that compares the output with the source's tensors bit for bit."""
        if self.source == LORA and contestant != UNMERGED:
            return fill_command("-m benchmarks.peers check_merged {source} {out}", source, out)
        options, written = self._select_options(contestant, ("--dtype", "--state", "--recipe")), out / self.output
        return [*_ckpt_tools("verify", self._get_input_path(source), written if written.exists() else out), *options]

    def _select_options(self, contestant: str, names: tuple[str, ...]) -> list[str]:
        words = shlex.split(self.options)
        pairs = (pair for pair in zip(words[::2], words[1::2], strict=True) if pair[0] in names)
        return [word for pair in pairs if (contestant, pair[0]) != (UNCAST, "--dtype") for word in pair]

    def _get_input_path(self, source: Path) -> Path:
        if self.source == LORA:
            return source / "base"
        return find_only_file(source) if self.source in ("safetensors", "torch") else source


def _ckpt_tools(command: str, *places: Path) -> list[str]:
    return [*CKPT_TOOLS, command, *map(str, places), "--quiet"]


WORKS = {work["name"]: Work(**work) for work in _TABLES["work"]}


@contextmanager
def keep_processors_busy(num_processes: int) -> Iterator[None]:
    """So many processes that compute, until the end."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", BUSY_PROGRAM]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure_conversion(name: str, settings: RunSettings) -> Record:
    return measure_work(WORKS[name], settings)


def measure_work(work: Work, settings: RunSettings) -> Record:
    """The runs of a work, the reasons of contestants that failed, and of each output whether it has the input's tensors
    bit for bit. Raises MeasureError if the input or our own output cannot be made."""
    inputs, log = InputCache(settings.data / "inputs"), settings.data / "log"
    copied, out = settings.data / "copied", settings.data / "out"
    source = inputs.get_path(work.source, settings.size_bytes)
    room = int((WORK_ROOM + INPUT_ROOM * (not source.exists())) * settings.size_bytes)
    if not inputs.make_room(room, keep=source):
        raise MeasureError(f"the disk has no {room / 1e9:.1f} GB free")
    inputs.get(work.source, settings.size_bytes)
    runs: list[Record] = []
    failures: dict[str, str] = {}
    checks: dict[str, str] = {}

    def convert(contestant: str, way: str) -> tuple[Usage, float]:
        """Usage, and the share of the contestant's input that was in memory before."""
        shutil.rmtree(out, ignore_errors=True)
        if contestant != COPY:
            out.mkdir(parents=True)
        read = copied if contestant == COPY else source
        os.sync()
        # Other inputs leave the memory, so that the kernel does not reclaim it while something is measured.
        for path in inputs.root.iterdir():
            if path != source:
                caching.drop_from_cache(path)
        (caching.read_into_cache if way == WARM else caching.drop_from_cache)(read)
        share = caching.get_cached_share(read)
        command = work.build_command(contestant, source, copied, out, synced=way != WARM)
        with keep_processors_busy(2 if way == LOADED else 0):
            return measure_command(command, log, time_limit=settings.time_limit), share

    def note_check(contestant: str) -> None:
        verification = work.build_verification(contestant, source, out)
        checks[contestant] = measure_command(verification, log, time_limit=settings.time_limit).failure

    def run_once(contestant: str, way: str) -> None:
        if contestant in failures:
            return
        usage, share = convert(contestant, way)
        say(f"  {contestant:32} {way:7} {usage.seconds:.2f} s {usage.failure}")
        if usage.failure:
            failures[contestant] = usage.failure
            return
        if contestant not in checks:
            note_check(contestant)
        runs.append({"contestant": contestant, "way": way, "cached_share": round(share, 4), **asdict(usage)})

    try:
        usage, _ = convert(OURS, WARM)
        if usage.failure:
            raise MeasureError(usage.failure)
        note_check(OURS)
        out.rename(copied)
        sizes = {
            "source_bytes": caching.count_bytes(source),
            "copied_bytes": caching.count_bytes(copied),
            "copied_files": len(list(caching.iter_files(copied))),
        }
        with caching.hold_ballast(BALLAST * settings.size_bytes):
            turns = {f"{who} {way}": partial(run_once, who, way) for who, way in work.list_slots(settings.ways)}
            take_turns(turns, settings.runs, warm_up=False)
    finally:
        shutil.rmtree(copied, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
    return {**sizes, "failures": failures, "checks": checks, "runs": runs}
