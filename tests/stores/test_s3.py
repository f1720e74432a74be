"""The S3 store, place and lock against a real server."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress

import pytest

from ckpt_tools.errors import CkptError, DestinationExistsError, IncompleteError, SourceNotFoundError, StoreError
from ckpt_tools.stores import object_lock
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.output_names import PARTIAL_FOLDER_NAME
from ckpt_tools.stores.publishing import Claim
from ckpt_tools.stores.read_ahead import AHEAD_BYTES, BLOCK_BYTES, MAX_SMALL_BYTES, BlockCache
from ckpt_tools.stores.s3.client import Bucket
from ckpt_tools.stores.s3.destination import MAX_HELD_BYTES, MAX_HELD_FILE_BYTES, S3Destination
from ckpt_tools.stores.s3.location import S3OutputLocation
from ckpt_tools.stores.s3.options import S3Options
from ckpt_tools.stores.s3.store import S3Store, open_s3_store
from ckpt_tools.stores.source import CopySource, Source, Store
from ckpt_tools.testing.stores import StoreTests
from tests.support.s3_server import BUCKET
from tests.support.sweep import tiered

PART = bytes(range(256)) * (5 * 4096)
"""The smallest part that is not a file's last: 5 MiB."""


@pytest.fixture
def bucket(s3):
    return Bucket(S3Options(), BUCKET)


@pytest.fixture
def runs(s3):
    """A prefix of this test alone."""
    return s3.new_prefix()


@pytest.fixture
def place(bucket, runs):
    return S3OutputLocation(bucket, f"{runs}out")


class TestS3Store(StoreTests):
    @pytest.fixture(autouse=True)
    def server(self, s3):
        self.s3 = s3

    def make(self, files: Mapping[str, bytes]) -> Store:
        prefix = self.s3.new_prefix()
        self.s3.put(prefix, files)
        return S3Store(Bucket(S3Options(), BUCKET), prefix)

    @pytest.mark.extended
    def test_threads_read_many_files_together(self):
        StoreTests.test_threads_read_many_files_together(self)


class TestBlockCache(StoreTests):
    def make(self, files: Mapping[str, bytes]) -> Store:
        behind = MemoryStore({name: bytearray(data) for name, data in files.items()})
        return BlockCache(behind, behind.list())


def claimed(place: S3OutputLocation, *, overwrite: bool = False, resume: bool = False) -> AbstractContextManager[Claim]:
    return place.claim(overwrite=overwrite, resume=resume)


def write(claim: Claim, files: Mapping[str, bytes], *, publish: bool = True) -> None:
    """The files in parts, the last of which is written first."""
    for path, data in files.items():
        handle = claim.destination.begin_file(path, len(data))
        starts = range(0, len(data), len(PART)) or range(1)
        numbered = [*enumerate(starts)]
        part_tags = {
            n: claim.destination.write_part(path, handle, n, at, data[at : at + len(PART)]) for n, at in numbered[::-1]
        }
        claim.destination.finish_file(path, handle, [part_tags[number] for number, _ in numbered])
    if publish:
        claim.publish_files(list(files))


FILES = {"a.bin": PART + PART + b"end", "empty": b"", "deep/b.bin": b"abc", ".metadata": b"index"}


def test_nothing_is_seen_before_it_is_published_the_last_file_last_and_nothing_of_ours_after(
    place, runs, s3, monkeypatch
):
    order, complete = [], S3Destination.complete_file
    monkeypatch.setattr(S3Destination, "complete_file", lambda *path: (complete(*path), order.append(path[1])))
    with claimed(place) as claim:
        claim.log.append(b"noted")
        write(claim, FILES, publish=False)
        assert all(PARTIAL_FOLDER_NAME in path for path in s3.files(runs))
        assert place.list_contents() is None
        claim.publish_files(list(FILES))
    assert order[-1] == ".metadata" and len(order) == len(FILES)
    assert s3.files(runs) == {f"out/{path}": data for path, data in FILES.items()}
    assert s3.open_uploads(runs) == []


@pytest.mark.parametrize("resume", [False, True])
def test_what_was_not_published_is_aborted_or_kept(place, runs, s3, resume):
    with suppress(ZeroDivisionError), place.claim(overwrite=False, resume=resume) as claim:
        claim.log.append(b"one")
        claim.log.append(b"two")
        write(claim, FILES, publish=False)
        raise ZeroDivisionError
    assert s3.open_uploads(runs) == (["out/a.bin"] if resume else [])
    assert bool(s3.files(runs)) == resume
    with claimed(place, resume=True) as claim:
        assert claim.log.read() == (b"onetwo" if resume else b"")
        claim.log.append(b"three")
        assert claim.log.read().endswith(b"three")


def test_a_later_run_finishes_what_another_process_began(place, runs, s3):
    with claimed(place, resume=True) as claim:
        handle = claim.destination.begin_file("f", 2 * len(PART))
        elsewhere = pickle.loads(pickle.dumps(claim.destination))
        part_tag = elsewhere.write_part("f", handle, 1, len(PART), memoryview(PART))
    with claimed(place, resume=True) as claim:
        holds = claim.destination.has_part
        assert holds("f", handle, 1, len(PART), len(PART), 0, part_tag)
        assert not holds("f", handle, 1, len(PART), len(PART) - 1, 0, part_tag)
        assert not holds("f", handle, 1, len(PART), len(PART), 0, f'{part_tag[:-2]}x"')
        assert not holds("f", handle, 0, 0, len(PART), 0, part_tag)
        assert not holds("g", handle, 1, len(PART), len(PART), 0, part_tag)
        claim.destination.write_part("f", handle, 0, 0, b"sent twice, counts once" + PART)
        first = claim.destination.write_part("f", handle, 0, 0, PART)
        claim.destination.finish_file("f", handle, [first, part_tag])
        claim.publish_files(["f"])
    assert s3.files(runs) == {"out/f": PART + PART}


def test_small_files_are_held_up_to_a_limit_and_completed_by_whoever_has_their_tags(place, runs, s3):
    data = bytes(MAX_HELD_FILE_BYTES)
    paths = [f"f{number}" for number in range(MAX_HELD_BYTES // len(data) + 2)]
    with claimed(place, resume=True) as claim:
        handles = claim.destination.begin_files(dict.fromkeys(paths, len(data)))
        elsewhere = pickle.loads(pickle.dumps(claim.destination))
        parts = zip(paths, handles, strict=True)
        tags = [elsewhere.write_part(path, handle, 0, 0, memoryview(data)) for path, handle in parts]
        assert len(s3.open_uploads(runs)) == 2
    with claimed(place, resume=True) as claim:
        for path, handle, tag in zip(paths, handles, tags, strict=True):
            assert claim.destination.has_part(path, handle, 0, 0, len(data), 0, tag)
            claim.destination.finish_file(path, handle, [tag])
        claim.publish_files(paths)
    assert s3.files(runs) == {f"out/{path}": data for path in paths}


def test_a_place_that_is_taken_at_the_start_or_meanwhile_is_not_overwritten(place, runs, s3):
    with claimed(place) as claim:
        write(claim, FILES, publish=False)
        s3.put(runs, {"out/x": b"1"})
        with pytest.raises(DestinationExistsError):
            claim.publish_files(list(FILES))
    for taken, overwrite, said in (
        (place, False, "overwrite=True"),
        (place.as_single_file(), True, "is a folder"),
        (S3OutputLocation(place.bucket, f"{runs}out/x"), True, "is a file"),
    ):
        with pytest.raises(DestinationExistsError, match=said):
            claimed(taken, overwrite=overwrite).__enter__()
    assert list(s3.files(runs)) == ["out/x"]


OLD = {".metadata": b"old index", "a.bin": b"old", "only old": b"old", "deep/old.index.json": b"old"}


@pytest.mark.parametrize("allowed", tiered([0, 1, 2, 3, 4, 5, 7], test="025", extended="1347"))
def test_replacing_shows_the_old_none_or_the_new(place, runs, s3, allowed, monkeypatch):
    """A run that dies between any two requests of publishing; what it left is then taken up, or replaced."""
    s3.put(f"{runs}out/", OLD)
    once, left = Bucket._call_once, [10**6]

    def dying(self: Bucket, operation: str, key: str, **given: object) -> object:
        is_shown = operation == "put_object" and PARTIAL_FOLDER_NAME not in key
        if is_shown or operation in ("complete_multipart_upload", "delete_objects"):
            if left[0] == 0:
                raise StoreError("killed")
            left[0] -= 1
        return once(self, operation, key, **given)

    monkeypatch.setattr(Bucket, "_call_once", dying)
    with suppress(StoreError):
        with claimed(place, overwrite=True, resume=True) as claim:
            write(claim, FILES, publish=False)
            left[0] = allowed
            claim.publish_files(list(FILES), {path: len(data) for path, data in OLD.items()})
    left[0] = 10**6
    place.bucket.delete_objects([place.stage().lock.key])
    seen = {path: data for path, data in s3.files(f"{runs}out/").items() if PARTIAL_FOLDER_NAME not in path}
    assert seen in (OLD, FILES) or ".metadata" not in seen
    with place.claim(overwrite=seen in (OLD, FILES), resume=False) as claim:
        write(claim, {"new": b"new"}, publish=False)
        present = place.list_contents()
        claim.publish_files(["new"], {} if present is None else present.files)
    assert s3.files(runs) == {"out/new": b"new"}
    assert s3.open_uploads(runs) == []


def test_one_file_is_replaced_in_one_step(bucket, runs, s3):
    place = S3OutputLocation(bucket, f"{runs}model.safetensors")
    s3.put(runs, {"model.safetensors": b"old", "other": b"kept"})
    with place.as_single_file().claim(overwrite=True, resume=False) as claim:
        write(claim, {"model.safetensors": b"new"}, publish=False)
        assert bucket.get_object(f"{runs}model.safetensors").data == b"old"  # type: ignore[union-attr]
        claim.publish_files(["model.safetensors"], {"model.safetensors": 3})
    assert s3.files(runs) == {"model.safetensors": b"new", "other": b"kept"}


def test_a_second_writer_is_told_and_of_many_who_start_at_once_one_wins(place):
    with claimed(place):
        for resume in (False, True):
            with pytest.raises(DestinationExistsError, match="another process is writing"):
                claimed(place, overwrite=True, resume=resume).__enter__()
        with pytest.raises(DestinationExistsError, match="another process is writing"):
            place.clean()

    def attempt(_: int) -> bool:
        try:
            place.stage().lock.acquire_lock()
        except DestinationExistsError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(attempt, range(6))) == 1


def test_a_lock_goes_with_its_process_or_with_time(place, monkeypatch):
    code = f"""
from ckpt_tools.stores.s3.location import S3OutputLocation
from ckpt_tools.stores.s3.client import Bucket
from ckpt_tools.stores.s3.options import S3Options
taken = S3OutputLocation(Bucket(S3Options(), {place.bucket.name!r}), {place.key!r}).claim(overwrite=False, resume=True)
taken.__enter__().destination.begin_file("f", {MAX_HELD_FILE_BYTES + 1})
import os; os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ}).returncode == 9
    assert [left.kind for left in place.clean(dry_run=True)] == ["open upload", "lock", "note"]
    lock = place.stage().lock
    elsewhere = json.loads(place.bucket.get_object(lock.key).data) | {"machine": "another"}  # type: ignore[union-attr]
    place.bucket.put_object(lock.key, json.dumps(elsewhere).encode())
    with pytest.raises(DestinationExistsError):
        lock.acquire_lock()
    monkeypatch.setattr(object_lock, "STALE_SECONDS", -1.0)
    lock.acquire_lock()


@pytest.mark.extended
@pytest.mark.parametrize("content", [b"", b'{"token": "1f'], ids=["empty", "cut off"])
def test_notes_of_a_process_that_was_killed_while_it_wrote_them(place, content):
    """A service may keep what came of a request whose sender was killed."""
    staging = place.stage()
    place.bucket.put_object(staging.lock.key, content)
    place.bucket.put_object(f"{staging.destination.notes.prefix}publishing", content)
    with claimed(place) as taken:
        write(taken, {"a": b"data", "z": b"index"})
    assert S3Store(place.bucket, place.folder_prefix).list() == {"a": 4, "z": 5}
    assert not place.clean(dry_run=True)


def test_who_lost_the_lock_does_not_publish(place, runs, s3):
    with claimed(place, resume=True) as claim:
        write(claim, FILES, publish=False)
        place.bucket.put_object(place.stage().lock.key, b'{"token": "somebody else"}')
        with pytest.raises(StoreError, match="took over"):
            claim.publish_files(list(FILES))
    assert place.list_contents() is None


def test_leftovers_are_ours_alone(place, runs, s3):
    client = s3.client()
    for key in ("out/g", "out/theirs", "other"):
        client.create_multipart_upload(Bucket=BUCKET, Key=runs + key)
    with claimed(place, resume=True) as claim:
        claim.destination.write_part("f", claim.destination.begin_file("f", len(PART)), 0, 0, b"abc")
        claim.log.append(b"noted")
    found = {(left.kind, left.num_bytes) for left in place.clean(dry_run=True)}
    assert ("open upload", 3) in found and ("log", 5) in found
    place.clean()
    assert place.clean(dry_run=True) == [] and s3.files(runs) == {}
    assert sorted(s3.open_uploads(runs)) == ["other", "out/g", "out/theirs"]


def test_an_upload_that_is_gone_was_completed_if_the_object_has_its_metadata(bucket, runs):
    """The answer to the first request can be lost, and then a second one is made."""
    upload = bucket.create_upload(f"{runs}a", {"digest": "1"})
    etags = [bucket.upload_part(f"{runs}a", upload, 1, b"data")]
    bucket.complete_upload(f"{runs}a", upload, etags, {"digest": "1"})
    bucket.complete_upload(f"{runs}a", "gone", etags, {"digest": "1"})
    with pytest.raises(StoreError):
        bucket.complete_upload(f"{runs}a", "gone", etags, {"digest": "2"})


def test_the_service_copies_within_itself(place, runs, s3):
    s3.put(runs, {"source": b"head" + PART + PART})
    source = S3Store(place.bucket, runs).find_copy_source("source")
    assert source is not None
    with claimed(place) as claim:
        target = claim.destination
        rules = target.part_rules
        assert rules.allows_copy(source.service, len(PART)) and not rules.allows_copy(source.service, len(PART) - 1)
        assert not rules.allows_copy("elsewhere", len(PART))
        handle = target.begin_file("f", len(PART) + 3)
        with pytest.raises(StoreError):
            target.copy_part("f", handle, 0, CopySource(source.service, source.name, '"another"'), 5, 5 + len(PART))
        part_tags = [
            target.copy_part("f", handle, 0, source, 5, 5 + len(PART)),
            target.write_part("f", handle, 1, len(PART), b"abc"),
        ]
        assert target.has_part("f", handle, 0, 0, len(PART), 0, part_tags[0])
        wrong = part_tags[0].replace(str(len(PART)), str(len(PART) + 1))
        with pytest.raises(StoreError, match="copied part 1 wrongly"):
            target.finish_file("f", handle, [wrong, part_tags[1]])
        target.finish_file("f", handle, part_tags)
        claim.publish_files(["f"])
    assert s3.files(runs)["out/f"] == PART[1:] + PART[:1] + b"abc"


def test_a_file_that_changes_while_it_is_read_is_an_error(bucket, runs, s3):
    s3.put(runs, {"x/f": b"first"})
    source = Source.open(S3Store(bucket, f"{runs}x/"))
    s3.put(runs, {"x/f": b"other"})
    with pytest.raises(StoreError, match="changed while"):
        source.read("f", 0, 5)


def test_opening(bucket, runs, s3):
    s3.put(runs, {"x/f": b"first", "x/.hidden/g": b"", "x/.metadata": b""})
    folder, single = open_s3_store(bucket, f"{runs}x"), open_s3_store(bucket, f"{runs}x/f")
    assert folder is not None and list(folder.list()) == [".metadata", "f"]
    assert single is not None and dict(single.list()) == {"f": 5} and single.url.endswith("/x/f")
    assert open_s3_store(bucket, f"{runs}x/nothing") is None
    with pytest.raises(SourceNotFoundError, match="no bucket"):
        open_s3_store(Bucket(S3Options(), "no-such-bucket"), "x")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (S3Options(secret="wrong", key="tester"), "access was refused"),
        (S3Options(endpoint_url="http://127.0.0.1:9", retry=S3Options.parse({"retries": 1}).retry), "no answer from"),
        (S3Options(profile="nobody"), "nobody"),
        (S3Options(read_timeout=59), "no credentials"),
    ],
)
def test_what_cannot_be_reached_is_said(bucket, options, said, monkeypatch):
    if said == "no credentials":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match=said) as caught:
        list(Bucket(options, bucket.name).list_objects(""))
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("options", [{"what": "1"}, {"anon": "perhaps"}, {"retries": "x"}, {"read_timeout": "x"}])
def test_options_that_are_none(options):
    with pytest.raises(CkptError) as caught:
        S3Options.parse(options)
    assert caught.value.exit_code == 2


def test_small_reads_share_requests(bucket, runs, s3, monkeypatch):
    data = os.urandom(8 * AHEAD_BYTES + 6000)
    s3.put(runs, {"x/f": data})
    source = Source.open(S3Store(bucket, f"{runs}x/"))
    cached, requests, read = BlockCache(source.store, source.files), [], Bucket.read_into
    monkeypatch.setattr(Bucket, "read_into", lambda *given, **more: (requests.append(given), read(*given, **more))[1])

    def check(start: int, size: int) -> None:
        buffer = bytearray(min(size, len(data) - start))
        cached.read_into("f", start, memoryview(buffer))
        assert buffer == data[start : start + len(buffer)]

    check(AHEAD_BYTES, 300)
    check(AHEAD_BYTES + 400, 300)
    assert [len(given[3]) for given in requests] == [BLOCK_BYTES]
    requests.clear()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda start: check(start, 70_000), range(0, len(data), 50_000)))
    assert len(requests) < 20
    assert sum(len(given[3]) for given in requests) < 1.2 * len(data)
    requests.clear()
    check(0, MAX_SMALL_BYTES)
    check(AHEAD_BYTES, MAX_SMALL_BYTES + 1)
    assert [len(given[3]) for given in requests] == [MAX_SMALL_BYTES + 1]
    requests.clear()
    cached.prefetch("f", 77, 77 + 3 * AHEAD_BYTES)
    for start, size in [(77, 1), (76 + 3 * AHEAD_BYTES, 1), (100, 2 * AHEAD_BYTES), (77, 3 * AHEAD_BYTES)]:
        check(start, size)
    assert [len(given[3]) for given in requests] == [3 * AHEAD_BYTES]
    check(77, 3 * AHEAD_BYTES + 1)
    assert len(requests) == 2
    with pytest.raises(IncompleteError):
        cached.read_into("f", len(data) - 1, memoryview(bytearray(2)))
