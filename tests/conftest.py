"""Fixtures for every room: checkpoints made by the real frameworks, and a way to resume them there."""

import gc
import importlib
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent.parent))

import fixtures
from fixtures import launch, store
from tests.support import cards
from tests.support.pages import WRITE_PAGES
from tests.support.s3_server import running_s3_server
from tests.support.truth import Truth

# Ray gives way to everything else on the machine by default: beside other tests its workers would hardly start.
os.environ.setdefault("RAY_worker_niceness", "0")

Resume = Callable[[str, str, Path, int], Truth]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the full matrices instead of their core")
    parser.addoption("--write-pages", action="store_true", help="write what the commands print into the pages of docs")
    parser.addoption("--kills", type=int, default=30, help="in the soak: random kills of each kind of training run")
    parser.addoption("--kill-seed", default="7", help="in the soak: the seed of the moments of these kills")


SELECTED = ("quick", "judges")
"""Markers of few files."""
EXTENDED = re.compile(r"^pytestmark = (.*|\[\n.*)\.extended\b", re.MULTILINE)
"""In the code of a file that is marked as a whole."""
ORDER = (
    "layouts/test_corpus.py",
    "end_to_end/test_convert.py",
    "training",
    "inference",
    "packaging",
    "transfer",
    "cli",
    "benchmarks",
    "verification",
)
"""What comes first, of ``tests``: the files that make the checkpoints which others read, one for each process of
pytest-xdist; then the folders with long files, so that no process is left without work at the end. The files of a
folder follow one another, because they share pools of ranks."""
NO_GPU = "not run: torch finds no GPU on this machine"


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-pages"):
        os.environ[WRITE_PAGES] = "1"
    # The same examples in each run, so that a green run stays green; the soak looks for others.
    settings.register_profile("fixed", derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    if not config.getoption("--soak"):
        settings.load_profile("fixed")
    # nohup, and a shell that starts the tests in the background, ignore them. What the tests start would inherit that.
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    config.addinivalue_line("markers", "soak: a real run that takes long, and that only the soak makes")
    config.addinivalue_line("markers", "quick: fast tests, which `make quick` runs")
    config.addinivalue_line(
        "markers", "extended: one more of a kind, which `make test-all` runs and `make test` does not"
    )
    config.addinivalue_line("markers", "judges: runs again with the newest frameworks (`make judges`)")
    config.addinivalue_line("markers", "gpu: needs a GPU that torch can use; the summary names those that were not run")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m quick`` or ``-m judges`` only the files with this marker are imported, and with ``-m "not extended"``
    none that is marked so as a whole, because importing all takes long."""
    tier = config.option.markexpr
    if tier not in (*SELECTED, "not extended") or collection_path.suffix != ".py" or not collection_path.is_file():
        return None
    code = collection_path.read_text()
    is_left_out = f"pytest.mark.{tier}" not in code if tier in SELECTED else EXTENDED.search(code) is not None
    return is_left_out or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """torch is imported only if a test asks for a GPU. The summary counts what is left to the soak as deselected."""
    if not config.getoption("--soak"):
        for_soak = {item for item in items if item.get_closest_marker("soak")}
        config.hook.pytest_deselected(items=[item for item in items if item in for_soak])
        items[:] = [item for item in items if item not in for_soak]
    items.sort(key=lambda item: _place(item.path))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not importlib.import_module("torch").cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_collection_finish() -> None:
    """The modules and the items stay until the end: no collection visits them, which would take a second each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@cache
def _place(file: Path) -> int:
    """Of the first in ``ORDER`` that the file is or lies in; all others come after them, in their own order."""
    folder = Path(__file__).parent
    return next((place for place, name in enumerate(ORDER) if file.is_relative_to(folder / name)), len(ORDER))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The tests that no GPU ran. After a soak, the matrix: cells passed of all, by source and target; and the kills of
    training runs."""
    for report in terminalreporter.stats.get("skipped", []):
        if NO_GPU in str(report.longrepr):
            terminalreporter.write_line(f"{report.nodeid}: {NO_GPU}")
    if not config.getoption("--soak"):
        return
    for report in chain.from_iterable(terminalreporter.stats.values()):
        # The last report of a test has what its fixtures counted.
        if getattr(report, "when", None) == "teardown":
            for kills in (value for name, value in report.user_properties if name == "kills"):
                terminalreporter.write_line(f"{report.nodeid}: {kills}; seed {config.getoption('--kill-seed')}")
    counts: Counter[tuple[str, str, str]] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            if match := re.search(r"test_cell\[(\w+)x\d-(\w+)x\d\]", report.nodeid):
                counts[match[1], match[2], outcome] += 1
    targets = sorted({target for _, target, _ in counts})
    terminalreporter.write_line("".join(f"{name:>14}" for name in ("from \\ to", *targets)))
    for source in sorted({source for source, _, _ in counts}):
        passed = [counts[source, target, "passed"] for target in targets]
        totals = [n + counts[source, target, "failed"] for n, target in zip(passed, targets, strict=True)]
        cells = [f"{n} of {total}" for n, total in zip(passed, totals, strict=True)]
        terminalreporter.write_line("".join(f"{text:>14}" for text in (source, *cells)))


@pytest.fixture(scope="session")
def checkpoint():
    """`checkpoint(kind, case, world_size)`: a checkpoint and its truth, built if it is not cached."""
    return fixtures.checkpoint


@pytest.fixture
def card(request):
    """`card(recipe, judges, model, compared, ...)`: what the test has proved of a recipe (`tests.support.cards`)."""
    return partial(cards.prove, request.node.nodeid)


@pytest.fixture
def resume(tmp_path):
    """`resume(kind, case, checkpoint, world_size)`: what the framework holds after loading, and its next losses."""

    def run(kind: str, case: str, checkpoint: Path, world_size: int) -> Truth:
        folder = tmp_path / f"resumed-{kind}-{case}-{world_size}"
        launch.pool(world_size).run(store.resume, kind, case, str(checkpoint), str(folder))
        return Truth.load(folder)

    return run


@pytest.fixture(scope="session")
def s3_server():
    """A real S3 server on loopback, for all tests of the run."""
    with running_s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_server, monkeypatch):
    """The server, with the environment that a user would have set."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server
