"""Lightning (2.6.6): one ``.ckpt`` file, or a DCP with ``meta.pt`` beside ``.metadata``.

``FSDPStrategy`` and ``ModelParallelStrategy`` keep everything that is not a tensor in ``meta.pt``, and take a folder
without it for no checkpoint (fabric/strategies/fsdp.py ``_is_sharded_checkpoint``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_tools.core.dtypes import decode_number
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.values import Opaque, StoredTensor
from ckpt_tools.trainers.record import BestCheckpoints, MetricItems, ResumeRules, Trainer
from ckpt_tools.trainers.saved import SavedCheckpoint
from ckpt_tools.trainers.transformers import parse_counters

if TYPE_CHECKING:
    from ckpt_tools.serialization.torch_archive import TorchArchive

META = "meta.pt"

_METRIC_IN_NAME = re.compile(r"([A-Za-z][\w/]*)=(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)")


TRAINED_WEIGHTS = ("current_model_state",)
"""Where WeightAveraging and EMAWeightAveraging put the weights that the optimizer belongs to; ``state_dict`` is their
average then (callbacks/weight_averaging.py)."""


def rename_average(manifest: Manifest) -> Manifest:
    """Renames ``state_dict`` beside the trained weights, so that its name says that it is an average of them."""
    if manifest.tree is None or manifest.tree.model != TRAINED_WEIGHTS or "state_dict" not in manifest.extra:
        return manifest
    names = {name: "averaged_state_dict" if name == "state_dict" else name for name in manifest.extra}
    extra = {names[name]: value for name, value in manifest.extra.items()}
    tree_paths = {names.get(name, name): home for name, home in manifest.tree.extras.items()}
    return replace(manifest, extra=extra, tree=replace(manifest.tree, extras=tree_paths))


def rename_scheduler(manifest: Manifest) -> Manifest:
    """Renames the only one of Lightning's ``lr_schedulers`` to ``lr_scheduler``, as other trainers call it."""
    is_lightning = "pytorch-lightning_version" in manifest.extra and "lr_scheduler" not in manifest.extra
    scheduler_entry = _extract_scheduler(manifest.extra) if is_lightning else {}
    if not scheduler_entry:
        return manifest
    extra = {**{k: v for k, v in manifest.extra.items() if k != "lr_schedulers"}, **scheduler_entry}
    tree = manifest.tree and replace(
        manifest.tree, extras={**manifest.tree.extras, "lr_scheduler": ("lr_schedulers", 0)}
    )
    return replace(manifest, extra=extra, tree=tree)


def _extract_scheduler(content: Mapping[str, Any]) -> Mapping[str, Any]:
    schedulers = content.get("lr_schedulers")
    return {"lr_scheduler": schedulers[0]} if isinstance(schedulers, list) and len(schedulers) == 1 else {}


def _parse_meta(content: Any) -> Mapping[str, Any]:
    return {**parse_counters(content), **_extract_scheduler(content)} if isinstance(content, dict) else {}


def _find_problem(checkpoint: SavedCheckpoint) -> str | None:
    """Why the checkpoint is not complete: Lightning writes ``meta.pt`` after the shards."""
    name = checkpoint.base_name
    if not name.endswith(".ckpt") or checkpoint.files.keys() == {name} or ".metadata" not in checkpoint.files:
        return None
    return None if META in checkpoint.files else f"no {META}: the save did not finish"


def _read_metrics(checkpoint: SavedCheckpoint) -> MetricItems:
    """Metrics in the name, then the monitored value of each ``ModelCheckpoint`` among ``callbacks``."""
    for name, value in _METRIC_IN_NAME.findall(checkpoint.base_name):
        yield name, float(value)
    for path, archive, state in _iter_monitors(checkpoint):
        yield state["monitor"], _read_number(state.get("current_score"), archive, checkpoint, path)


def _read_best(checkpoint: SavedCheckpoint) -> BestCheckpoints | None:
    """The best of each ``ModelCheckpoint``; one that monitors nothing calls its last one so."""
    monitors = list(_iter_monitors(checkpoint))
    if not monitors:
        return None
    path, paths = monitors[0][0], [state.get("best_model_path") for _, _, state in monitors]
    record = path if path == checkpoint.base_name else f"{path} of {checkpoint.base_name}"
    return BestCheckpoints(record, [each for each in paths if isinstance(each, str) and each])


def _iter_monitors(checkpoint: SavedCheckpoint) -> Iterator[tuple[str, TorchArchive, Mapping[str, Any]]]:
    """The state of each callback that monitors a metric, with the file that holds it, and the content of that."""
    from ckpt_tools.serialization.torch_zip import open_archive

    path = checkpoint.base_name if checkpoint.base_name in checkpoint.files else META
    if path not in checkpoint.files or not path.endswith((".ckpt", META)):
        return
    archive = open_archive(*checkpoint.get_archive_arguments(path))
    callbacks = archive.value.get("callbacks") if isinstance(archive.value, dict) else None
    for each in callbacks.values() if isinstance(callbacks, dict) else ():
        state = each.attributes if isinstance(each, Opaque) else each
        if isinstance(state, dict) and isinstance(state.get("monitor"), str):
            yield path, archive, state


def _read_number(value: Any, archive: TorchArchive, checkpoint: SavedCheckpoint, path: str) -> Any:
    """A number, or the one element of a tensor."""
    if not isinstance(value, StoredTensor) or value.numel != 1 or value.storage is None:
        return value
    start, _ = archive.locate_storage(value.storage.key)
    start += value.storage_offset * value.dtype.item_bytes
    data = checkpoint.run.read(checkpoint.path_in_run(path), start, start + value.dtype.item_bytes)
    return decode_number(data, value.dtype)


LIGHTNING = Trainer(
    name="Lightning",
    entry_parsers={META: _parse_meta},
    folders="checkpoint",
    last=re.escape(META),
    resume_rules=ResumeRules(
        dcp_folders="",
        marker_file=META,
        copied_files=(re.escape(META),),
        resume_code="trainer.fit(model, ckpt_path={path})",
    ),
    find_problem=_find_problem,
    read_metrics=_read_metrics,
    read_best=_read_best,
)
