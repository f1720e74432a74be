"""Does a checkpoint that prune keeps hold less than an older one that would go? Compared from headers alone.

Checkpoints of one run have the same weights. Elements are counted and not bytes, and names are those of the bare
model, so that another precision, world size, sharding or wrapper makes no difference. fp32 masters are weights, and not
state. An optimizer counts whether or not a reader knows its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.renaming import strip_wrappers
from ckpt_tools.core.value_refs import iter_tensor_refs, iter_values
from ckpt_tools.errors import UNREADABLE, FormatError, IncompleteError, UnsafeError, UnsupportedError
from ckpt_tools.messages.wording import format_count, format_size, join_names
from ckpt_tools.reading.checkpoint import read_source
from ckpt_tools.runs.listing import read_plain_manifest
from ckpt_tools.runs.rules import ComparedSteps
from ckpt_tools.state_tree.incomplete_state import is_optimizer_name
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.names import has_optimizer_in_path
from ckpt_tools.trainers.saved import SavedCheckpoint

MAX_SHRINKAGE = 2
"""One that holds less than half of what an older one does holds less. Another optimizer, or another dtype of its
state, takes up to half; placeholders of weights that other ranks hold take nearly nothing."""


@dataclass(frozen=True, slots=True)
class StepContent:
    """The checkpoints of one step. ``weight_numels`` has the elements of each weight by its name, 0 for a second name
    of the same; ``state_bytes`` are those of the optimizer's state. If ``is_read`` is false, only the files' sizes are
    known."""

    name: str
    weight_numels: Mapping[str, int]
    state_bytes: int
    file_bytes: int
    is_read: bool = True
    has_optimizer: bool = False

    @property
    def num_weights(self) -> int:
        return sum(self.weight_numels.values())


def check_kept_steps(complete_members: Iterable[SavedCheckpoint], compared: ComparedSteps) -> Mapping[str, str]:
    """The newest checkpoints with optimizer state and the reason to keep them, if those that stay have none.

    ``complete_members`` are the numbered checkpoints of a run that are complete, the newest first.

    Raises:
        FormatError: one that stays cannot be opened, or holds less than an older one that would go.
    """
    members_by_step: dict[str, list[SavedCheckpoint]] = {}
    for member in complete_members:
        members_by_step.setdefault(member.step_key, []).append(member)
    kept_contents = [_read_kept_content(members_by_step[each]) for each in compared.kept_steps]
    older_contents = [_read_content_or_none(members_by_step[each]) for each in compared.older_steps]
    for each, elder in product(kept_contents, filter(None, older_contents)):
        if (missing_state := find_missing_state(each, elder)) is not None:
            raise IncompleteError(
                f"{each.name}, which is to stay, holds less than an older checkpoint that would go: {missing_state}; "
                f"nothing was removed; add {format_option('allow_less', True)} if that is right"
            )
    if not compared.older_steps or any(each.has_optimizer for each in kept_contents):
        return {}
    others = (members for step_key, members in members_by_step.items() if step_key not in compared.kept_steps)
    newest = next((members for members in others if _may_have_optimizer(members, kept_contents)), ())
    return {each.name: "the newest with optimizer state" for each in newest}


def _may_have_optimizer(members: Sequence[SavedCheckpoint], kept_contents: Sequence[StepContent]) -> bool:
    """Whether a step that may go has an optimizer, by its files' names or by its content. One that is not read may have
    one if those that stay are read, and have none."""
    if any(map(_list_optimizer_files, members)):
        return True
    try:
        content = _read_content(members)
    except UnsafeError:
        return True
    except UNREADABLE:
        return False
    return content.has_optimizer if content.is_read else all(each.is_read for each in kept_contents)


def _read_kept_content(members: Sequence[SavedCheckpoint]) -> StepContent:
    """The content of a step that stays. Raises FormatError; nothing was removed then."""
    try:
        return _read_content(members)
    except FormatError as error:
        name = members[0].name
        raise type(error)(f"{name}, which is to stay, cannot be opened: {error}; nothing was removed") from error


def _read_content_or_none(members: Sequence[SavedCheckpoint]) -> StepContent | None:
    """The content of a step that may go; None if it cannot be opened, so that nothing is lost with it."""
    try:
        return _read_content(members)
    except UNREADABLE:
        return None


def _read_content(members: Sequence[SavedCheckpoint]) -> StepContent:
    """The content of a step by headers, or by the sizes of its files if its layout is not read. Raises CkptError."""
    name, file_bytes = members[0].name, sum(sum(each.files.values()) for each in members)
    optimizer_files = {path: size for each in members for path, size in _list_optimizer_files(each).items()}
    try:
        manifests = [read_manifest(each)[1] for each in members]
    except UnsupportedError:
        state_bytes, has_optimizer = sum(optimizer_files.values()), bool(optimizer_files)
        return StepContent(name, {}, state_bytes, file_bytes, is_read=False, has_optimizer=has_optimizer)
    weight_numels: dict[str, int] = {}
    read_files = {file for manifest in manifests for file in manifest.files}
    state_bytes = sum(num_bytes for path, num_bytes in optimizer_files.items() if path not in read_files)
    has_optimizer = bool(optimizer_files)
    for manifest in (strip_wrappers(each)[0] for each in manifests):
        weight_numels |= dict.fromkeys(manifest.aliases, 0)
        # Optimizers of torch among the entries: those whose parameters' names are not known.
        entries = iter_values(list(manifest.extra.values()))
        unnamed_optimizers = [each for each in entries if isinstance(each, dict) and "param_groups" in each]
        unnamed_state_keys = {ref.key for ref in iter_tensor_refs(unnamed_optimizers)}
        has_optimizer |= bool(manifest.groups or unnamed_optimizers)
        for key, entry in manifest.tensors.items():
            if key.slot in (WEIGHT, MASTER) and entry.kind is not Kind.EXTRA:
                weight_numels[key.fqn] = entry.numel
            elif entry.kind is Kind.STATE or key in unnamed_state_keys or is_optimizer_name(key.fqn):
                state_bytes += entry.num_bytes
                has_optimizer = True
    return StepContent(name, weight_numels, state_bytes, file_bytes, has_optimizer=has_optimizer)


def _list_optimizer_files(member: SavedCheckpoint) -> dict[str, int]:
    return {path: size for path, size in member.files.items() if has_optimizer_in_path(path)}


def read_manifest(member: SavedCheckpoint) -> tuple[Source, Manifest]:
    """The manifest of a checkpoint and the files that its shards are in, without the optimizer in a file beside the
    model if that cannot be joined."""
    with suppress(FormatError, UnsafeError):
        return read_source(member.source, ReadOptions())
    return member.source, read_plain_manifest(member)[1]


def find_missing_state(newer: StepContent, older: StepContent) -> str | None:
    """Reason why ``newer`` holds less than ``older``; None if it does not. Optimizer state that is missing altogether
    is a model that was saved alone, which is not a reason."""
    # From sure to vague: sizes of files if one is not read, no weights at all, names that are missing, and half of the
    # elements or of the optimizer state missing.
    if not (newer.is_read and older.is_read):
        older_bytes = older.file_bytes - (0 if newer.has_optimizer else older.state_bytes)
        sizes = f"its files have {format_size(newer.file_bytes)}, those of {older.name} {format_size(older_bytes)}"
        return sizes if newer.file_bytes * MAX_SHRINKAGE < older_bytes else None
    if older.weight_numels and not newer.weight_numels:
        return f"it holds no weights, and {older.name} does"
    missing_weights = [name for name, numel in older.weight_numels.items() if name not in newer.weight_numels and numel]
    if missing_weights:
        return (
            f"it lacks {format_count(len(missing_weights), 'weight')} that {older.name} has "
            f"({join_names(missing_weights)})"
        )
    if newer.num_weights * MAX_SHRINKAGE < older.num_weights:
        sizes = f"{format_count(newer.num_weights, 'element')}, those of {older.name} {older.num_weights:,}"
        return f"its weights have {sizes}"
    if newer.state_bytes and newer.state_bytes * MAX_SHRINKAGE < older.state_bytes:
        sizes = f"{format_size(newer.state_bytes)}, that of {older.name} {format_size(older.state_bytes)}"
        return f"its optimizer state has {sizes}"
    return None
