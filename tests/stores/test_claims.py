"""A URL held by one writer, on a store without conditions; S3's own lock is tested with its store."""

import json
import os
import subprocess
import sys
import time

import fsspec
import pytest

import ckpt_tools
from ckpt_tools.errors import DestinationExistsError, StoreError
from ckpt_tools.stores import object_lock
from ckpt_tools.stores.remote import UrlClaim

URL = "memory://bucket/run"
KEY = "/bucket/run/.ckpt-tools-partial/lock"


@pytest.fixture
def fs():
    """fsspec's store in memory, empty."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    return fs


def test_a_second_writer_is_told_who_holds_it(fs):
    with ckpt_tools.claim(URL) as claim:
        with pytest.raises(DestinationExistsError, match=rf"\(process {os.getpid()} on .+\)"), ckpt_tools.claim(URL):
            pass
        claim.check()
    assert not fs.exists(KEY)
    with ckpt_tools.claim(URL):
        pass


def test_the_claim_of_a_process_that_is_gone_is_taken_over(fs):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with ckpt_tools.claim(URL):
        content = json.loads(fs.cat_file(KEY))
    fs.pipe_file(KEY, json.dumps(content | {"pid": gone.pid, "token": "theirs"}).encode())
    with ckpt_tools.claim(URL) as claim:
        claim.check()


def test_a_claim_of_another_machine_is_given_up_after_a_minute(fs, monkeypatch):
    fs.pipe_file(KEY, b'{"token": "theirs", "machine": "another", "pid": 1, "host": "there"}')
    with pytest.raises(DestinationExistsError, match="process 1 on there"), ckpt_tools.claim(URL):
        pass
    monkeypatch.setattr(object_lock, "STALE_SECONDS", 0.0)
    with ckpt_tools.claim(URL) as claim:
        claim.check()


def check_for_seconds(claim: UrlClaim, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        claim.check()
        time.sleep(0.01)


def test_who_lost_a_claim_is_told(fs, monkeypatch):
    monkeypatch.setattr(object_lock, "BEAT_SECONDS", 0.2)
    with ckpt_tools.claim(URL) as claim:
        fs.pipe_file(KEY, b'{"token": "theirs"}')
        with pytest.raises(StoreError, match="took over"):
            check_for_seconds(claim, 10)
    assert fs.cat_file(KEY) == b'{"token": "theirs"}'


def test_a_folder_that_a_killed_run_left_empty_is_cleaned(fs):
    """And one of another name is not: nobody knows whose it is."""
    for name in ("0123456789abcdef", "mine"):
        fs.makedirs(f"/bucket/run/.ckpt-tools-partial/{name}")
    assert [left.num_bytes for left in ckpt_tools.clean(URL).leftovers] == [0]
    assert fs.ls("/bucket/run/.ckpt-tools-partial", detail=False) == ["/bucket/run/.ckpt-tools-partial/mine"]
