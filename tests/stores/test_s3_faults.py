"""Whatever goes wrong between us and S3: an error and no checkpoint, or the right bytes; nothing between."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt_tools
from ckpt_tools.errors import CkptError, StoreError
from ckpt_tools.stores.output_names import is_marker
from ckpt_tools.stores.retry import RetryPolicy
from ckpt_tools.stores.s3 import destination
from tests.support.fault_proxy import KINDS, LATE, STATUSES, Fault, running_fault_proxy
from tests.support.s3_server import BUCKET, S3Server
from tests.support.sweep import tiered

pytestmark = pytest.mark.extended

NUM_FAULTS = 300
"""All of them with ``--soak``; each kind once otherwise."""

NUM_REQUESTS = 75
"""Those of the conversion below, about."""

FOREVER = 10_000


def fault_of(seed: int) -> Fault:
    """Any kind, at any request; once, a few times in a row, more often than is tried, or from then on."""
    choose = random.Random(seed)
    return Fault(KINDS[seed % len(KINDS)], choose.randrange(NUM_REQUESTS), choose.choice((1, 1, 2, 8, FOREVER)))


@pytest.fixture(scope="module")
def proxy(s3_server):
    with running_fault_proxy(s3_server) as running:
        yield running


@pytest.fixture(scope="module")
def source(checkpoint, s3_server):
    prefix = s3_server.new_prefix()
    s3_server.upload(prefix, checkpoint("fsdp2", "plain", 2).checkpoint)
    return f"s3://{BUCKET}/{prefix.rstrip('/')}"


@pytest.fixture(scope="module")
def expected(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("expected")
    ckpt_tools.convert(checkpoint("fsdp2", "plain", 2).checkpoint, out / "out", to="zero2", world_size=2)
    return {each.relative_to(out / "out").as_posix(): each.read_bytes() for each in files_of(out)}


def files_of(folder: Path) -> Iterator[Path]:
    return (each for each in folder.rglob("*") if each.is_file())


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Trying again without waiting: how long is another test's matter."""
    monkeypatch.setattr(RetryPolicy, "wait_seconds", lambda *_: 0.0)


@pytest.fixture
def without_holding(monkeypatch):
    """Small files are uploaded as large ones are."""
    return lambda: monkeypatch.setattr(destination, "MAX_HELD_FILE_BYTES", -1)


@pytest.mark.parametrize("seed", tiered(range(NUM_FAULTS), test=[str(seed) for seed in range(2 * len(KINDS))]))
def test_a_fault(seed, source, expected, proxy, s3, without_holding):
    if seed // len(KINDS) % 2:
        without_holding()
    prefix, fault = s3.new_prefix(), fault_of(seed)
    out = f"s3://{BUCKET}/{prefix}out"
    proxy.set(fault)
    error = error_of(source, out, {"endpoint_url": proxy.endpoint, "retries": 3, "read_timeout": 0.4})
    num_hit = proxy.num_hit
    proxy.set(None)
    seen = published(s3, prefix)
    if error is None:
        assert seen == expected, fault
        return
    assert num_hit and error.exit_code in (3, 4, 5, 8), (fault, error)
    assert not any(map(is_marker, seen)) or seen == expected, (fault, sorted(seen))
    check_it_can_be_made_again(s3, source, out, prefix, expected)


def error_of(source: str, out: str, options: dict[str, Any]) -> CkptError | None:
    try:
        ckpt_tools.convert(source, out, to="zero2", world_size=2, workers=3, storage_options=options)
    except CkptError as error:
        return error
    return None


def published(s3: S3Server, prefix: str) -> dict[str, bytes]:
    """What a reader would see."""
    return {path.removeprefix("out/"): data for path, data in s3.files(prefix).items() if "/.ckpt" not in path}


def check_it_can_be_made_again(s3: S3Server, source: str, out: str, prefix: str, expected: dict[str, bytes]) -> None:
    """By a process that comes later: the lock of this one goes with it."""
    s3.client().delete_object(Bucket=BUCKET, Key=f"{prefix}out/.ckpt-tools-partial/lock")
    ckpt_tools.convert(source, out, to="zero2", world_size=2, overwrite=published(s3, prefix) == expected)
    assert s3.files(prefix) == {f"out/{path}": data for path, data in expected.items()}
    assert s3.open_uploads(prefix) == []


SHOW = r"PUT /\w+/\w+/out/(?!\.ckpt)[^?]*$"
"""Of a file that is held until then."""

PART, BEGIN, COMPLETE, DELETE = "PUT .*partNumber", r"POST .*\?uploads", "POST .*uploadId=", r"POST .*\?delete"


def old_files(s3: S3Server, source: str, prefix: str) -> dict[str, bytes]:
    """What was there before: another format, and a marker of the same name as the new one has."""
    ckpt_tools.convert(source, f"s3://{BUCKET}/{prefix}out", to="zero3", world_size=1)
    return published(s3, prefix)


POINTS = {
    "begin": (BEGIN, 1),
    "part": (PART, 2),
    "first complete": (COMPLETE, 0),
    "third complete": (COMPLETE, 2),
    "last complete": (COMPLETE, 3),
    "first file": (SHOW, 0),
    "third file": (SHOW, 2),
}
FULL = [f"{how} {kind} {at}" for how in ("overwrite:", "fresh:") for kind in (*LATE, "503") for at in POINTS]


@pytest.mark.parametrize(
    "case",
    tiered(
        FULL,
        test=(
            *("overwrite: full begin", "overwrite: over quota part", "overwrite: too large first complete"),
            *("overwrite: 503 third complete", "overwrite: full last complete", "fresh: over quota third complete"),
            *("overwrite: full third file", "fresh: 503 first file"),
        ),
    ),
)
def test_a_store_that_is_full(case, source, expected, proxy, s3, without_holding):
    """From the first upload to the last request: the old output stays, or the new one is kept to be published."""
    if not (is_held := case.endswith("file")):
        without_holding()
    overwrite = case.startswith("overwrite")
    kind = next(kind for kind in (*LATE, "503") if f": {kind} " in case)
    only, first = POINTS[case.partition(f": {kind} ")[2]]
    prefix = s3.new_prefix()
    out = f"s3://{BUCKET}/{prefix}out"
    before = old_files(s3, source, prefix) if overwrite else {}
    proxy.set(Fault(kind, first, FOREVER, only))
    options = {"endpoint_url": proxy.endpoint, "retries": 1}
    with pytest.raises(StoreError) as caught:
        ckpt_tools.convert(source, out, to="zero2", world_size=2, overwrite=overwrite, storage_options=options)
    proxy.set(None)
    assert caught.value.exit_code == 5 and "\n" not in str(caught.value)
    assert (LATE | STATUSES)[kind][1] in str(caught.value)
    seen, is_replacing = published(s3, prefix), overwrite and only in (COMPLETE, SHOW)
    assert "the same command with resume=True continues" in str(caught.value) or not is_replacing
    if is_replacing:
        assert not any(map(is_marker, seen))
        assert is_held or len(s3.open_uploads(prefix)) + len(seen) == len(expected)
    else:
        assert seen == before
        assert s3.open_uploads(prefix) == [] and s3.keys(prefix) == [f"out/{path}" for path in sorted(before)]
    ckpt_tools.convert(source, out, to="zero2", world_size=2, overwrite=overwrite, resume=is_replacing)
    assert s3.files(prefix) == {f"out/{path}": data for path, data in expected.items()}
    assert s3.open_uploads(prefix) == []


def test_a_store_that_removes_nothing(source, proxy, s3):
    """The old output is whole, and the new one is not taken for a part of it."""
    prefix = s3.new_prefix()
    out = f"s3://{BUCKET}/{prefix}out"
    before = old_files(s3, source, prefix)
    proxy.set(Fault("over quota", 0, FOREVER, DELETE))
    options = {"endpoint_url": proxy.endpoint, "retries": 0}
    with pytest.raises(StoreError, match="QuotaExceeded"):
        ckpt_tools.convert(source, out, to="zero2", world_size=2, overwrite=True, storage_options=options)
    proxy.set(None)
    assert published(s3, prefix) == before
    s3.client().delete_object(Bucket=BUCKET, Key=f"{prefix}out/.ckpt-tools-partial/lock")
    ckpt_tools.clean(out)
    assert s3.files(prefix) == {f"out/{path}": data for path, data in before.items()}
    assert s3.open_uploads(prefix) == []
