"""What the processes of a service say to each other over their pipes. A worker is told by the supervisor, and asks it.

A change of the models has two halves. First each worker reads the checkpoint beside the one that answers, and says
which weights it has found. Only if all have found the same ones, all let them answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_tools.errors import CkptError

from ..snapshot import Snapshot

# --- to the supervisor


@dataclass(frozen=True, slots=True)
class Loaded:
    """The worker has read its models: the digest of each place, None where nothing is to answer."""

    digests: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker could not start, and ends."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Serving:
    """The worker answers requests."""


@dataclass(frozen=True, slots=True)
class Change:
    """Load what is at a place now, in every worker; or unload it."""

    place: int
    is_load: bool


@dataclass(frozen=True, slots=True)
class Count:
    """Say what has been counted. Asked by a worker it means all of them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A worker asks; it gets a ``Told`` with the same number."""

    number: int
    question: Change | Count


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to an ``Order``."""

    number: int
    found: str | Snapshot | CkptError | None


# --- to a worker


@dataclass(frozen=True, slots=True)
class Begin:
    """Serve what was read: the number of each place's version, None where nothing answers."""

    numbers: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Read what is at the place now. The answer is its digest, or the error."""

    place: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Let answer what was read."""

    place: int
    version: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Forget what was read: somebody could not read it, or read something else."""

    place: int
    error: CkptError


@dataclass(frozen=True, slots=True)
class Empty:
    """Let nothing answer at the place."""

    place: int


@dataclass(frozen=True, slots=True)
class Order:
    """A worker does it, and sends a ``Done`` with the same number."""

    number: int
    what: Prepare | Commit | Abandon | Empty | Count


@dataclass(frozen=True, slots=True)
class Told:
    """The answer to an ``Asked``."""

    number: int
    found: Mapping[int, Snapshot] | CkptError | None


@dataclass(frozen=True, slots=True)
class Stop:
    """End, as at a signal: with the drain the first time, without it the second time."""


ToSupervisor = Loaded | Failed | Serving | Asked | Done
ToWorker = Begin | Order | Told | Stop
