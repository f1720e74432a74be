"""Whole checkpoints of any shape, laid down in files: what a writer is given, made without a reader."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, ParamGroup, StateKey, TensorEntry, TensorRef
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.testing.stored import StoredTensor, stored_tensors

FORMAT = "a test's"
"""What the manifests call their format, which none is."""

NAMES = ("bias", "embed.weight", "layers.0.norm.weight", "layers.10.mlp.weight", "größe", "running_mean")

OPTIONS = st.dictionaries(
    st.sampled_from(["lr", "weight_decay", "name", "is_fused", "betas"]),
    st.one_of(st.floats(allow_nan=False), st.booleans(), st.text(max_size=3), st.just((0.9, 0.95))),
)


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A manifest, the bits of its tensors row-major, and the store that its shards lie in."""

    manifest: Manifest
    elements: dict[StateKey, bytes]
    store: MemoryStore = field(repr=False)


@st.composite
def stored_checkpoints(
    draw: st.DrawFn,
    *,
    without: Collection[DType] = (),
    is_whole: bool = True,
    has_user_tensors: bool = True,
    has_ties: bool = True,
) -> StoredCheckpoint:
    """Weights of any dtype but ``without`` in any sharding, 0-d and empty ones too, and ties of those that have
    elements. If ``is_whole``, also optimizer state and groups, and entries of the user's own. With
    ``has_user_tensors`` one of these is a tensor, if there is an optimizer: a tree without one does not say which
    tensors are the model's."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    tensors = {StateKey(name): _draw_tensor(draw, f"{name}/", without) for name in names}
    weights = {name: tensors[StateKey(name)].entry for name in names}
    trained = [name for name in names if weights[name].dtype.is_floating] if is_whole else []
    for name in trained:
        tensors |= {
            StateKey(name, slot): _draw_optimizer_state(draw, weights[name], name, slot) for slot in ("exp_avg", "step")
        }
    extra = _draw_extra(draw, has_tensors=bool(trained) and has_user_tensors) if is_whole else {}
    if "rng" in extra:
        tensors[StateKey("rng", "extra")] = _set_kind(_draw_tensor(draw, "rng/", without), Kind.EXTRA)
    manifest = Manifest(
        FORMAT,
        {key: tensor.entry for key, tensor in tensors.items()},
        aliases={f"tied.{name}": name for name in names if has_ties and weights[name].numel and draw(st.booleans())},
        groups=_draw_groups(draw, trained),
        extra=extra,
    )
    files = {file: bytearray(data) for tensor in tensors.values() for file, data in tensor.files.items()}
    return StoredCheckpoint(
        manifest, {key: each.elements.tobytes() for key, each in tensors.items()}, MemoryStore(files)
    )


PLACES = ("ema", "model", "state_dict", "module", "0", "optim", "größe", "bias")
"""Names of the user's own entries: what models are called, what optimizers are called, and a weight's name."""


@st.composite
def checkpoints_with_user_tensors(draw: st.DrawFn, *, without: Collection[DType] = ()) -> StoredCheckpoint:
    """A checkpoint, with or without an optimizer, whose user keeps tensors in dicts that look like models: as large,
    larger, of the same names, deeper, and beside an optimizer of their own."""
    base = draw(stored_checkpoints(without=without, has_user_tensors=False))
    tensors, elements, files = dict(base.manifest.tensors), dict(base.elements), dict(base.store.files)
    extra = dict(base.manifest.extra)

    def add_user_tensor(path: tuple[str, ...]) -> TensorRef:
        tensor = draw(stored_tensors(prefix=f"own/{'/'.join(path)}/", dtype=DType.FLOAT32))
        key = StateKey(".".join(("own", *path)), "extra")
        tensors[key] = _set_kind(tensor, Kind.EXTRA).entry
        elements[key] = tensor.elements.tobytes()
        files.update({file: bytearray(data) for file, data in tensor.files.items()})
        return TensorRef(key)

    for entry_name in draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=3, unique=True)):
        if draw(st.booleans()):
            extra[entry_name] = add_user_tensor((entry_name,))
            continue
        inner = draw(st.sampled_from(["", "model", "state_dict"]))
        names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
        model = {name: add_user_tensor((entry_name, inner, name)) for name in names}
        extra[entry_name] = {inner: model} if inner else model
        if draw(st.booleans()):
            extra[f"{entry_name}_optimizer"] = {
                "state": {name: {"exp_avg": add_user_tensor((entry_name, inner, name, "exp_avg"))} for name in names},
                "param_groups": [{"params": names, "lr": 0.5}],
            }
    return StoredCheckpoint(replace(base.manifest, tensors=tensors, extra=extra), elements, MemoryStore(files))


def _draw_tensor(draw: st.DrawFn, prefix: str, without: Collection[DType]) -> StoredTensor:
    """A tensor that torch would call a parameter if its elements are real floats, and a buffer if they are not."""
    tensor = draw(stored_tensors(prefix=prefix).filter(lambda each: each.entry.dtype not in without))
    return _set_kind(tensor, Kind.PARAMETER if tensor.entry.dtype.is_floating else Kind.BUFFER)


def _set_kind(tensor: StoredTensor, kind: Kind) -> StoredTensor:
    return replace(tensor, entry=replace(tensor.entry, kind=kind))


def _draw_optimizer_state(draw: st.DrawFn, weight: TensorEntry, name: str, slot: str) -> StoredTensor:
    """Optimizer state in fp32: a moment of the weight's shape, or a count of steps, which is 0-d."""
    shape = () if slot == "step" else weight.shape
    return _set_kind(draw(stored_tensors(prefix=f"{name}/{slot}/", shape=shape, dtype=DType.FLOAT32)), Kind.STATE)


def _draw_groups(draw: st.DrawFn, trained: list[str]) -> tuple[ParamGroup, ...]:
    if not trained:
        return ()
    group_end = draw(st.integers(1, len(trained)))
    members = [names for names in (trained[:group_end], trained[group_end:]) if names]
    return tuple(ParamGroup(tuple(names), {"lr": 0.1, **draw(OPTIONS)}) for names in members)


def _draw_extra(draw: st.DrawFn, *, has_tensors: bool) -> dict[str, Any]:
    """The user's own entries, in forms that every tree of state keeps as they are."""
    values = {
        "epoch": draw(st.integers(-(2**70), 2**70)),
        "note": draw(st.text("a\0é\U0001f600 ", max_size=5)),
        "scheduler": {"last_lr": draw(st.lists(st.floats(allow_nan=False), max_size=3)), "mode": (1, None)},
        **({"rng": TensorRef(StateKey("rng", "extra"))} if has_tensors else {}),
    }
    return {name: value for name, value in values.items() if draw(st.booleans())}
