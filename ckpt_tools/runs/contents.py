"""Contents of checkpoints by their headers, and the rule that says if one holds less than an older one. Pure.

Checkpoints of one run have the same weights. Elements are counted and not bytes, and names are those of the bare
model, so that another precision, world size, sharding or wrapper makes no difference. fp32 masters are weights, and not
state. An optimizer counts whether or not a reader knows its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest
from ckpt_tools.core.renaming import strip_wrappers
from ckpt_tools.core.value_refs import iter_tensor_refs, iter_values
from ckpt_tools.messages.wording import format_count, format_size, join_names
from ckpt_tools.state_tree.incomplete_state import is_optimizer_name

MAX_SHRINKAGE = 2
"""One that holds less than half of what an older one does holds less. Another optimizer, or another dtype of its
state, takes up to half; placeholders of weights that other ranks hold take nearly nothing."""


@dataclass(frozen=True, slots=True)
class StepContent:
    """The checkpoints of one step, which have the same ``step_key``. ``weight_numels`` has the elements of each by its
    name, 0 for a second name of the same; ``state_bytes`` are those of the optimizer's state. If ``is_read`` is false,
    only the files' sizes are known."""

    step_key: str
    name: str
    weight_numels: Mapping[str, int]
    state_bytes: int
    file_bytes: int
    is_read: bool = True
    has_optimizer: bool = False

    @property
    def num_weights(self) -> int:
        return sum(self.weight_numels.values())


def summarize_content(
    step_key: str, name: str, manifests: Sequence[Manifest], optimizer_files: Mapping[str, int], file_bytes: int
) -> StepContent:
    """The content of the checkpoints of one step together; ``optimizer_files`` have the name of an optimizer's."""
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
    return StepContent(step_key, name, weight_numels, state_bytes, file_bytes, has_optimizer=has_optimizer)


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
