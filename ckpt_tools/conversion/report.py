"""Reports of a conversion: its plan and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, StateKey, TensorEntry, count_tensors_by_role
from ckpt_tools.core.notes import Note
from ckpt_tools.core.trainer_folder import FILE_SLOT
from ckpt_tools.messages.progress import log_info
from ckpt_tools.messages.showing import DisplayableResult
from ckpt_tools.messages.wording import format_count, format_size
from ckpt_tools.planning.plan import Plan, PlanFigures

if TYPE_CHECKING:
    from ckpt_tools.recipes.report import UsedRecipe


@dataclass(frozen=True, slots=True, repr=False)
class PlanReport(DisplayableResult):
    """The plan of a conversion. Sizes in bytes: ``num_bytes`` of the tensors that are written, ``file_bytes`` of the
    files that will hold them. ``renamed`` are the names that ``rename`` and ``key_map`` change, by their old ones,
    which are those of ``recipe`` if there is one. ``removed_files`` lie at the destination now and are replaced.
    ``tensors_by_role`` counts the tensors by ``core.manifest.ROLES``; ``tied`` are further names of them, by owner."""

    SHOWN: ClassVar[tuple[str, ...]] = (
        "source_format",
        "target_format",
        "num_tensors",
        "bytes_read",
        "bytes_written",
        "files",
        "peak_memory_bytes",
        "notes",
    )
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ("num_tensors", "file_bytes", "removed_bytes")

    source_format: str
    target_format: str
    files: Mapping[str, int]
    tensors_by_role: Mapping[str, int]
    num_tasks: int
    bytes_read: int
    bytes_written: int
    peak_memory_bytes: int
    notes: tuple[Note, ...]
    num_bytes: int
    renamed: Mapping[str, str] = field(default_factory=dict)
    removed_files: Mapping[str, int] = field(default_factory=dict)
    recipe: UsedRecipe | None = None
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_tensors(self) -> int:
        return sum(self.tensors_by_role.values())

    @property
    def file_bytes(self) -> int:
        return sum(self.files.values())

    @property
    def removed_bytes(self) -> int:
        return sum(self.removed_files.values())


@dataclass(frozen=True, slots=True, repr=False)
class ConvertReport(DisplayableResult):
    """The result of a conversion. ``bytes_recovered`` were written by an earlier run, and not again; of
    ``bytes_written`` the destination copied ``bytes_copied`` itself; ``digests`` is the path or URL of the digests, if
    they were asked for. ``loading`` is Python code that loads the output by its own framework: it names ``model`` and
    ``optimizer``, and comments say what is not Python. With ``part``, ``missing_parts`` are the numbers of
    those that were not written yet; the destination is there once there are none."""

    SHOWN: ClassVar[tuple[str, ...]] = (
        "destination",
        "target_format",
        "num_tensors",
        "bytes_written",
        "seconds",
        "notes",
    )

    plan: PlanReport
    destination: str
    bytes_read: int
    bytes_written: int
    bytes_recovered: int
    bytes_copied: int
    seconds: float
    digests: str | None = None
    loading: str = ""
    missing_parts: tuple[int, ...] = ()

    @property
    def source_format(self) -> str:
        return self.plan.source_format

    @property
    def target_format(self) -> str:
        return self.plan.target_format

    @property
    def files(self) -> Mapping[str, int]:
        """The files of the output with their sizes."""
        return self.plan.files

    @property
    def num_tensors(self) -> int:
        return self.plan.num_tensors

    @property
    def num_bytes(self) -> int:
        """Size of the tensors."""
        return self.plan.num_bytes

    @property
    def notes(self) -> tuple[Note, ...]:
        """Outcomes: what was cast, set to a default, kept or dropped."""
        return self.plan.notes


def select_written_tensors(manifest: Manifest, figures: PlanFigures) -> Mapping[StateKey, TensorEntry]:
    """The tensors whose elements a layout writes. A weight can be written as its fp32 master alone, and a number
    of an optimizer's state as a value with the tensors of that state."""
    stored_keys = figures.tensors
    state_names = {key.fqn for key in stored_keys if manifest.tensors[key].kind is Kind.STATE}

    def is_written(key: StateKey, entry: TensorEntry) -> bool:
        is_number = entry.kind is Kind.STATE and not entry.shape and key.fqn in state_names
        return (
            key in stored_keys
            or is_number
            or not entry.numel
            or (key.slot == WEIGHT and StateKey(key.fqn, MASTER) in stored_keys)
        )

    return {key: entry for key, entry in manifest.tensors.items() if key.slot != FILE_SLOT and is_written(key, entry)}


def build_plan_report(
    plan: Plan,
    figures: PlanFigures,
    written_tensors: Mapping[StateKey, TensorEntry],
    source_format: str,
    target_format: str,
    replaced_sizes: Mapping[str, int],
) -> PlanReport:
    """The plan in figures, without notes. ``replaced_sizes`` are files that are there now, names and sizes."""
    return PlanReport(
        source_format=source_format,
        target_format=target_format,
        files=figures.files,
        tensors_by_role=count_tensors_by_role(written_tensors),
        num_bytes=sum(entry.num_bytes for entry in written_tensors.values()),
        num_tasks=figures.num_tasks,
        bytes_read=figures.bytes_read,
        bytes_written=figures.bytes_written,
        peak_memory_bytes=plan.peak_memory_bytes,
        notes=(),
        removed_files=replaced_sizes,
        tied={alias: owner for alias, owner in plan.manifest.aliases.items() if StateKey(owner) in written_tensors},
    )


def log_plan(report: PlanReport) -> None:
    formats = f"{report.source_format} to {report.target_format}"
    log_info(
        "conversion", f"{formats}: {format_size(report.bytes_written)} in {format_count(report.num_tasks, 'task')}"
    )
    for note in report.notes:
        log_info("notes", f"{note.outcome.value}: {note.what} ({note.why})")
