"""Failures of ranks, reported as one sentence."""

from __future__ import annotations

import json
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ckpt_tools import errors
from ckpt_tools.credentials import without_secrets
from ckpt_tools.errors import CkptError

from ..config.references import place_in

ERROR_LOG_NAME = "error.log"


class RunFailedError(CkptError):
    """A rank failed with an unexpected error; the message names the file with the traceback."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a rank, which can be sent to another process."""

    rank: int
    kind: str
    message: str
    details: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        details = "".join(traceback.format_exception(error))
        return cls(rank, type(error).__name__, without_secrets(str(error)), without_secrets(details))

    @property
    def sentence(self) -> str:
        lines = self.message.strip().splitlines() or ["no message"]
        return f"rank {self.rank} failed with {self.kind}: {lines[0]}{place_in(self.details)}"

    def record(self, path: Path) -> None:
        """Write it to ``path``, unless an earlier failure, which may be its cause, is there."""
        with suppress(FileExistsError), path.open("x") as file:
            json.dump(asdict(self), file)

    @classmethod
    def recorded(cls, path: Path) -> Failure:
        """Read what :meth:`record` wrote."""
        return cls(**json.loads(path.read_text()))

    def to_error(self, out: Path) -> CkptError:
        """The same error if it is a ``CkptError``, else one sentence, with the traceback in ``OUT/error.log``."""
        ours = getattr(errors, self.kind, None)
        if isinstance(ours, type) and issubclass(ours, CkptError):
            return ours(self.message)
        log = out / ERROR_LOG_NAME
        log.write_text(without_secrets(self.details))
        return RunFailedError(f"{self.sentence} (see {log})")
