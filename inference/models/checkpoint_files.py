"""One rule for all that load a model: nothing is made of a checkpoint whose files changed while they were read.

The state of every file is looked at before and after reading. If the two differ, the checkpoint is read again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import ckpt_tools
from ckpt_tools.errors import CkptError, StoreError

from .config_folder import CONFIG, CONFIG_PLACES, digest_config_folder

Result = TypeVar("Result")

PAUSE_SECONDS = 0.1, 0.4, 1.6  # before the second, third and fourth reading
TICK_SECONDS = 0.05  # a file system's clock advances every 1 to 10 ms: two changes within a tick have the same time


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The state of a checkpoint's files, and a digest of ``config.json`` and its companions if these are in the folder
    ``config``, or not beside the weights. Two that are equal: nothing changed in between."""

    weights: ckpt_tools.Fingerprint
    config_digest: str | None
    config: str | Path | None = None

    @classmethod
    def from_url(
        cls, url: str | Path, options: Mapping[str, Any] | None = None, config: str | Path | None = None
    ) -> Self:
        """The state now. Raises ``CkptError`` as ``ckpt_tools.fingerprint``, and if ``config`` has no such file."""
        weights = ckpt_tools.fingerprint(url, storage_options=options)
        if weights.changed is not None and abs(time.time() - weights.changed) < TICK_SECONDS:
            time.sleep(TICK_SECONDS)
            weights = weights.again(storage_options=options)
        return cls(weights, _digest_config(weights, options, config), config)

    def refresh(self, options: Mapping[str, Any] | None = None) -> Self:
        """The same files now. Raises ``CkptError`` as ``Fingerprint.again``."""
        weights = self.weights.again(storage_options=options)
        return replace(self, weights=weights, config_digest=_digest_config(weights, options, self.config))

    def is_unchanged(self, options: Mapping[str, Any] | None) -> bool:
        """Whether the files are as they were. ``RUN@latest`` may mean another checkpoint by now."""
        checkpoint = replace(self, weights=replace(self.weights, src=self.weights.url))
        try:
            return checkpoint.refresh(options) == self
        except CkptError as error:
            if isinstance(error, StoreError):
                raise
            return False


def read_consistently(
    url: str | Path,
    options: Mapping[str, Any] | None,
    read: Callable[[CheckpointFiles], Result],
    config: str | Path | None = None,
) -> Result:
    """The result of ``read``, during which no file of the checkpoint, and none of the folder ``config``, changed.
    ``read`` is called up to four times.

    Raises:
        StoreError: the files changed each time. CkptError: as ``read``, and if the state of the files is not known.
    """
    for pause in (*PAUSE_SECONDS, 0.0):
        files = CheckpointFiles.from_url(url, options, config)
        try:
            result = read(files)
        except Exception:
            # A file that is still being written may be no file of its format.
            if files.is_unchanged(options):
                raise
        else:
            if files.is_unchanged(options):
                return result
            del result  # its memory, before it is read again
        time.sleep(pause)
    raise StoreError(
        f"{url}: files changed while they were read, {len(PAUSE_SECONDS) + 1} times in a row; "
        "try again when it is written"
    )


def _digest_config(
    weights: ckpt_tools.Fingerprint, options: Mapping[str, Any] | None, config: str | Path | None
) -> str | None:
    inside = (f"{place}/{CONFIG}".lstrip("/") for place in CONFIG_PLACES if place != "..")
    is_inside = not config and any(path in weights.files for path in inside)
    return None if is_inside else digest_config_folder(weights.url, options, config)
