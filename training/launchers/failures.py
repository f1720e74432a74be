"""Failures of ranks, reported as one sentence."""

from __future__ import annotations

import fcntl
import json
import re
import signal
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ckpt_tools import errors
from ckpt_tools.errors import CkptError, StoreError
from ckpt_tools.process.credentials import mask_secrets

from ..checkpoints.storage import describe_os_error, find_root_cause
from ..config.references import find_users_line

PROCESS_ENDED = "ProcessEnded"
_LOST = re.compile(r"(?i)\bgloo\b|\bnccl|connection (was )?(closed|reset|refused)|broken pipe")
ERROR_LOG_NAME = "error.log"
TORCHRUN_LOG_NAME = "torchrun.log"
RECORD_BYTES = 2**16
MAX_DETAILS = 2**14  # characters, of the end

BLAME_SECONDS = 3.0
"""Time between a rank's error and its end. The ranks that lose a killed one fail because of it; meanwhile the launcher
finds the killed one: torchrun's agent looks every 0.1 seconds, Ray Train every 2."""


class RunFailedError(CkptError):
    """A rank failed with an unexpected error; the message names the file with the traceback."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """An exception of a rank, or the end of its process, which can be sent to another process."""

    rank: int
    kind: str
    message: str
    details: str

    @classmethod
    def from_error(cls, rank: int, error: BaseException) -> RankFailure:
        details = "".join(traceback.format_exception(error))
        cause = find_root_cause(error)
        if isinstance(cause, OSError):
            cause = StoreError(describe_os_error(cause))
        return cls(rank, type(cause).__name__, mask_secrets(str(cause)), mask_secrets(details))

    @classmethod
    def from_lost_process(cls, rank: int, error: BaseException) -> RankFailure:
        """The end of a rank's process, about which Ray raised ``error``."""
        lost = "node has died" in str(error)
        how = "its machine" if lost else "its process, as by SIGKILL; the kernel sends it when memory runs out"
        return cls(rank, PROCESS_ENDED, f"has lost {how}", mask_secrets(str(error)))

    @classmethod
    def from_exit_code(cls, rank: int, code: int) -> RankFailure:
        """The end of a rank's process with this exit code; a negative one is a signal."""
        named = {each.value: each.name for each in signal.Signals}
        hint = "; the kernel does so when memory runs out" if -code == signal.SIGKILL else ""
        how = f"was ended by {named.get(-code, f'signal {-code}')}{hint}"
        return cls(rank, PROCESS_ENDED, how if code < 0 else f"ended with exit code {code}", "")

    @property
    def is_end(self) -> bool:
        return self.kind == PROCESS_ENDED

    @property
    def has_lost_another(self) -> bool:
        """Whether it lost the connection to another rank, whose failure is then the cause."""
        return _LOST.search(self.message) is not None and not hasattr(errors, self.kind)

    @property
    def sentence(self) -> str:
        if self.is_end:
            return f"rank {self.rank} {self.message}"
        lines = self.message.strip().splitlines() or ["no message"]
        return f"rank {self.rank} failed with {self.kind}: {lines[0]}{find_users_line(self.details)}"

    @staticmethod
    def reserve_record(path: Path) -> None:
        """Room for a record, because the disk may be full when a rank fails."""
        path.write_bytes(b" " * RECORD_BYTES)

    def write_record(self, path: Path) -> None:
        """Write it to the room at ``path``, unless an earlier failure, which may be its cause, is there."""
        text = json.dumps(asdict(replace(self, details=self.details[-MAX_DETAILS:])))
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if file.read(1) == b" ":
                file.seek(0)
                file.write(text.encode())

    @classmethod
    def read_record(cls, path: Path) -> RankFailure | None:
        """Read what :meth:`write_record` wrote, if it did."""
        text = path.read_text().strip()
        return cls(**json.loads(text)) if text else None

    def to_error(self, out: Path) -> CkptError:
        """The same error if it is a ``CkptError``, else one sentence that names the file with the details."""
        ours = getattr(errors, self.kind, None)
        if isinstance(ours, type) and issubclass(ours, CkptError):
            return ours(self.message)
        log = out / (ERROR_LOG_NAME if self.details else TORCHRUN_LOG_NAME)
        try:
            if self.details:
                log.write_text(mask_secrets(self.details))
        except OSError:
            return RunFailedError(self.sentence)
        return RunFailedError(f"{self.sentence} (see {log})")
