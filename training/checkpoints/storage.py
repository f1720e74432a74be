"""An object store as the home of a run's checkpoints: what lies there, and how Ray Train gets to it.

Every scheme goes through fsspec, S3 through s3fs, which resolves credentials, endpoint, region and profile as
``ckpt_tools`` does. They stay out of what is sent to workers: each process finds them in its own environment, which
the workers of a local cluster inherit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fsspec.core import url_to_fs

from ckpt_tools.errors import MalformedError, SourceNotFoundError, StoreError, UsageError

RECORD_NAME = "checkpoint_manager_snapshot.json"
"""Ray's record of a run. It is written after each checkpoint, when every worker has uploaded its shards."""

Result = TypeVar("Result")


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of ``url``, and the path in it. Raises UsageError.

    Listings are not cached: other processes write there.
    """
    try:
        fs, path = url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url} cannot be used: {error}") from error
    return fs, str(path).rstrip("/")


def check_bucket(url: str) -> None:
    """Raises SourceNotFoundError where S3 has no such bucket, StoreError where it cannot be asked.

    Asked before anything is written, because s3fs would make a bucket of a name that was mistyped.
    """
    if not url.startswith("s3://"):
        return
    fs, path = file_system(url)
    bucket = path.partition("/")[0]
    try:
        asked(url, lambda: fs.call_s3("head_bucket", Bucket=bucket))
    except FileNotFoundError as error:
        raise SourceNotFoundError(f"there is no bucket {bucket}", path=url) from error


def names_below(url: str) -> list[str]:
    """What lies directly below ``url``, by name. Raises StoreError."""
    fs, path = file_system(url)
    try:
        found = asked(url, lambda: fs.ls(path, detail=False))
    except FileNotFoundError:
        return []
    return [entry.rstrip("/").rpartition("/")[2] for entry in found]


def recorded_latest(url: str) -> str | None:
    """The name of the last checkpoint in Ray's record below ``url``, if there is one.

    Raises:
        StoreError: it cannot be read. MalformedError: it is no record of Ray's.
    """
    fs, path = file_system(f"{url}/{RECORD_NAME}")
    try:
        record = json.loads(asked(url, lambda: fs.cat_file(path)))
        latest = record["latest_checkpoint_result"]
        return latest["checkpoint_dir_name"] if latest else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise MalformedError("this is no record of a run by Ray Train", path=f"{url}/{RECORD_NAME}") from error


def drop_missing(folder: Path) -> None:
    """Take the checkpoints that were removed since out of Ray's record in ``folder``: Ray refuses to go on with a
    record of what is not there. A record that is not Ray's is left for Ray to refuse."""
    path = folder / RECORD_NAME
    try:
        record = json.loads(path.read_text())
        pairs = list(zip(record["checkpoint_results"], record["checkpoint_report_indices"], strict=True))
        kept = [pair for pair in pairs if (folder / pair[0]["checkpoint_dir_name"]).exists()]
        record["checkpoint_results"] = [result for result, _ in kept]
        record["checkpoint_report_indices"] = [index for _, index in kept]
        record["latest_checkpoint_result"] = kept[-1][0] if kept else None
    except (OSError, ValueError, KeyError, TypeError):
        return
    if len(kept) < len(pairs):
        path.write_text(json.dumps(record))


def asked(url: str, call: Callable[[], Result]) -> Result:
    """What ``call`` gives. Raises StoreError where the service fails; FileNotFoundError is the caller's."""
    try:
        return call()
    except FileNotFoundError:
        raise
    except Exception as error:
        # Each service's library has errors of its own, under roots of their own.
        raise StoreError(f"the store failed with {type(error).__name__}: {error}", path=url) from error
