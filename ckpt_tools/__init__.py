"""ckpt-tools: open any sharded training checkpoint and write any other.

The public API is what ``__all__`` lists: the verbs of the command line as functions, the classes of their results,
the errors that they raise, and the types of the formats' names. docs/python.md describes them. Each is loaded when it
is first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt_tools.api import (
        checksum,
        clean,
        consolidate,
        convert,
        diff,
        inspect,
        list_formats,
        ls,
        make_loadable,
        open,
        plan,
        prune,
        reshard,
        scan,
        sign,
        verify,
    )
    from ckpt_tools.checkpoint import Checkpoint, LazyTensor
    from ckpt_tools.conversion import ConvertReport, PlanReport
    from ckpt_tools.core.notes import Note, Outcome
    from ckpt_tools.core.option_names import ReadFormat, WrittenFormat
    from ckpt_tools.core.summary import Summary, TensorSummary
    from ckpt_tools.errors import (
        CkptError,
        DestinationExistsError,
        DifferenceError,
        FormatError,
        IncompleteError,
        LossError,
        MalformedError,
        MemoryBudgetError,
        SeveralCheckpointsError,
        SourceNotFoundError,
        StoreError,
        UnsafeError,
        UnsupportedError,
        UsageError,
    )
    from ckpt_tools.formats.index import FormatInfo
    from ckpt_tools.loadable import LoadableReport
    from ckpt_tools.runs.pruning import Pruned, PruneReport
    from ckpt_tools.runs.report import RunCheckpoint, RunListing
    from ckpt_tools.serialization.loadable import LeftOut, Replaced
    from ckpt_tools.stores.claims import UrlClaim, claim
    from ckpt_tools.stores.destination import Leftover
    from ckpt_tools.stores.leftovers import CleanReport
    from ckpt_tools.torch.load_into import load_into
    from ckpt_tools.torch.storage_reader import storage_reader
    from ckpt_tools.verification.deviation import Deviation
    from ckpt_tools.verification.difference import Aspect, Difference
    from ckpt_tools.verification.report import VerifyReport
    from ckpt_tools.verification.scan.findings import Danger, Finding
    from ckpt_tools.verification.scan.report import ScanReport
    from ckpt_tools.verification.signing import SignReport
    from ckpt_tools.verification.verify import ChecksumReport

__version__ = "0.1.0"

_HOMES = {
    "api": (
        "checksum",
        "clean",
        "consolidate",
        "convert",
        "diff",
        "inspect",
        "list_formats",
        "ls",
        "make_loadable",
        "open",
        "plan",
        "prune",
        "reshard",
        "scan",
        "sign",
        "verify",
    ),
    "checkpoint": ("Checkpoint", "LazyTensor"),
    "conversion": ("ConvertReport", "PlanReport"),
    "core.notes": ("Note", "Outcome"),
    "core.option_names": ("ReadFormat", "WrittenFormat"),
    "runs.report": ("RunCheckpoint", "RunListing"),
    "core.summary": ("Summary", "TensorSummary"),
    "errors": (
        "CkptError",
        "DestinationExistsError",
        "DifferenceError",
        "FormatError",
        "IncompleteError",
        "LossError",
        "MalformedError",
        "MemoryBudgetError",
        "SourceNotFoundError",
        "StoreError",
        "UnsafeError",
        "UnsupportedError",
        "SeveralCheckpointsError",
        "UsageError",
    ),
    "formats.index": ("FormatInfo",),
    "loadable": ("LoadableReport",),
    "serialization.loadable": ("LeftOut", "Replaced"),
    "stores.claims": ("UrlClaim", "claim"),
    "stores.destination": ("Leftover",),
    "stores.leftovers": ("CleanReport",),
    "torch.load_into": ("load_into",),
    "torch.storage_reader": ("storage_reader",),
    "verification.deviation": ("Deviation",),
    "verification.difference": ("Aspect", "Difference"),
    "runs.pruning": ("PruneReport", "Pruned"),
    "verification.report": ("VerifyReport",),
    "verification.scan.findings": ("Danger", "Finding"),
    "verification.scan.report": ("ScanReport",),
    "verification.signing": ("SignReport",),
    "verification.verify": ("ChecksumReport",),
}
"""Where each public name is."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Aspect",
    "Checkpoint",
    "ChecksumReport",
    "CkptError",
    "CleanReport",
    "ConvertReport",
    "Danger",
    "DestinationExistsError",
    "Deviation",
    "Difference",
    "DifferenceError",
    "Finding",
    "FormatError",
    "FormatInfo",
    "IncompleteError",
    "LazyTensor",
    "LeftOut",
    "Leftover",
    "LoadableReport",
    "LossError",
    "MalformedError",
    "MemoryBudgetError",
    "Note",
    "Outcome",
    "PlanReport",
    "PruneReport",
    "Pruned",
    "ReadFormat",
    "Replaced",
    "RunCheckpoint",
    "RunListing",
    "ScanReport",
    "SeveralCheckpointsError",
    "SignReport",
    "SourceNotFoundError",
    "StoreError",
    "Summary",
    "TensorSummary",
    "UnsafeError",
    "UnsupportedError",
    "UrlClaim",
    "UsageError",
    "VerifyReport",
    "WrittenFormat",
    "__version__",
    "checksum",
    "claim",
    "clean",
    "consolidate",
    "convert",
    "diff",
    "inspect",
    "list_formats",
    "load_into",
    "ls",
    "make_loadable",
    "open",
    "plan",
    "prune",
    "reshard",
    "scan",
    "sign",
    "storage_reader",
    "verify",
]


if not TYPE_CHECKING:
    # Type checkers would take every name for one that is here.

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
