"""Lightning (2.6.6): one ``.ckpt`` file, or a DCP with ``meta.pt`` beside ``.metadata``.

``FSDPStrategy`` and ``ModelParallelStrategy`` keep everything that is not a tensor in ``meta.pt``, and take a folder
without it for no checkpoint (fabric/strategies/fsdp.py ``_is_sharded_checkpoint``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.values import Opaque, StoredTensor
from ckpt_tools.trainers.record import Metrics, Named, Returned, Trainer
from ckpt_tools.trainers.saved import Saved
from ckpt_tools.trainers.transformers import counts

if TYPE_CHECKING:
    from ckpt_tools.serialization.torch_archive import TorchArchive

META = "meta.pt"

_IN_NAME = re.compile(r"([A-Za-z][\w/]*)=(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)")


TRAINED = ("current_model_state",)
"""Where WeightAveraging and EMAWeightAveraging put the weights that the optimizer belongs to; ``state_dict`` is their
average then (callbacks/weight_averaging.py)."""


def with_average(manifest: Manifest) -> Manifest:
    """Renames ``state_dict`` beside the trained weights, so that its name says that it is an average of them."""
    if manifest.tree is None or manifest.tree.model != TRAINED or "state_dict" not in manifest.extra:
        return manifest
    names = {name: "averaged_state_dict" if name == "state_dict" else name for name in manifest.extra}
    extra = {names[name]: value for name, value in manifest.extra.items()}
    homes = {names.get(name, name): home for name, home in manifest.tree.extras.items()}
    return replace(manifest, extra=extra, tree=replace(manifest.tree, extras=homes))


def with_scheduler(manifest: Manifest) -> Manifest:
    """Renames the only one of Lightning's ``lr_schedulers`` to ``lr_scheduler``, as other trainers call it."""
    is_lightning = "pytorch-lightning_version" in manifest.extra and "lr_scheduler" not in manifest.extra
    found = _scheduler(manifest.extra) if is_lightning else {}
    if not found:
        return manifest
    extra = {**{k: v for k, v in manifest.extra.items() if k != "lr_schedulers"}, **found}
    tree = manifest.tree and replace(
        manifest.tree, extras={**manifest.tree.extras, "lr_scheduler": ("lr_schedulers", 0)}
    )
    return replace(manifest, extra=extra, tree=tree)


def _scheduler(content: Mapping[str, Any]) -> Mapping[str, Any]:
    schedulers = content.get("lr_schedulers")
    return {"lr_scheduler": schedulers[0]} if isinstance(schedulers, list) and len(schedulers) == 1 else {}


def _meta(content: Any) -> Mapping[str, Any]:
    return {**counts(content), **_scheduler(content)} if isinstance(content, dict) else {}


def _problem(saved: Saved) -> str | None:
    """``meta.pt`` is written when the shards are there."""
    name = saved.title
    if not name.endswith(".ckpt") or saved.files.keys() == {name} or ".metadata" not in saved.files:
        return None
    return None if META in saved.files else f"no {META}: the save did not finish"


def _metrics(saved: Saved) -> Metrics:
    """Metrics in the name, then the monitored value of each ``ModelCheckpoint`` among ``callbacks``."""
    for name, value in _IN_NAME.findall(saved.title):
        yield name, float(value)
    path, archive = _opened(saved)
    if archive is None:
        return
    for state in _callbacks(archive):
        if isinstance(state.get("monitor"), str):
            yield state["monitor"], _number(state.get("current_score"), archive, saved, path)


def _best(saved: Saved) -> Named | None:
    """The best of each ``ModelCheckpoint``; one that monitors nothing calls its last one so."""
    path, archive = _opened(saved)
    states = [] if archive is None else [each for each in _callbacks(archive) if isinstance(each.get("monitor"), str)]
    paths = (each.get("best_model_path") for each in states)
    record = path if path == saved.title else f"{path} of {saved.title}"
    return Named(record, [each for each in paths if isinstance(each, str) and each]) if states else None


def _opened(saved: Saved) -> tuple[str, TorchArchive | None]:
    """The file that holds the callbacks' states, and its content if there is such a file."""
    from ckpt_tools.serialization.torch_zip import open_archive

    path = saved.title if saved.title in saved.files else META
    is_there = path in saved.files and path.endswith((".ckpt", META))
    return path, open_archive(*saved.part(path)) if is_there else None


def _callbacks(archive: TorchArchive) -> Iterator[Mapping[str, Any]]:
    callbacks = archive.value.get("callbacks") if isinstance(archive.value, dict) else None
    for each in callbacks.values() if isinstance(callbacks, dict) else ():
        state = each.attributes if isinstance(each, Opaque) else each
        if isinstance(state, dict):
            yield state


def _number(value: Any, archive: TorchArchive, saved: Saved, path: str) -> Any:
    """A number, or the one element of a tensor."""
    if not isinstance(value, StoredTensor) or value.numel != 1 or value.storage is None:
        return value
    import numpy as np

    start, _ = archive.locate_storage(value.storage.key)
    start += value.storage_offset * value.dtype.item_bytes
    data = saved.run.read(saved.path(path), start, start + value.dtype.item_bytes)
    kind = {"float32": "<f4", "float64": "<f8", "float16": "<f2", "int64": "<i8"}.get(value.dtype.value)
    return None if kind is None else np.frombuffer(data, kind)[0].item()


LIGHTNING = Trainer(
    name="Lightning",
    reads={META: _meta},
    folders="checkpoint",
    last=re.escape(META),
    returned=Returned(parts="", sign=META, files=(re.escape(META),), resume="trainer.fit(model, ckpt_path={path})"),
    problem=_problem,
    metrics=_metrics,
    best=_best,
)
