"""Object store for a run's checkpoints (``--storage``), and Ray Train's record in it.

Every scheme uses fsspec, S3 uses s3fs, which resolves credentials, endpoint, region and profile as ``ckpt_tools`` does.
They are not sent to workers: each process reads its own environment, which workers of a local cluster inherit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fsspec.core import url_to_fs

from ckpt_tools.errors import MalformedError, SourceNotFoundError, StoreError, UsageError

RECORD_NAME = "checkpoint_manager_snapshot.json"
"""Ray's record of a run, written when every worker has uploaded its shards of a checkpoint."""

Result = TypeVar("Result")


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of ``url`` without cached listings, and the path in it. Raises UsageError."""
    try:
        fs, path = url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url} cannot be used: {error}") from error
    return fs, str(path).rstrip("/")


def check_bucket(url: str) -> None:
    """Raises SourceNotFoundError if S3 has no such bucket, StoreError if the request fails. s3fs would create a bucket
    for a mistyped name."""
    if not url.startswith("s3://"):
        return
    fs, path = file_system(url)
    bucket = path.partition("/")[0]
    try:
        asked(url, lambda: fs.call_s3("head_bucket", Bucket=bucket))
    except FileNotFoundError as error:
        raise SourceNotFoundError(f"there is no bucket {bucket}", path=url) from error


def names_below(url: str) -> list[str]:
    """Names directly below ``url``. Raises StoreError."""
    fs, path = file_system(url)
    try:
        found = asked(url, lambda: fs.ls(path, detail=False))
    except FileNotFoundError:
        return []
    return [entry.rstrip("/").rpartition("/")[2] for entry in found]


def recorded_latest(url: str) -> str | None:
    """Name of the last checkpoint in Ray's record below ``url``; None without a record. Raises StoreError if it cannot
    be read. MalformedError if it is not a record of Ray's."""
    fs, path = file_system(f"{url}/{RECORD_NAME}")
    try:
        record = json.loads(asked(url, lambda: fs.cat_file(path)))
        latest = record["latest_checkpoint_result"]
        return latest["checkpoint_dir_name"] if latest else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise MalformedError("this is not a record of a run by Ray Train", path=f"{url}/{RECORD_NAME}") from error


def drop_missing(folder: Path) -> None:
    """Remove missing checkpoints from Ray's record in ``folder``: Ray refuses it otherwise, or if unreadable."""
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
    """Result of ``call``. Raises StoreError if the service fails; FileNotFoundError is passed on."""
    try:
        return call()
    except FileNotFoundError:
        raise
    except Exception as error:
        # The libraries of the services have no common error class.
        raise StoreError(f"the store failed with {type(error).__name__}: {error}", path=url) from error
