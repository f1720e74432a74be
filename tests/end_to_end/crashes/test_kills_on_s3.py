"""Conversions from and to S3, killed at any request: nothing is lost, nobody sees half of an output, ``--resume`` sends
only what was not there yet, and the next run ends with the same bytes.

Of the random ones a seed chooses the conversion, what was at the destination, the moment, and the run that follows. A
moment is a request, counted as it comes to a proxy in front of the server, and a few milliseconds more. Half of them
are among the last requests, most of which publish. To repeat one: ``--soak -k "[17]"``.
"""

import json
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.stores.output_names import is_marker
from tests.end_to_end.crashes.cases import done_bytes, make_sources
from tests.end_to_end.crashes.runs import Call, Runs
from tests.support.fault_proxy import FaultProxy, running_fault_proxy
from tests.support.files import files_below, write_files
from tests.support.s3_server import BUCKET, S3Server
from tests.support.sweep import spread

pytestmark = pytest.mark.extended

NUM_KILLS, SAMPLED = 150, (1, 2, 8, 9, 10)
"""Random ones with ``--soak``, and the seeds without: within the service, down from it, averages, and a delta read."""
POINTS_IN_SAMPLE = 3
MAX_DELAY_SECONDS = 0.04
"""After a request came; the next one comes within a few milliseconds."""
PARTIAL = "ckpt-tools-partial"


class LocalSite:
    """A folder in which nothing but an output is."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, str(folder)
        folder.mkdir()

    def files(self) -> dict[str, bytes]:
        return files_below(self.folder)

    def put(self, files: Mapping[str, bytes]) -> None:
        write_files(self.folder, files)

    def open_uploads(self) -> list[str]:
        return []


class S3Site:
    """A prefix in which nothing but an output is."""

    def __init__(self, server: S3Server) -> None:
        self.server, self.prefix = server, server.new_prefix()
        self.root = f"s3://{BUCKET}/{self.prefix.rstrip('/')}"

    def files(self) -> dict[str, bytes]:
        return self.server.files(self.prefix)

    def put(self, files: Mapping[str, bytes]) -> None:
        self.server.put(self.prefix, files)

    def open_uploads(self) -> list[str]:
        return self.server.open_uploads(self.prefix)


Site = LocalSite | S3Site


def visible(site: Site) -> dict[str, bytes]:
    return {path: data for path, data in site.files().items() if PARTIAL not in path}


def noted_bytes(site: Site) -> int:
    log = [data for key, data in sorted(site.files().items()) if PARTIAL in key and "/log/" in key]
    return done_bytes(b"".join(log))


def is_left_alone(site: Site) -> bool:
    """Whether nothing of ours is left."""
    return not any(PARTIAL in path for path in site.files()) and not site.open_uploads()


OUTPUTS = {"dcp": ("out", ["--to", "dcp", "--world-size", "2"]), "file": ("out.safetensors", [])}
"""A folder, whose ``.metadata`` makes it a checkpoint, and a single object."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """24 MB: three parts of an upload."""
    path = tmp_path_factory.mktemp("s3") / "weights.pt"
    torch.save({"a": torch.rand(2, 1 << 20), "b": torch.rand(2, 2 << 20)}, path)
    return path


@pytest.fixture(scope="module")
def direct(s3_server, tmp_path_factory):
    found = Runs(tmp_path_factory.mktemp("s3-runs") / "runs", s3_server.environment)
    yield found
    found.close()


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.timeout(1800)
def test_killed_at_every_request(output, weights, direct, s3_server, soak):
    name, options = OUTPUTS[output]

    def words(site: Site) -> tuple[str | Path, ...]:
        return ("convert", weights, f"{site.root}/{name}", *options, "--workers", "1", "--quiet", "--resume")

    first, watched = S3Site(s3_server), S3Site(s3_server)
    direct.warm(*words(first))
    expected = visible(first)
    trace = direct.run(*words(watched), strace=["-e", "trace=sendto,kill"]).trace
    assert visible(watched) == expected
    # How often the thread sends that sends most.
    threads = re.findall(r"^(\d+) +sendto\(", trace, re.MULTILINE)
    sends = range(1, max(map(threads.count, set(threads))) + 1)
    for number in spread(sends, None if soak else POINTS_IN_SAMPLE):
        site = S3Site(s3_server)
        assert direct.killed_at(Call("sendto", number), *words(site)).code in (-9, 0)
        seen, noted = visible(site), noted_bytes(site)
        assert seen == expected or (".metadata" not in str(seen.keys()) and name not in seen)
        done = direct.run(*words(site))
        if seen == expected:
            assert done.code == 8, done.stderr
            assert direct.run("clean", f"{site.root}/{name}").code == 0
        else:
            assert done.code == 0, done.stderr
            assert json.loads(done.stdout)["bytes_recovered"] == noted
        assert visible(site) == expected and is_left_alone(site)


def test_a_short_run_without_a_log_is_done_again(weights, direct, s3_server):
    """Killed once its uploads hold data: they are found without it, and what they hold is sent again."""
    site = S3Site(s3_server)
    words = ("convert", weights, f"{site.root}/out", *OUTPUTS["dcp"][1], "--workers", "1", "--quiet")
    number = 1
    while not site.open_uploads():
        assert direct.killed_at(Call("sendto", number), *words).code == -9
        number += 10
    assert (visible(site), noted_bytes(site)) == ({}, 0)
    done = direct.run(*words, "--resume")
    assert (done.code, json.loads(done.stdout)["bytes_recovered"]) == (0, 0), done.stderr
    assert ".metadata" in {key.rpartition("/")[2] for key in visible(site)} and is_left_alone(site)


# At random moments


@dataclass(frozen=True, slots=True)
class Way:
    """A conversion: the name of the source and the store that it is in, the store and the name of the output. Several
    sources, with a blank between them, are averaged."""

    source: str
    from_: str
    to: str
    name: str
    options: tuple[str, ...]


WAYS = (
    Way("weights.safetensors", "local", "s3", "out", ("--to", "dcp", "--world-size", "2")),
    Way("weights.safetensors", "s3", "s3", "out", ("--to", "safetensors", "--max-shard-size", "6MB")),
    Way("zero3", "s3", "local", "out", ("--to", "dcp", "--world-size", "3")),
    Way("state.pt", "local", "s3", "out", ("--to", "universal")),
    Way("weights.safetensors", "local", "s3", "out.safetensors", ("--checksum", "--dtype", "bfloat16")),
    Way("weights.safetensors", "s3", "local", "out.safetensors", ("--checksum",)),
    Way("universal", "s3", "s3", "out", ("--to", "zero3", "--world-size", "2")),
    Way("weights.safetensors", "s3", "s3", "out.safetensors", ("--rename", "a=c")),
    Way("zero3 other/dcp universal", "s3", "s3", "out", ("--to", "dcp", "--world-size", "2")),
    Way("weights.safetensors other/weights.safetensors", "s3", "s3", "out.safetensors", ()),
    Way("weight_v000001", "s3", "s3", "out", ("--to", "dcp", "--world-size", "2")),
)
"""Up, down and within the service; the second and the eighth are copied by the service itself."""


def without(files: Mapping[str, bytes], *, markers: bool = False) -> dict[str, bytes]:
    """The files, without the lists of digests and the markers."""
    kept = {path: data for path, data in files.items() if not path.endswith("digests.json")}
    return {path: data for path, data in kept.items() if not (markers and is_marker(path))}


@dataclass(frozen=True, slots=True)
class Bench:
    """The stores, the sources in each (by store), and the process that runs commands, behind a proxy."""

    folder: Path
    server: S3Server
    proxy: FaultProxy
    runs: Runs
    sources: Mapping[str, Site]

    def new_site(self, store: str) -> Site:
        return S3Site(self.server) if store == "s3" else LocalSite(self.folder / os.urandom(4).hex())

    def words(self, way: Way, site: Site, *options: str, of: str = "") -> tuple[str, ...]:
        """The command; ``of`` is the folder of sources of other values, and with it an average is another one."""
        root, names = self.sources[way.from_].root, way.source.split()
        more = ["--workers", "3", "--quiet", *options]
        if len(names) > 1:
            decay = ("--decay", "0.25") if of else ()
            return ("average", *(f"{root}/{name}" for name in names), f"{site.root}/{way.name}", *way.options, *decay,
                    *more)  # fmt: skip
        return ("convert", f"{root}/{of}{way.source}", f"{site.root}/{way.name}", *way.options, *more)

    def killed(self, words: tuple[str, ...], number: int, delay_seconds: float) -> int:
        """The exit code of a run that is killed so long after that request."""

        def kill() -> None:
            with suppress(ProcessLookupError):
                os.kill(int((self.runs.folder / "pid").read_text()), signal.SIGKILL)

        def on_request(which: int) -> None:
            if which == number:
                threading.Timer(delay_seconds, kill).start() if delay_seconds else kill()

        self.proxy.set(None)
        self.proxy.on_request = on_request
        ended = self.runs.run(*words, prompt=False)
        self.proxy.on_request = lambda number: None
        self.proxy.wait()
        return ended.code


@dataclass(frozen=True, slots=True)
class Untouched:
    """Output of a run that nothing befell, and the number of its requests; output of other values."""

    expected: Mapping[str, bytes]
    num_requests: int
    other: Mapping[str, bytes]


def make_weights(folder: Path, seed: int) -> None:
    """Two tensors of 5.25 MiB, which the service copies, and a small one; as a model, and the delta to the next one."""
    torch.manual_seed(seed)
    tensors = {name: torch.rand(1344, 1024) for name in "ab"}
    save_file({**tensors, "bias": torch.rand(1344)}, folder / "weights.safetensors")
    (folder / "weight_v000000").mkdir()
    shutil.copy(folder / "weights.safetensors", folder / "weight_v000000/model.safetensors")
    save_file({**tensors, "b": torch.rand(1344, 1024), "bias": torch.rand(1344)}, folder / "next.safetensors")
    ckpt_tools.delta(folder / "weight_v000000", folder / "next.safetensors", folder / "weight_v000001")


@pytest.fixture(scope="module")
def bench(s3_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("random-kills")
    local, remote = LocalSite(folder / "sources"), S3Site(s3_server)
    make_sources(local.folder)
    make_weights(local.folder, 1)
    make_weights(local.folder / "other", 2)
    remote.put(files_below(local.folder))
    with running_fault_proxy(s3_server) as proxy:
        runs = Runs(folder / "runs", {**s3_server.environment, "AWS_ENDPOINT_URL": proxy.endpoint})
        yield Bench(folder, s3_server, proxy, runs, {"local": local, "s3": remote})
        runs.close()


@pytest.fixture(scope="module")
def untouched(bench):
    @cache
    def made(way: Way) -> Untouched:
        site, other = bench.new_site(way.to), bench.new_site(way.to)
        bench.runs.warm(*bench.words(way, site))
        bench.proxy.set(None)
        assert bench.runs.run(*bench.words(way, other, of="other/")).code == 0
        return Untouched(visible(site), bench.proxy.num_requests, visible(other))

    return made


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(NUM_KILLS) if metafunc.config.getoption("--soak") else SAMPLED)


@pytest.mark.timeout(300)
def test_killed_at_a_random_moment(seed, bench, untouched):
    choose, way = random.Random(seed), WAYS[seed % len(WAYS)]
    made = untouched(way)
    before = choose.choice([{}, made.other])
    overwrite = ("--overwrite",) if before else ()
    site, run = bench.new_site(way.to), bench.runs.run
    place = f"{site.root}/{way.name}"
    site.put(before)
    source = bench.sources[way.from_].files()
    words = bench.words(way, site, *overwrite)
    number = choose.randrange(choose.choice((0, made.num_requests * 7 // 10)), made.num_requests)
    delay = choose.choice((0.0, choose.uniform(0, MAX_DELAY_SECONDS)))
    code = bench.killed((*words, *choose.choice([(), ("--resume",)])), number, delay)
    seen = visible(site)
    state = check_whole_or_nothing(bench, site, place, seen, before, made.expected)
    then = choose.choice(["--resume", "again", "clean"])
    print(f"\nseed {seed}: {way}, request {number} + {delay:.4f} s; exit {code}; found: {state}; then {then}")
    assert code in (-9, 0)
    if then == "clean":
        assert run("clean", place).code == 0
        assert is_left_alone(site), site.files().keys()
        assert visible(site) == (seen if state in ("before", "new", "new without digests") else {})
    done = run(*words, *(["--resume"] if then == "--resume" else []))
    if state.startswith("new") and not overwrite:
        assert (done.code, "exists" in done.stderr) == (8, True), done.stderr
        assert run("clean", place).code == 0
        if state == "new without digests":
            assert run("checksum", place).code == 0
    else:
        assert done.code == 0, done.stderr
    assert visible(site) == made.expected
    assert is_left_alone(site), site.files().keys()
    assert bench.sources[way.from_].files() == source


def check_whole_or_nothing(
    bench: Bench, site: Site, place: str, seen: Mapping[str, bytes], before: Mapping[str, bytes],
    expected: Mapping[str, bytes],
) -> str:  # fmt: skip
    """What is there, in words, on which all commands agree."""
    looked = bench.runs.run("inspect", place)
    if seen == before:
        assert looked.code == (0 if before else 3), looked
        return "before"
    if seen in (expected, without(expected)):
        assert looked.code == bench.runs.run("verify", place).code == 0, looked
        return "new" if seen == expected else "new without digests"
    assert not any(map(is_marker, seen)), sorted(seen)
    if looked.code == 0:
        bare = without(seen, markers=True)
        assert bare in (without(expected, markers=True), without(before, markers=True)), sorted(seen)
    listed = bench.runs.run("ls", site.root)
    assert listed.code in (0, 3) and '"complete": true' not in listed.stdout, listed
    return "nothing" if not seen else f"{len(seen)} of {len(expected)} files"


@pytest.mark.timeout(300)
def test_a_delta_killed_at_a_random_moment(seed, bench):
    """It is made again, and never half of one is seen."""
    choose, sources = random.Random(seed), bench.sources["s3"].root

    def words(site: Site) -> tuple[str, ...]:
        versions = (f"{sources}/weights.safetensors", f"{sources}/other/weights.safetensors")
        return ("delta", *versions, f"{site.root}/weight_v000001", "--workers", "2", "--quiet")

    made, site = S3Site(bench.server), S3Site(bench.server)
    bench.runs.warm(*words(S3Site(bench.server)))
    bench.proxy.set(None)
    assert bench.runs.run(*words(made)).code == 0
    number, delay = choose.randrange(bench.proxy.num_requests), choose.uniform(0, MAX_DELAY_SECONDS)
    code, seen = bench.killed(words(site), number, delay), visible(site)
    print(
        f"\nseed {seed}: request {number} of {bench.proxy.num_requests} + {delay:.4f} s; exit {code}; found: {[*seen]}"
    )
    assert code in (-9, 0)
    assert seen == visible(made) or not any(map(is_marker, seen)), sorted(seen)
    done = bench.runs.run(*words(site))
    assert done.code == (8 if seen == visible(made) else 0), done.stderr
    assert bench.runs.run("clean", f"{site.root}/weight_v000001").code == 0
    assert visible(site) == visible(made) and is_left_alone(site), site.files().keys()
