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
        average as average,
        cat as cat,
        check as check,
        check_recipe as check_recipe,
        checksum as checksum,
        clean as clean,
        consolidate as consolidate,
        convert as convert,
        convert_run as convert_run,
        delta as delta,
        diff as diff,
        inspect as inspect,
        list_formats as list_formats,
        list_recipes as list_recipes,
        ls as ls,
        make_loadable as make_loadable,
        merge_lora as merge_lora,
        open as open,
        plan as plan,
        prune as prune,
        reshard as reshard,
        scan as scan,
        show_recipe as show_recipe,
        sign as sign,
        verify as verify,
    )
    from ckpt_tools.checkpoint import Checkpoint as Checkpoint, LazyTensor as LazyTensor
    from ckpt_tools.conversion.convert_run import (
        ConvertedCheckpoint as ConvertedCheckpoint,
        ConvertRunReport as ConvertRunReport,
        StepOutcome as StepOutcome,
    )
    from ckpt_tools.conversion.delta import DeltaReport as DeltaReport
    from ckpt_tools.conversion.report import ConvertReport as ConvertReport, PlanReport as PlanReport
    from ckpt_tools.core.collapsing import TensorSummary as TensorSummary
    from ckpt_tools.core.notes import Note as Note, Outcome as Outcome
    from ckpt_tools.core.option_names import ReadFormat as ReadFormat, WrittenFormat as WrittenFormat
    from ckpt_tools.messages.progress_bar import progress_bar as progress_bar
    from ckpt_tools.core.summary import Summary as Summary, TensorStats as TensorStats
    from ckpt_tools.errors import (
        CkptError as CkptError,
        DestinationExistsError as DestinationExistsError,
        DifferenceError as DifferenceError,
        FormatError as FormatError,
        IncompleteError as IncompleteError,
        LossError as LossError,
        MalformedError as MalformedError,
        MemoryBudgetError as MemoryBudgetError,
        SeveralCheckpointsError as SeveralCheckpointsError,
        SourceNotFoundError as SourceNotFoundError,
        StoreError as StoreError,
        UnsafeError as UnsafeError,
        UnsupportedError as UnsupportedError,
        UsageError as UsageError,
    )
    from ckpt_tools.formats.index import FormatInfo as FormatInfo
    from ckpt_tools.conversion.loadable import LoadableReport as LoadableReport
    from ckpt_tools.recipes.cards import RecipeCard as RecipeCard, RecipeProof as RecipeProof
    from ckpt_tools.recipes.report import (
        MappedTensor as MappedTensor,
        RecipeInfo as RecipeInfo,
        RecipeMap as RecipeMap,
        UsedRecipe as UsedRecipe,
    )
    from ckpt_tools.runs.fingerprint import Fingerprint as Fingerprint, fingerprint as fingerprint
    from ckpt_tools.runs.pruning import Pruned as Pruned, PruneReport as PruneReport
    from ckpt_tools.runs.listing import RunCheckpoint as RunCheckpoint, RunListing as RunListing
    from ckpt_tools.serialization.loadable import LeftOut as LeftOut, Replaced as Replaced
    from ckpt_tools.slices import TensorSlice as TensorSlice
    from ckpt_tools.stores.remote import UrlClaim as UrlClaim, claim as claim
    from ckpt_tools.stores.publishing import CleanReport as CleanReport
    from ckpt_tools.stores.staging import Leftover as Leftover
    from ckpt_tools.torch.load_into import load_into as load_into
    from ckpt_tools.torch.storage_reader import storage_reader as storage_reader
    from ckpt_tools.verification.deviation import Deviation as Deviation
    from ckpt_tools.verification.digest_files import recorded_digests as recorded_digests
    from ckpt_tools.verification.digests import Digest as Digest
    from ckpt_tools.verification.health.report import (
        HealthFinding as HealthFinding,
        HealthReport as HealthReport,
        HealthRule as HealthRule,
    )
    from ckpt_tools.verification.report import Aspect as Aspect, Difference as Difference, VerifyReport as VerifyReport
    from ckpt_tools.verification.scan.findings import Danger as Danger, Finding as Finding, ScanReport as ScanReport
    from ckpt_tools.verification.signing import SignReport as SignReport
    from ckpt_tools.verification.verify import ChecksumReport as ChecksumReport

__version__ = "0.1.0"

_NAMES_BY_MODULE = {
    "api": (
        "average",
        "cat",
        "check",
        "check_recipe",
        "checksum",
        "clean",
        "consolidate",
        "convert",
        "convert_run",
        "delta",
        "diff",
        "inspect",
        "list_formats",
        "list_recipes",
        "ls",
        "make_loadable",
        "merge_lora",
        "open",
        "plan",
        "prune",
        "reshard",
        "scan",
        "show_recipe",
        "sign",
        "verify",
    ),
    "checkpoint": ("Checkpoint", "LazyTensor"),
    "conversion.convert_run": ("ConvertRunReport", "ConvertedCheckpoint", "StepOutcome"),
    "conversion.delta": ("DeltaReport",),
    "conversion.report": ("ConvertReport", "PlanReport"),
    "core.collapsing": ("TensorSummary",),
    "core.notes": ("Note", "Outcome"),
    "core.option_names": ("ReadFormat", "WrittenFormat"),
    "runs.listing": ("RunCheckpoint", "RunListing"),
    "messages.progress_bar": ("progress_bar",),
    "core.summary": ("Summary", "TensorStats"),
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
    "conversion.loadable": ("LoadableReport",),
    "recipes.cards": ("RecipeCard", "RecipeProof"),
    "recipes.report": ("MappedTensor", "RecipeInfo", "RecipeMap", "UsedRecipe"),
    "serialization.loadable": ("LeftOut", "Replaced"),
    "slices": ("TensorSlice",),
    "stores.remote": ("UrlClaim", "claim"),
    "stores.publishing": ("CleanReport",),
    "stores.staging": ("Leftover",),
    "torch.load_into": ("load_into",),
    "torch.storage_reader": ("storage_reader",),
    "verification.deviation": ("Deviation",),
    "verification.digest_files": ("recorded_digests",),
    "verification.digests": ("Digest",),
    "verification.health.report": ("HealthFinding", "HealthReport", "HealthRule"),
    "verification.report": ("Aspect", "Difference", "VerifyReport"),
    "runs.fingerprint": ("Fingerprint", "fingerprint"),
    "runs.pruning": ("PruneReport", "Pruned"),
    "verification.scan.findings": ("Danger", "Finding", "ScanReport"),
    "verification.signing": ("SignReport",),
    "verification.verify": ("ChecksumReport",),
}
"""Where each public name is."""

_MODULE_BY_NAME = {name: home for home, names in _NAMES_BY_MODULE.items() for name in names}

if not TYPE_CHECKING:
    # Type checkers read the imports above; with this function they would accept every name.
    def __getattr__(name: str) -> object:
        if name not in _MODULE_BY_NAME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_import_module(f"{__name__}.{_MODULE_BY_NAME[name]}"), name)

    def __dir__() -> list[str]:
        return __all__

    __all__ = sorted([*_MODULE_BY_NAME, "__version__"])
