"""From one manifest to another: select, rename, cast. Arithmetic on names and types; no byte is touched.

Each returns the new manifest with notes on what it changed or left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tools.core import matching, quantized
from ckpt_tools.core.casts import CASTABLE, check_cast
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, ParamGroup, StateKey, TensorEntry, TensorRef
from ckpt_tools.core.names import bare_model_names, model_names
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import option
from ckpt_tools.core.value_refs import references, replaced
from ckpt_tools.core.wording import count, listed
from ckpt_tools.errors import UnsupportedError, UsageError

Transformed = tuple[Manifest, tuple[Note, ...]]


def model_only(manifest: Manifest, *, weights: str, asked: bool, entries: Collection[str] = ()) -> Transformed:
    """Parameters and buffers, and those of the ``entries`` that there are.

    ``weights`` chooses which copy of a parameter stands for it: ``"master"``, the fp32 one where there is one, or
    ``"model"``, the one that the model computes with. ``asked`` says that the user wants no more than this.

    Raises:
        UnsupportedError: there is state, and no weight.
    """
    kept = {
        key: entry for key, entry in manifest.tensors.items() if key.slot == WEIGHT and entry.kind is not Kind.EXTRA
    }
    if weights == "master":
        kept = {key: _master(manifest, key, entry) for key, entry in kept.items()}
    values = {key: value for key, value in manifest.values.items() if key.slot == WEIGHT}
    inside = {ref.key: manifest.tensors[ref.key] for ref in references(list(values.values()))}
    if not kept and any(entry.kind is Kind.STATE for entry in manifest.tensors.values()) | bool(manifest.extra):
        raise UnsupportedError(f"{_no_weights(manifest)}; name the file or folder of the model")
    extra = {name: value for name, value in manifest.extra.items() if name in entries}
    trains = [number for number, group in enumerate(manifest.groups) if group.options.get("train_mode") is True]
    why = "the optimizer is in train mode, and evaluation uses others (ScheduleFree's x); save after optimizer.eval()"
    modes = (Note(Outcome.KEPT, "weights of training", why),) if trains else ()
    notes = modes + tuple(replace(note, asked=asked) for note in _dropped_state(manifest, {**kept, **inside}, extra))
    step = manifest.step if extra.keys() >= manifest.extra.keys() else None
    kept |= inside
    return replace(manifest, tensors=kept, groups=(), extra=extra, values=values, step=step, trainer=None), notes


def _no_weights(manifest: Manifest) -> str:
    """Reason why there are no weights: the tensors that were found instead."""
    others = manifest.of_kind(Kind.EXTRA)
    if not others:
        return "it holds no weights, only optimizer state or other entries"
    names = listed([key.fqn for key in others])
    return f"none of its tensors is known to be a weight: {count(len(others), 'tensor')} in other entries ({names})"


def parted_error(manifest: Manifest) -> UnsupportedError:
    """The refusal of the whole state of a ``parted`` manifest."""
    way = f"join them with {option('recipe')}, or take the weights alone with {option('state', 'model')}"
    return UnsupportedError(f"{manifest.parted}; {way}")


def one_copy(manifest: Manifest, *, weights: str) -> Transformed:
    """The whole state with one copy of each parameter, for formats that keep no fp32 masters beside the weights.

    ``weights`` chooses it, as in ``model_only``. Raises UnsupportedError if the masters have other names.
    """
    if manifest.parted:
        raise parted_error(manifest)
    kept = {key: entry for key, entry in manifest.tensors.items() if key.slot != MASTER}
    if weights == "model":
        masters = [entry for key, entry in manifest.tensors.items() if key.slot == MASTER]
        note = _dropped(f"{MASTER} of {count(len(masters), 'tensor')}", masters)
        notes = (replace(note, why=option("weights", "model"), asked=True),) if masters else ()
        return replace(manifest, tensors=kept), notes
    kept |= {key: _master(manifest, key, entry) for key, entry in kept.items() if key.slot == WEIGHT}
    return replace(manifest, tensors=kept), ()


def _master(manifest: Manifest, key: StateKey, entry: TensorEntry) -> TensorEntry:
    master = manifest.tensors.get(StateKey(key.fqn, MASTER))
    return entry if master is None else replace(master, kind=entry.kind)


def _dropped_state(
    manifest: Manifest, kept: Mapping[StateKey, TensorEntry], kept_entries: Collection[str]
) -> tuple[Note, ...]:
    notes = []
    for slot in dict.fromkeys(key.slot for key, entry in manifest.tensors.items() if key not in kept):
        entries = [entry for key, entry in manifest.tensors.items() if key.slot == slot and key not in kept]
        if slot != MASTER:
            notes.append(_dropped(f"{slot} of {count(len(entries), 'tensor')}", entries))
    notes += [Note(Outcome.DROPPED, str(key), _ONLY_WEIGHTS) for key in manifest.values if key.slot != WEIGHT]
    if manifest.groups:
        notes.append(Note(Outcome.DROPPED, "parameter groups", _ONLY_WEIGHTS, len(manifest.groups)))
    notes += [Note(Outcome.DROPPED, name, _ONLY_WEIGHTS) for name in manifest.extra if name not in kept_entries]
    return tuple(notes)


_ONLY_WEIGHTS = "only the model's weights are written"


def _dropped(what: str, entries: list[TensorEntry]) -> Note:
    size = sum(entry.shards.num_bytes for entry in entries)
    return Note(Outcome.DROPPED, what, _ONLY_WEIGHTS, len(entries), size)


def select(manifest: Manifest, *, include: tuple[str, ...], exclude: tuple[str, ...]) -> Transformed:
    """The tensors whose fqn matches a glob of ``include`` (none: all) and none of ``exclude``.

    A tied name that is chosen without the one that owns its bytes takes ownership.

    Raises:
        UsageError: nothing is left, or a glob matches nothing.
    """
    if not include and not exclude:
        return manifest, ()
    matching.check_globs(sorted(model_names(manifest) | manifest.left_out), include=include, exclude=exclude)

    def is_chosen(fqn: str) -> bool:
        return matching.is_chosen(fqn, include, exclude)

    manifest = reowned(manifest, is_chosen)
    unchosen = references([value for key, value in manifest.values.items() if not is_chosen(key.fqn)])
    inside = {ref.key for ref in unchosen}
    kept = {
        key: entry
        for key, entry in manifest.tensors.items()
        if key not in inside and (entry.kind is Kind.EXTRA or is_chosen(key.fqn))
    }
    if all(entry.kind is Kind.EXTRA for entry in kept.values()):
        raise UsageError(f"{option('include')} and {option('exclude')} select no tensor")
    values = {key: value for key, value in manifest.values.items() if is_chosen(key.fqn)}
    left = len(manifest.tensors) - len(kept)
    aliases = {alias: owner for alias, owner in manifest.aliases.items() if is_chosen(alias) and is_chosen(owner)}
    groups = tuple(replace(group, params=tuple(filter(is_chosen, group.params))) for group in manifest.groups)
    notes = (Note(Outcome.DROPPED, count(left, "tensor"), "not selected", left, asked=True),) if left else ()
    return replace(manifest, tensors=kept, aliases=aliases, groups=groups, values=values), notes


def without_values(manifest: Manifest, *, to: str) -> Transformed:
    """The manifest without the values of ``get_extra_state`` that are no tensors, for formats that cannot hold them.

    Raises:
        UnsupportedError: optimizer state has such values, without which the optimizer cannot resume.
    """
    state = [str(key) for key in manifest.values if key.slot != WEIGHT]
    if state:
        raise UnsupportedError(
            f"{to} cannot hold optimizer state that is a list, a dict or another object ({listed(state)}); write the "
            f"whole state as it is, in a .pt file or with {option('to', 'dcp')}, or {option('state', 'model')}"
        )
    inside = {ref.key for ref in references(list(manifest.values.values()))}
    tensors = {key: entry for key, entry in manifest.tensors.items() if key not in inside}
    why = f"{to} cannot hold what get_extra_state returned, which is no tensor"
    notes = tuple(Note(Outcome.DROPPED, key.fqn, why) for key in manifest.values)
    return replace(manifest, tensors=tensors, values={}), notes


def with_buffers(manifest: Manifest, globs: Sequence[str]) -> Transformed:
    """The weights whose names match a glob, as buffers: they are not cast, and DeepSpeed keeps them with the module.

    Raises:
        UsageError: a glob matches nothing, or a parameter that the optimizer trains.
    """
    weights = {key: e for key, e in manifest.tensors.items() if key.slot == WEIGHT and e.kind is not Kind.EXTRA}
    trained = {name for group in manifest.groups for name in group.params}
    matching.check_buffers([key.fqn for key in weights], globs, trained)
    buffers = {
        key: replace(e, kind=Kind.BUFFER) for key, e in weights.items() if matching.is_chosen(key.fqn, globs, ())
    }
    return replace(manifest, tensors={**manifest.tensors, **buffers}), ()


def reowned(manifest: Manifest, chosen: Callable[[str], bool]) -> Manifest:
    """Names swapped so that of each set of tied ones a chosen one owns the bytes."""
    heirs: dict[str, str] = {}
    for alias, owner in manifest.aliases.items():
        if chosen(alias) and not chosen(owner):
            heirs.setdefault(owner, alias)
    if not heirs:
        return manifest
    tensors = {StateKey(heirs.get(key.fqn, key.fqn), key.slot): entry for key, entry in manifest.tensors.items()}
    aliases = {alias: heirs.get(owner, owner) for alias, owner in manifest.aliases.items() if heirs.get(owner) != alias}
    aliases |= heirs
    groups = tuple(replace(group, params=tuple(heirs.get(n, n) for n in group.params)) for group in manifest.groups)
    values = _renamed_values(manifest, heirs)
    return replace(manifest, tensors=tensors, aliases=aliases, groups=groups, values=values)


def _renamed_values(manifest: Manifest, names: Mapping[str, str]) -> dict[StateKey, Any]:
    """``Manifest.values`` with new names of their owners, and of the optimizer's tensors inside them."""

    def renamed(ref: TensorRef) -> TensorRef:
        if manifest.tensors[ref.key].kind is Kind.EXTRA:
            return ref
        return TensorRef(StateKey(names.get(ref.key.fqn, ref.key.fqn), ref.key.slot))

    return {
        StateKey(names.get(key.fqn, key.fqn), key.slot): replaced(value, renamed)
        for key, value in manifest.values.items()
    }


def rename(manifest: Manifest, new_name: Callable[[str], str]) -> Transformed:
    """Every fqn through ``new_name``: weights, optimizer state, ties and groups alike. A weight and state that had
    another name may come to have one name.

    Raises:
        UsageError: two names become one, one becomes empty, or a quantized weight is parted from its scales.
    """
    names = {name: new_name(name) for name in sorted(model_names(manifest))}
    keys = [key for key, entry in manifest.tensors.items() if entry.kind is not Kind.EXTRA]
    taken: dict[StateKey, str] = {}
    for old, slot in sorted((*keys, *map(StateKey, manifest.aliases))):
        new = StateKey(names[old], slot)
        if not new.fqn or new in taken:
            other = f" as does {taken[new]!r}" if new in taken else ""
            raise UsageError(f"renaming makes {old!r} into {new.fqn!r}{other}; names must stay distinct")
        taken[new] = old
    quantized.check_renamed(manifest, names)
    renamed = replace(
        manifest,
        tensors={
            key if entry.kind is Kind.EXTRA else StateKey(names[key.fqn], key.slot): entry
            for key, entry in manifest.tensors.items()
        },
        aliases={names[alias]: names[owner] for alias, owner in manifest.aliases.items()},
        groups=tuple(_renamed(group, names) for group in manifest.groups),
        values=_renamed_values(manifest, names),
    )
    return renamed, ()


def _renamed(group: ParamGroup, names: Mapping[str, str]) -> ParamGroup:
    """The group with new names, also among its options: torch's ``param_names``."""
    params = tuple(names.get(name, name) for name in group.params)
    named = {"param_names": list(params)} if "param_names" in group.options and params != group.params else {}
    return replace(group, params=params, options={**group.options, **named})


def new_names(manifest: Manifest, new_name: Callable[[str], str]) -> dict[str, str]:
    """The names that ``rename`` changes, and what they become."""
    return {old: new for old in sorted(model_names(manifest)) if (new := new_name(old)) != old}


def check_renaming(manifest: Manifest, rules: Iterable[str], key_map: Mapping[str, str]) -> Transformed:
    """The manifest as it is. Raises UsageError for a rule or a key of the map that is of none of its names."""
    matching.check_renaming(sorted(model_names(manifest)), rules=parsed_rules(rules), key_map=key_map)
    return manifest, ()


def substitutions(rules: Iterable[str], key_map: Mapping[str, str]) -> Callable[[str], str]:
    """The renaming that ``--key-map`` and then each ``--rename REGEX=REPL`` describe.

    Raises:
        UsageError: a rule is not ``REGEX=REPL``, or its regular expression is not valid.
    """
    parsed = parsed_rules(rules)

    def new_name(name: str) -> str:
        name = key_map.get(name, name)
        for _, pattern, replacement in parsed:
            name = pattern.sub(replacement, name)
        return name

    return new_name


def parsed_rules(rules: Iterable[str]) -> list[tuple[str, re.Pattern[str], str]]:
    """Each ``REGEX=REPL`` with its two halves. Raises UsageError."""
    parsed = []
    for rule in rules:
        regex, separator, replacement = rule.rpartition("=")
        if not separator:
            raise UsageError(f"{option('rename', rule)} is not REGEX=REPLACEMENT")
        if not regex:
            empty = "has an empty REGEX, which matches between all letters of a name"
            raise UsageError(f"{option('rename', rule)} {empty}")
        try:
            pattern = re.compile(regex)
            pattern.sub(replacement, "")
        except (re.error, IndexError) as error:
            raise UsageError(f"{option('rename', rule)}: {error}") from error
        parsed.append((rule, pattern, replacement))
    return parsed


def without_wrappers(manifest: Manifest) -> Transformed:
    """Names as the bare model has them: parts that wrappers put in are taken out, and what all names begin with of
    ``module.`` and ``model0.``."""
    bare = bare_model_names(manifest)
    if all(name == old for old, name in bare.items()):
        return manifest, ()
    return rename(manifest, bare.__getitem__)


def without_prefix(manifest: Manifest, prefix: str) -> Transformed:
    """Names without ``prefix``, where they begin with it; the dot that ends it need not be given.

    Raises:
        UsageError: no name begins with it, or two names become one.
    """
    start = f"{prefix.removesuffix('.')}."
    names = model_names(manifest)
    if not any(name.startswith(start) for name in names):
        raise UsageError(
            f"{option('strip', prefix)} is the prefix of no tensor; {matching.nearest_names(start, names)}"
        )
    return rename(manifest, lambda name: name.removeprefix(start))


def cast(manifest: Manifest, dtype: DType | None) -> Transformed:
    """Floating-point weights as ``dtype``; optimizer state, buffers and integers as they are.

    Quantized weights are left alone too, and the scales stored beside them: they mean nothing without each other.
    """
    if dtype is None:
        return manifest, ()
    changed = {key for key, entry in manifest.tensors.items() if _is_cast(entry) and entry.dtype is not dtype}
    left = changed & quantized.uncast(manifest)
    tensors = {
        key: _cast(entry, dtype) if key.slot == WEIGHT and key not in left else entry
        for key, entry in manifest.tensors.items()
    }
    small = {
        key
        for key, entry in manifest.tensors.items()
        if entry.kind is Kind.PARAMETER and quantized.is_small_float(entry.dtype)
    }
    widened = f"not cast: floats of 8 bits or less may need scales; {option('dequantize', True)} widens them"
    needed = "not cast: they belong to quantized weights (scales, zero points), which have no meaning in another type"
    kept = ((small, widened), (left, needed))
    notes = tuple(_uncast_note(manifest, keys, why) for keys, why in kept if keys)
    return replace(manifest, tensors=tensors), notes


def _uncast_note(manifest: Manifest, keys: Collection[StateKey], why: str) -> Note:
    names = sorted(key.fqn for key in keys)
    what = ", ".join(names[:3]) + (f", ... ({len(names)} tensors)" if len(names) > 3 else "")
    return Note(Outcome.KEPT, what, why, len(names), sum(manifest.tensors[key].num_bytes for key in keys))


def cast_notes(before: Manifest, after: Manifest, as_stored: Collection[str]) -> tuple[Note, ...]:
    """Notes on the tensors that were cast. The writer writes the buffers ``as_stored`` in the dtype that they have in
    the source."""
    found: dict[tuple[DType, DType], list[TensorEntry]] = {}
    for key, entry in before.tensors.items():
        dtype = after.tensors[key].dtype
        if dtype is not entry.dtype and not (key.slot == WEIGHT and key.fqn in as_stored):
            found.setdefault((entry.dtype, dtype), []).append(entry)
    return tuple(cast_note(source, dtype, entries) for (source, dtype), entries in found.items())


def cast_note(before: DType, after: DType, entries: Collection[TensorEntry], by: str = "") -> Note:
    """Note on tensors that are cast, ``by`` what is added if the user did not name the dtype."""
    return Note(
        Outcome.CAST,
        count(len(entries), f"{before.value} tensor"),
        f"{before.value} to {after.value}{by}",
        len(entries),
        sum(entry.num_bytes for entry in entries),
        asked=True,
    )


def _is_cast(entry: TensorEntry) -> bool:
    return entry.kind is Kind.PARAMETER and entry.dtype in CASTABLE


def _cast(entry: TensorEntry, dtype: DType) -> TensorEntry:
    if not _is_cast(entry):
        return entry
    check_cast(entry.shards.dtype, dtype)
    return entry.cast(dtype)
