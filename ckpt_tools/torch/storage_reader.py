"""A ``StorageReader`` for ``torch.distributed.checkpoint.load`` over a checkpoint of any format.

An FSDP2, HSDP or 2-D job of N ranks loads a ZeRO, universal, safetensors, torch or DCP checkpoint without converting
it first: torch's planner asks for boxes of tensors, and each rank reads those of its own. Every tensor is shown to the
planner as one chunk, since the tensor reader finds the pieces. Objects are revived by ckpt-tools, so that nothing that
a checkpoint names is called.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ckpt_tools.arguments import api_function, expand_keywords
from ckpt_tools.core import renaming, transforms
from ckpt_tools.core.boxes import Box
from ckpt_tools.core.manifest import Manifest, TensorRef
from ckpt_tools.core.option_names import DEFAULT_WEIGHTS, Weights
from ckpt_tools.core.options import ConvertOptions, ReadKeywords
from ckpt_tools.core.values import GlobalRef, Opaque
from ckpt_tools.errors import UnsafeError
from ckpt_tools.runs.opening import open_checkpoint
from ckpt_tools.state_tree.build import Entries, choose_tree, entries_of
from ckpt_tools.torch.fill import SCRATCH_BYTES, TensorFill, fill_targets, read_tensor, to_torch_dtype
from ckpt_tools.torch.name_matching import JobNameMatcher
from ckpt_tools.torch.revive import revive_value
from ckpt_tools.transfer.tensor_reader import TensorReader

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
    from torch.distributed.checkpoint.storage import StorageReader


@api_function
@expand_keywords(ReadKeywords, ConvertOptions)
def storage_reader(
    url: str | Path,
    *,
    weights: Weights = DEFAULT_WEIGHTS,
    job_model_key: str | None = None,
    job_optim_key: str | None = None,
    **given: Unpack[ReadKeywords],
) -> StorageReader:
    """Make a reader for ``torch.distributed.checkpoint.load`` of the checkpoint at ``url``.

    Args:
        url: A path, or a URL of a store, of a checkpoint of any format.
        from_, tag, model_key, optim_key, param_order, optimizer_file, storage_options: How the checkpoint is read, as
            for ``load_into``.
        weights: Which copy of a weight, if the checkpoint has both: the fp32 ``"master"``, or the ``"model"``'s own.
            Default: ``"master"``.
        job_model_key: Where the model is in the state dict to load, such as ``"app.model"``. Default: found by names.
        job_optim_key: Where the optimizer is in the state dict to load. Default: found by names.

    Returns:
        A ``torch.distributed.checkpoint.StorageReader``.

    Raises:
        CkptError: the checkpoint cannot be opened.

    Example:
        >>> import ckpt_tools, torch
        >>> import torch.distributed.checkpoint as dcp
        >>> state = {"model": {"encoder.weight": torch.zeros(4, 8), "encoder.bias": torch.zeros(4)}}
        >>> dcp.load(state, storage_reader=ckpt_tools.storage_reader("model.safetensors"), no_dist=True)
        >>> state["model"]["encoder.bias"].tolist()
        [0.0, 1.0, 2.0, 3.0]
    """
    convert_options = ConvertOptions(weights=weights, **given)
    read_options, storage_options = convert_options.read_options, convert_options.storage_options
    opened = open_checkpoint(
        url, read_options, format_name=convert_options.from_, storage_options=storage_options, checks_options=True
    )
    manifest = opened.manifest
    if not manifest.keeps_masters:
        manifest, _ = transforms.keep_one_copy(manifest, weight_copy=convert_options.choose_weight_copy(manifest))
    manifest, _ = renaming.strip_wrappers(manifest)
    # Groups have the names of both forms of an optimizer; a flattened one has no groups to ask for.
    tree = replace(choose_tree(manifest, model_key=None, optim_key=None), is_flattened=False, numbers=())
    entries = entries_of(manifest, tree)
    names = JobNameMatcher.of(manifest, entries, tree, model_key=job_model_key, optim_key=job_optim_key)
    reader: StorageReader = _build_reader_class()(
        _ServedCheckpoint(manifest, entries, names, TensorReader(opened.source.store, SCRATCH_BYTES))
    )
    return reader


@dataclass(frozen=True, slots=True)
class _ServedCheckpoint:
    manifest: Manifest
    entries: Entries
    names: JobNameMatcher
    tensor_reader: TensorReader

    def build_metadata(self) -> Metadata:
        from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

        metadata_by_name = _JobMetadata(self.names, {name: self._describe_entry(name) for name in self.entries.paths})
        return Metadata(metadata_by_name, dict(self.entries.paths), {}, StorageMeta())

    def _describe_entry(self, name: str) -> Any:
        import torch
        from torch.distributed.checkpoint import metadata

        owner = self.entries.aliases.get(name, name)
        if owner not in self.entries.tensors:
            return metadata.BytesStorageMetadata()
        entry = self.manifest.tensors[self.entries.tensors[owner]]
        chunk = metadata.ChunkStorageMetadata(torch.Size((0,) * len(entry.shape)), torch.Size(entry.shape))
        properties = metadata.TensorProperties(dtype=to_torch_dtype(entry.dtype))
        return metadata.TensorStorageMetadata(properties, torch.Size(entry.shape), [chunk])

    def serve_plan(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        from torch.distributed.checkpoint.planner import LoadItemType

        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        targets = [planner.resolve_tensor(item) for item in tensors]
        fill_targets(map(self._build_fill, tensors, targets), self.tensor_reader)
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._save_object(self._find_entry_name(item)))

    def _find_entry_name(self, item: ReadItem) -> str:
        match = self.names.find_match(item.storage_index.fqn)
        assert match is not None, "the planner asks for what the metadata has"
        return match.entry

    def _build_fill(self, item: ReadItem, target: torch.Tensor) -> TensorFill:
        name = self._find_entry_name(item)
        key = self.entries.tensors[self.entries.aliases.get(name, name)]
        start = tuple(item.storage_offsets)
        box = Box(start, tuple(a + n for a, n in zip(start, item.lengths, strict=True)))
        return TensorFill(target, self.manifest.tensors[key], box, item.storage_index.fqn)

    def _save_object(self, name: str) -> io.BytesIO:
        """An object as ``torch.save`` would write it."""
        import torch

        def refuse_unknown(value: Any) -> Any:
            raise UnsafeError(
                f"it is or contains {_describe_object(value)}, which only code named in the checkpoint could create; "
                "remove it from the state dict",
                key=name,
            )

        buffer = io.BytesIO()
        stored = self.entries.objects[name]
        torch.save(revive_value(stored, load_tensor=self._read_tensor, handle_unknown=refuse_unknown), buffer)
        buffer.seek(0)
        return buffer

    def _read_tensor(self, ref: TensorRef) -> torch.Tensor:
        return read_tensor(self.manifest.tensors[ref.key], self.tensor_reader, name=str(ref.key))


def _describe_object(value: Any) -> str:
    while isinstance(value, Opaque):
        value = value.ref
    return f"the class or function {value}" if isinstance(value, GlobalRef) else "an object"


class _JobMetadata(dict[str, Any]):
    """``state_dict_metadata`` by the checkpoint's own names, which answers to a job's names as well."""

    def __init__(self, names: JobNameMatcher, metadata_by_name: dict[str, Any]) -> None:
        super().__init__(metadata_by_name)
        self._names = names

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._names.find_match(name) is not None

    def __missing__(self, name: str) -> Any:
        match = self._names.find_match(name)
        if match is None:
            raise KeyError(name)
        return self[match.entry]


@cache
def _build_reader_class() -> Any:
    from torch.distributed.checkpoint.storage import StorageReader
    from torch.futures import Future

    class CheckpointReader(StorageReader):
        def __init__(self, checkpoint: _ServedCheckpoint) -> None:
            self._served = checkpoint

        def reset(self, checkpoint_id: Any = None) -> None:
            """The checkpoint is chosen when the reader is made."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return self._served.build_metadata()

        def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
            """Nothing to set up: every rank has opened the checkpoint."""

        def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
            self._served.names.check_prefixes(item.storage_index.fqn for item in plan.items)
            return plan

        def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
            return plans

        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
            self._served.serve_plan(plan, planner)
            done: Future[None] = Future()
            done.set_result(None)
            return done

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return False

    return CheckpointReader
