"""Checks a checkpoint's health: its tensors are read once, with those of the previous checkpoint if one is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.limits import check_expansion
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, StateKey, TensorEntry, count_tensors_by_role
from ckpt_tools.core.matching import check_globs_match, is_selected
from ckpt_tools.core.names import map_to_bare_model_names
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UsageError
from ckpt_tools.messages.progress import ProgressCallback, ignore_progress
from ckpt_tools.messages.wording import find_nearest, format_count
from ckpt_tools.reading.opened import OpenedCheckpoint
from ckpt_tools.stores.source import Store
from ckpt_tools.verification.health import numbering, values
from ckpt_tools.verification.health.numbering import ExpertId
from ckpt_tools.verification.health.report import HealthFinding, HealthReport, HealthRule
from ckpt_tools.verification.health.values import STEP_SLOT, MeasuredCheckpoint, MeasuredTensor
from ckpt_tools.verification.statistics import MeasuredRegion, StatisticsPlan, measure_regions

READING_BYTES = 512 << 20
"""The memory that ``prune`` reads in, as that of other commands by default."""

Slots = Mapping[str, frozenset[str]]
"""The slots of optimizer state by the names of parameters."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Options of ``check``: rules that are ignored, globs of tensors that are not looked at, and how it reads.

    Raises:
        UsageError: there is no such rule.
    """

    ignore: Collection[str]
    exclude: Sequence[str]
    sample: bool
    memory_bytes: int
    is_memory_limit: bool
    num_workers: int
    on_progress: ProgressCallback

    def __post_init__(self) -> None:
        rules = [rule.value for rule in HealthRule]
        for name in self.ignore:
            if name not in rules:
                near = ", ".join(find_nearest(name, rules))
                raise UsageError(f"{format_option('ignore', name)} is not a rule; the nearest are {near}")

    def select_tensors(self, manifest: Manifest) -> dict[StateKey, TensorEntry]:
        """The tensors that are looked at."""
        return {key: entry for key, entry in manifest.tensors.items() if is_selected(key.fqn, (), self.exclude)}

    def plan_reading(self, *manifests: Manifest) -> StatisticsPlan:
        """A plan that fits each of ``manifests``: the same blocks of all are read. Raises MemoryBudgetError."""
        plans = [
            StatisticsPlan.fit_to_memory(
                self.memory_bytes,
                manifest,
                num_workers=self.num_workers,
                is_limit=self.is_memory_limit,
                sample=self.sample,
            )
            for manifest in manifests
        ]
        plan = min(plans, key=lambda each: (each.block_bytes, each.num_workers))
        return replace(plan, hashes=len(manifests) > 1)


def check_health(opened: OpenedCheckpoint, previous: OpenedCheckpoint | None, options: CheckOptions) -> HealthReport:
    """Findings of a checkpoint, by itself and beside the ``previous`` one of its run.

    Raises:
        CkptError: a tensor cannot be read. UsageError: a glob matches nothing, or no weight is in both.
        MemoryBudgetError: the budget is too small.
    """
    manifest = opened.manifest
    check_globs_match(manifest.fqns | manifest.unreadable_names, include=(), exclude=options.exclude)
    plan = options.plan_reading(manifest, *([] if previous is None else [previous.manifest]))
    current = _measure_checkpoint(opened.source.store, manifest, plan, options)
    findings = [
        *values.find_non_finite(current.tensors),
        *values.find_constant_weights(current),
        *values.find_wrong_moments(current),
        *values.find_other_steps(current, lambda name: numbering.parse_expert(name) is not None),
        *_find_missing_moments(manifest),
    ]
    notes = list(_note_unread(current.tensors, manifest))
    shapes = _list_weight_shapes(manifest)
    config = opened.find_config()
    findings += numbering.find_missing_parts(shapes, config)
    if (why := _explain_unknown_layers(shapes, config)) is not None:
        notes.append(Note(Outcome.NOT_CHECKED, "the number of layers", why))
    if previous is not None:
        before = _measure_checkpoint(previous.source.store, previous.manifest, plan, replace(options, exclude=()))
        if not any(each.is_weight and each.identity in before.by_identity for each in current.tensors):
            raise UsageError(f"{previous.url} has no weight with the name of one in {opened.url}")
        findings += values.find_changes(current, before)
        findings += _find_lost_tensors(manifest, previous.manifest)
        notes += _note_other_shapes(current, before)
    return HealthReport(
        str(opened.url),
        None if previous is None else str(previous.url),
        count_tensors_by_role(options.select_tensors(manifest)),
        sum(each.stats.num_read * manifest.tensors[each.key].dtype.item_bytes for each in current.tensors),
        tuple(
            each
            for each in findings
            if each.rule.value not in options.ignore and is_selected(each.name.partition("[")[0], (), options.exclude)
        ),
        tuple(notes),
    )


def has_finite_values(store: Store, manifest: Manifest, num_workers: int) -> bool:
    """Whether no tensor has NaN or infinities. Raises CkptError if one cannot be read."""
    options = CheckOptions((), (), False, READING_BYTES, False, num_workers, ignore_progress)
    measured = _measure_checkpoint(store, manifest, options.plan_reading(manifest), options)
    return not any(values.find_non_finite(measured.tensors))


def _measure_checkpoint(
    store: Store, manifest: Manifest, plan: StatisticsPlan, options: CheckOptions
) -> MeasuredCheckpoint:
    chosen = options.select_tensors(manifest)
    if not plan.sample:
        check_expansion(chosen, manifest.stored_bytes)
    bare_names = map_to_bare_model_names(manifest)
    regions: list[MeasuredRegion] = []
    places: list[tuple[ExpertId | None, int | None]] = []
    for key, entry in chosen.items():
        bare_name = bare_names.get(key.fqn, key.fqn)
        group = None if entry.kind is Kind.EXTRA else numbering.find_fused_group(bare_name, entry.shape)
        if group is not None:
            num_rows, *others = entry.shape
            for row in range(num_rows):
                box = Box((row, *(0 for _ in others)), (row + 1, *others))
                regions.append(MeasuredRegion(key, entry, box))
                places.append((ExpertId(group, row), row))
        else:
            parsed = numbering.parse_expert(bare_name)
            regions.append(MeasuredRegion(key, entry, Box.whole(entry.shape)))
            places.append((None if parsed is None else parsed[0], None))
    tensors = tuple(
        MeasuredTensor(key, bare_names.get(key.fqn, key.fqn), entry.kind, found.stats, found.digest, expert, row)
        for (key, entry, _), (expert, row), found in zip(
            regions, places, measure_regions(store, regions, plan, options.on_progress), strict=True
        )
    )
    steps = {
        key.fqn: float(value)
        for key, value in manifest.values.items()
        if key.slot == STEP_SLOT and isinstance(value, int | float)
    }
    for each in tensors:
        if each.key.slot == STEP_SLOT and each.stats.num_read == 1 and each.stats.min is not None:
            steps[each.key.fqn] = float(each.stats.min)
    trained = None
    if not (manifest.unnamed_optimizer or manifest.unjoined_state):
        grouped = (manifest.aliases.get(name, name) for group in manifest.groups for name in group.params)
        trained = frozenset((*grouped, *_map_slots(manifest)))
    return MeasuredCheckpoint(tensors, steps, manifest.step, trained)


def _map_slots(manifest: Manifest) -> Slots:
    slots: dict[str, frozenset[str]] = {}
    for key in (*manifest.select_kinds(Kind.STATE), *manifest.values):
        if key.slot not in (WEIGHT, MASTER):
            slots[key.fqn] = slots.get(key.fqn, frozenset()) | {key.slot}
    return slots


def _find_missing_moments(manifest: Manifest) -> Iterator[HealthFinding]:
    """Parameters without state in groups where half or more have it, and those with one of two moments that most have.
    Optimizers keep no state of what has no gradient, so that a group may be mostly frozen."""
    slots = _map_slots(manifest)
    for group in manifest.groups:
        names = [manifest.aliases.get(name, name) for name in group.params]
        without = [name for name in names if name not in slots]
        if 2 * len(without) <= len(names):
            num_others = format_count(len(names) - len(without), "parameter")
            for name in without:
                rule = HealthRule.MISSING_MOMENT if numbering.parse_expert(name) is None else HealthRule.DEAD_EXPERT
                yield HealthFinding(rule, name, f"it has no optimizer state, and {num_others} of its group have")
    usual_sets = Counter(each & {"exp_avg", "exp_avg_sq"} for each in slots.values())
    both = frozenset(("exp_avg", "exp_avg_sq"))
    for name, each in slots.items():
        lacking = both - each
        is_factored = any(slot.startswith("exp_avg_sq_") for slot in each)
        if len(lacking) == 1 and not is_factored and 2 * usual_sets[both] > len(slots):
            what = f"it is missing, and {usual_sets[both]:,} parameters have it"
            yield HealthFinding(HealthRule.MISSING_MOMENT, name, what, min(lacking))


def _list_weight_shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Shapes of weights by their names without wrappers, by every name."""
    bare_names = map_to_bare_model_names(manifest)
    shapes = {bare_names.get(name, name): entry.shape for name, entry in manifest.weights.items()}
    for alias, owner in manifest.aliases.items():
        shapes[bare_names.get(alias, alias)] = manifest.tensors[StateKey(owner)].shape
    return shapes


def _explain_unknown_layers(shapes: Mapping[str, object], config: Mapping[str, object] | None) -> str | None:
    """Why the layers are not counted: nothing says how many there are, or names do not number them."""
    if all(map(numbering.is_lora_name, shapes)):
        return "an adapter need not be on each"
    has_groups = bool(numbering.group_layers(shapes))
    if config is None:
        return "there is no config.json; a lost last layer does not show" if has_groups else None
    num_layers = numbering.find_config_count(config, numbering.LAYER_KEYS)
    if num_layers is None:
        return "config.json does not say it" if has_groups else None
    return None if has_groups else f"config.json says {num_layers:,}, and no names of tensors number them"


def _note_unread(tensors: Sequence[MeasuredTensor], manifest: Manifest) -> Iterator[Note]:
    for each in tensors:
        if each.stats.num_nan is None:
            yield Note(Outcome.NOT_CHECKED, str(each.key), f"packed elements ({each.stats.dtype}) are not read")
    if reason := manifest.unnamed_optimizer or manifest.unjoined_state:
        yield Note(Outcome.NOT_CHECKED, "optimizer state", f"its parameters are not known: {reason}")
    for name in sorted(manifest.unreadable_names):
        yield Note(Outcome.NOT_CHECKED, name, "it cannot be read")


def _find_lost_tensors(manifest: Manifest, previous: Manifest) -> Iterator[HealthFinding]:
    """Weights that the previous checkpoint has and this one has not, and state of parameters that are there; not if it
    has no state at all."""
    what, weights = "the previous checkpoint has it", _list_weight_shapes(manifest)
    for name in _list_weight_shapes(previous).keys() - weights.keys():
        yield HealthFinding(HealthRule.MISSING_TENSOR, name, what)
    slots_by_name, earlier_slots = (
        {bare_names.get(name, name): slots for name, slots in _map_slots(each).items()}
        for each, bare_names in ((each, map_to_bare_model_names(each)) for each in (manifest, previous))
    )
    for name, slots in earlier_slots.items() if slots_by_name else ():
        for slot in sorted(slots - slots_by_name.get(name, frozenset())) if name in weights else ():
            yield HealthFinding(HealthRule.MISSING_MOMENT, name, what, slot)


def _note_other_shapes(current: MeasuredCheckpoint, previous: MeasuredCheckpoint) -> Iterator[Note]:
    for each in current.tensors:
        before = previous.by_identity.get(each.identity)
        if each.is_weight and before is not None and before.stats.shape != each.stats.shape:
            yield Note(Outcome.NOT_CHECKED, each.name, "the previous checkpoint has it in another shape")
    has_state, had_state = (
        any(each.kind is Kind.STATE and each.key.slot != MASTER for each in checkpoint.tensors)
        for checkpoint in (current, previous)
    )
    if had_state and not has_state:
        yield Note(Outcome.NOT_CHECKED, "optimizer state", "the previous checkpoint has some, and this one none")
