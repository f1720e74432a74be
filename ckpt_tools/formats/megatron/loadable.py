"""What Megatron's loader takes of a common state: it unpickles the classes of a list and no others. Pure.

megatron-core 0.16.1, ``safe_globals.py``. What a checkpoint holds beside them would make the output unloadable, and
might be a call that somebody hid there, so that it is left behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tools.core.values import GlobalRef, Opaque, Value
from ckpt_tools.formats.foreign import classes_in
from ckpt_tools.formats.megatron.common_state import NAMESPACE

_NAMES: Mapping[str, str] = {
    "types": "SimpleNamespace",
    "pathlib": "PosixPath",
    "numpy.core.multiarray": "_reconstruct",
    "numpy._core.multiarray": "_reconstruct",
    "numpy": "ndarray dtype",
    "numpy.dtypes": "UInt32DType",
    "_codecs": "encode",
    "argparse": "Namespace",
    "megatron.core.enums": "ModelType",
    "megatron.core.optimizer.optimizer_config": "OptimizerConfig",
    "megatron.core.rerun_state_machine": "RerunDiagnostic RerunMode RerunState",
    "megatron.core.transformer.enums": "AttnBackend CudaGraphScope",
    "_io": "BytesIO",
    "signal": "Signals",
}
"""The list, and what torch adds to it for arrays of numpy."""

_KNOWN = frozenset(GlobalRef(module, name) for module, names in _NAMES.items() for name in names.split())


def is_loadable(value: Value) -> bool:
    """Whether every class in ``value`` is one that Megatron's loader takes."""
    return all(ref.dtype is not None or ref in _KNOWN for ref in classes_in(value))


def loadable(values: Mapping[Any, Value]) -> tuple[dict[Any, Value], list[str]]:
    """``values`` without what is not loadable, and the names of that; of ``args`` each argument is looked at."""
    found, lost = dict(values), []
    for name, value in values.items():
        if isinstance(value, Opaque) and value.ref == NAMESPACE:
            kept = {each: item for each, item in value.attributes.items() if is_loadable(item)}
            lost += [f"{name}.{each}" for each in value.attributes if each not in kept]
            found[name] = Opaque(NAMESPACE, form="new", state=kept)
        elif not is_loadable(value):
            lost.append(str(name))
            del found[name]
    return found, lost
