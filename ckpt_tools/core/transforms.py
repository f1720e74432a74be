"""From one manifest to another: select, cast. Arithmetic on names and types; no byte is touched.

Each returns the new manifest with notes on what it changed or left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tools.core import matching, quantized
from ckpt_tools.core.casts import CASTABLE, check_cast
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, StateKey, TensorEntry, TensorRef
from ckpt_tools.core.names import collect_model_names
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.value_refs import iter_tensor_refs, replace_tensor_refs
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.messages.wording import format_count, join_names

TransformResult = tuple[Manifest, tuple[Note, ...]]


def keep_model_only(
    manifest: Manifest, *, weight_copy: str, is_requested: bool, entry_names: Collection[str] = ()
) -> TransformResult:
    """The manifest of parameters and buffers alone, with those of its entries that are among ``entry_names``.

    ``weight_copy`` chooses which copy of a parameter stands for it: ``"master"``, the fp32 one where there is one, or
    ``"model"``, the one that the model computes with. ``is_requested`` is true if the user wants no more than this.

    Raises:
        UnsupportedError: there is state, and no weight.
    """
    kept_tensors: Mapping[StateKey, TensorEntry] = {
        key: entry for key, entry in manifest.tensors.items() if key.slot == WEIGHT and entry.kind is not Kind.EXTRA
    }
    if len(kept_tensors) == len(manifest.tensors):
        kept_tensors = manifest.tensors  # which need not be checked again
    if weight_copy == "master" and any(key.slot == MASTER for key in manifest.tensors):
        kept_tensors = {key: _use_master(manifest, key, entry) for key, entry in kept_tensors.items()}
    values = {key: value for key, value in manifest.values.items() if key.slot == WEIGHT}
    nested_tensors = {ref.key: manifest.tensors[ref.key] for ref in iter_tensor_refs(list(values.values()))}
    if not kept_tensors and (manifest.extra or manifest.select_kinds(Kind.STATE)):
        raise UnsupportedError(f"{_explain_missing_weights(manifest)}; name the file or folder of the model")
    extra = {name: value for name, value in manifest.extra.items() if name in entry_names}
    if nested_tensors:
        kept_tensors = {**kept_tensors, **nested_tensors}
    notes = tuple(replace(note, asked=is_requested) for note in _note_dropped_state(manifest, kept_tensors, extra))
    if any(group.options.get("train_mode") is True for group in manifest.groups):
        why = "the optimizer is in train mode, and evaluation uses others (ScheduleFree's x)"
        notes = (Note(Outcome.KEPT, "weights of training", f"{why}; save after optimizer.eval()"), *notes)
    step = manifest.step if extra.keys() >= manifest.extra.keys() else None
    kept = replace(manifest, tensors=kept_tensors, groups=(), extra=extra, values=values, step=step, trainer=None)
    return kept, notes


def _explain_missing_weights(manifest: Manifest) -> str:
    """Reason why there are no weights: the tensors that were found instead."""
    extra_tensors = manifest.select_kinds(Kind.EXTRA)
    if not extra_tensors:
        return "it holds no weights, only optimizer state or other entries"
    names = join_names([key.fqn for key in extra_tensors])
    return (
        f"none of its tensors is known to be a weight: {format_count(len(extra_tensors), 'tensor')} in other "
        f"entries ({names})"
    )


def make_unjoined_state_error(manifest: Manifest) -> UnsupportedError:
    """Refusal of the whole state of a manifest that has ``unjoined_state``."""
    way = f"join them with {format_option('recipe')}, or take the weights alone with {format_option('state', 'model')}"
    return UnsupportedError(f"{manifest.unjoined_state}; {way}")


def keep_one_copy(manifest: Manifest, *, weight_copy: str) -> TransformResult:
    """The whole state with one copy of each parameter, for formats that keep no fp32 masters beside the weights.

    ``weight_copy`` chooses it, as in ``keep_model_only``. Raises UnsupportedError if the masters have other names.
    """
    if manifest.unjoined_state:
        raise make_unjoined_state_error(manifest)
    kept_tensors = {key: entry for key, entry in manifest.tensors.items() if key.slot != MASTER}
    if weight_copy == "model":
        masters = [entry for key, entry in manifest.tensors.items() if key.slot == MASTER]
        note = _note_dropped_entries(f"{MASTER} of {format_count(len(masters), 'tensor')}", masters)
        notes = (replace(note, why=format_option("weights", "model"), asked=True),) if masters else ()
        return replace(manifest, tensors=kept_tensors), notes
    weights = {key: entry for key, entry in kept_tensors.items() if key.slot == WEIGHT}
    kept_tensors |= {key: _use_master(manifest, key, entry) for key, entry in weights.items()}
    return replace(manifest, tensors=kept_tensors), ()


def _use_master(manifest: Manifest, key: StateKey, entry: TensorEntry) -> TensorEntry:
    master = manifest.tensors.get(StateKey(key.fqn, MASTER))
    return entry if master is None else replace(master, kind=entry.kind)


def _note_dropped_state(
    manifest: Manifest, kept_tensors: Mapping[StateKey, TensorEntry], kept_entries: Collection[str]
) -> tuple[Note, ...]:
    notes = []
    for slot in dict.fromkeys(key.slot for key, entry in manifest.tensors.items() if key not in kept_tensors):
        entries = [entry for key, entry in manifest.tensors.items() if key.slot == slot and key not in kept_tensors]
        if slot != MASTER:
            notes.append(_note_dropped_entries(f"{slot} of {format_count(len(entries), 'tensor')}", entries))
    notes += [Note(Outcome.DROPPED, str(key), _ONLY_WEIGHTS_REASON) for key in manifest.values if key.slot != WEIGHT]
    if manifest.groups:
        notes.append(Note(Outcome.DROPPED, "parameter groups", _ONLY_WEIGHTS_REASON, len(manifest.groups)))
    notes += [Note(Outcome.DROPPED, name, _ONLY_WEIGHTS_REASON) for name in manifest.extra if name not in kept_entries]
    return tuple(notes)


_ONLY_WEIGHTS_REASON = "only the model's weights are written"


def _note_dropped_entries(what: str, entries: list[TensorEntry]) -> Note:
    size = sum(entry.shards.num_bytes for entry in entries)
    return Note(Outcome.DROPPED, what, _ONLY_WEIGHTS_REASON, len(entries), size)


def select_tensors(manifest: Manifest, *, include: tuple[str, ...], exclude: tuple[str, ...]) -> TransformResult:
    """The manifest of the tensors whose fqn matches a glob of ``include`` (none: all) and none of ``exclude``.

    A tied name that is chosen without the owner of its bytes becomes the owner.

    Raises:
        UsageError: nothing is left, or a glob matches nothing.
    """
    if not include and not exclude:
        return manifest, ()
    known_names = sorted(collect_model_names(manifest) | manifest.unreadable_names)
    matching.check_globs_match(known_names, include=include, exclude=exclude)

    manifest, num_dropped = _keep_chosen(manifest, lambda fqn: matching.is_selected(fqn, include, exclude))
    if all(entry.kind is Kind.EXTRA for entry in manifest.tensors.values()):
        raise UsageError(f"{format_option('include')} and {format_option('exclude')} select no tensor")
    note = Note(Outcome.DROPPED, format_count(num_dropped, "tensor"), "not selected", num_dropped, asked=True)
    return manifest, (note,) if num_dropped else ()


def drop_tensors(manifest: Manifest, globs: tuple[str, ...]) -> TransformResult:
    """The manifest without the tensors whose fqn matches one of ``globs``, and without their optimizer state. A tied
    name whose owner is dropped becomes the owner.

    Raises:
        UsageError: nothing is left, a glob matches nothing, or a quantized weight would be without its scales.
    """
    known_names = sorted(collect_model_names(manifest) | manifest.unreadable_names)
    matching.check_globs_match(known_names, drop=globs)
    dropped_names = [name for name in known_names if not matching.is_selected(name, (), globs)]
    quantized.check_companions_selected(manifest, lambda fqn: matching.is_selected(fqn, (), globs))
    kept, count = _keep_chosen(manifest, lambda fqn: matching.is_selected(fqn, (), globs))
    if all(entry.kind is Kind.EXTRA for entry in kept.tensors.values()):
        raise UsageError(f"{format_option('drop')} leaves no tensor of the source")
    what = f"{format_count(count or len(dropped_names), 'tensor')} of {join_names(dropped_names)}"
    why = join_names([format_option("drop", glob) for glob in globs])
    return kept, (Note(Outcome.DROPPED, what, why, count, asked=True),)


def _keep_chosen(manifest: Manifest, is_chosen: Callable[[str], bool]) -> tuple[Manifest, int]:
    """The manifest of the tensors whose fqn is chosen, and the number of those left out."""
    manifest = reassign_owners(manifest, is_chosen)
    unselected_refs = iter_tensor_refs([value for key, value in manifest.values.items() if not is_chosen(key.fqn)])
    unselected_keys = {ref.key for ref in unselected_refs}
    kept_tensors = {
        key: entry
        for key, entry in manifest.tensors.items()
        if key not in unselected_keys and (entry.kind is Kind.EXTRA or is_chosen(key.fqn))
    }
    values = {key: value for key, value in manifest.values.items() if is_chosen(key.fqn)}
    aliases = {alias: owner for alias, owner in manifest.aliases.items() if is_chosen(alias) and is_chosen(owner)}
    groups = tuple(replace(group, params=tuple(filter(is_chosen, group.params))) for group in manifest.groups)
    kept = replace(manifest, tensors=kept_tensors, aliases=aliases, groups=groups, values=values)
    return kept, len(manifest.tensors) - len(kept_tensors)


def drop_values(manifest: Manifest, *, target_name: str) -> TransformResult:
    """The manifest without the values of ``get_extra_state`` that are not tensors, for formats that cannot hold them.

    Raises:
        UnsupportedError: optimizer state has such values, without which the optimizer cannot resume.
    """
    state_names = [str(key) for key in manifest.values if key.slot != WEIGHT]
    if state_names:
        raise UnsupportedError(
            f"{target_name} cannot hold optimizer state that is a list, a dict or another object "
            f"({join_names(state_names)}); write the whole state as it is, in a .pt file or with "
            f"{format_option('to', 'dcp')}, or {format_option('state', 'model')}"
        )
    nested_keys = {ref.key for ref in iter_tensor_refs(list(manifest.values.values()))}
    tensors = {key: entry for key, entry in manifest.tensors.items() if key not in nested_keys}
    why = f"{target_name} cannot hold what get_extra_state returned, which is no tensor"
    notes = tuple(Note(Outcome.DROPPED, key.fqn, why) for key in manifest.values)
    return replace(manifest, tensors=tensors, values={}), notes


def mark_buffers(manifest: Manifest, globs: Sequence[str]) -> TransformResult:
    """The manifest with the weights whose names match a glob as buffers: these are not cast, and DeepSpeed keeps them
    with the module.

    Raises:
        UsageError: a glob matches nothing, or a parameter that the optimizer trains.
    """
    weights = manifest.weights
    trained_names = {name for group in manifest.groups for name in group.params}
    matching.check_buffer_globs([*weights], globs, trained_names)
    buffers = {
        StateKey(name): replace(entry, kind=Kind.BUFFER)
        for name, entry in weights.items()
        if matching.is_selected(name, globs, ())
    }
    return replace(manifest, tensors={**manifest.tensors, **buffers}), ()


def reassign_owners(manifest: Manifest, is_selected: Callable[[str], bool]) -> Manifest:
    """The manifest with names swapped so that of each set of tied names a selected one owns the bytes.

    Where b and c are tied to a, and b and c alone are selected: b owns the bytes, and a and c are tied to b.
    """
    new_owners: dict[str, str] = {}
    for alias, owner in manifest.aliases.items():
        if is_selected(alias) and not is_selected(owner):
            new_owners.setdefault(owner, alias)
    if not new_owners:
        return manifest
    tensors = {StateKey(new_owners.get(key.fqn, key.fqn), key.slot): entry for key, entry in manifest.tensors.items()}
    aliases = {
        alias: new_owners.get(owner, owner)
        for alias, owner in manifest.aliases.items()
        if new_owners.get(owner) != alias
    }
    aliases |= new_owners
    groups = tuple(
        replace(group, params=tuple(new_owners.get(n, n) for n in group.params)) for group in manifest.groups
    )
    values = rename_values(manifest, new_owners)
    return replace(manifest, tensors=tensors, aliases=aliases, groups=groups, values=values)


def rename_values(manifest: Manifest, names: Mapping[str, str]) -> dict[StateKey, Any]:
    """``Manifest.values`` with new names of their owners, and of the optimizer's tensors inside them."""

    def rename_ref(ref: TensorRef) -> TensorRef:
        if manifest.tensors[ref.key].kind is Kind.EXTRA:
            return ref
        return TensorRef(StateKey(names.get(ref.key.fqn, ref.key.fqn), ref.key.slot))

    return {
        StateKey(names.get(key.fqn, key.fqn), key.slot): replace_tensor_refs(value, rename_ref)
        for key, value in manifest.values.items()
    }


def cast_weights(manifest: Manifest, dtype: DType | None) -> TransformResult:
    """The manifest with floating-point weights as ``dtype``; optimizer state, buffers and integers stay.

    So do quantized weights and the scales stored beside them: they mean nothing without each other.
    """
    if dtype is None:
        return manifest, ()
    castable_keys = {key for key, entry in manifest.tensors.items() if _is_castable(entry) and entry.dtype is not dtype}
    quantized_keys = castable_keys & quantized.find_uncastable_keys(manifest)
    tensors = dict(manifest.tensors)
    for key, entry in manifest.tensors.items():
        if key.slot == WEIGHT and key not in quantized_keys and _is_castable(entry):
            check_cast(entry.shards.dtype, dtype)
            tensors[key] = entry.cast_to(dtype)
    low_precision_keys = {
        key
        for key, entry in manifest.tensors.items()
        if entry.kind is Kind.PARAMETER and quantized.is_low_precision_float(entry.dtype)
    }
    may_need_scales = f"floats of 8 bits or less may need scales; {format_option('dequantize', True)} widens them"
    is_companion = "they belong to quantized weights (scales, zero points), which have no meaning in another type"
    keys_by_reason = {may_need_scales: low_precision_keys, is_companion: quantized_keys}
    notes = []
    for why, keys in keys_by_reason.items():
        names = sorted(key.fqn for key in keys)
        shown_names = ", ".join(names[:3]) + (f", ... ({len(names)} tensors)" if len(names) > 3 else "")
        num_bytes = sum(manifest.tensors[key].num_bytes for key in keys)
        if keys:
            notes.append(Note(Outcome.KEPT, shown_names, f"not cast: {why}", len(keys), num_bytes))
    return replace(manifest, tensors=tensors), tuple(notes)


def note_casts(before: Manifest, after: Manifest, uncast_buffers: Collection[str]) -> tuple[Note, ...]:
    """Notes on the tensors that were cast. The writer writes the buffers ``uncast_buffers`` in the dtype that they
    have in the source."""
    entries_by_dtypes: dict[tuple[DType, DType], list[TensorEntry]] = {}
    for key, entry in before.tensors.items():
        dtype = after.tensors[key].dtype
        if dtype is not entry.dtype and not (key.slot == WEIGHT and key.fqn in uncast_buffers):
            entries_by_dtypes.setdefault((entry.dtype, dtype), []).append(entry)
    return tuple(note_cast(source, dtype, entries) for (source, dtype), entries in entries_by_dtypes.items())


def note_cast(before: DType, after: DType, entries: Collection[TensorEntry], reason_suffix: str = "") -> Note:
    """Note on tensors that are cast, ``reason_suffix`` what is added if the user did not name the dtype."""
    return Note(
        Outcome.CAST,
        format_count(len(entries), f"{before.value} tensor"),
        f"{before.value} to {after.value}{reason_suffix}",
        len(entries),
        sum(entry.num_bytes for entry in entries),
        asked=True,
    )


def _is_castable(entry: TensorEntry) -> bool:
    return entry.kind is Kind.PARAMETER and entry.dtype in CASTABLE
