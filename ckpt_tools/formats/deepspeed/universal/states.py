"""The files of a universal checkpoint by parameter and slot, and the tensor or number in one of them.

From stages 1 and 2 a file holds ``{"param": tensor, "cat_dim": ...}`` with the tensor in its shape, from stage 3 a bare
flat tensor, and ``step.pt`` a 0-d tensor or a number; ds_to_universal.py ``merge_tp_slices`` and
``merge_zero3_slices``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.literals import is_number, make_literal_file_name, make_number_table
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.core.values import StoredTensor, Value
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import find_storage_start
from ckpt_tools.formats.deepspeed.names import (
    MODEL_FILE,
    OPTIMIZER_STATE_FILE,
    RANK_MODEL_FILE,
    UNSUPPORTED_EXPERT_FILES,
    UNSUPPORTED_LAYER_FILES,
    match_slot_file,
    model_file_name,
    rank_model_file_name,
    refuse_files,
    split_expert_name,
)
from ckpt_tools.serialization.torch_archive import TorchArchive
from ckpt_tools.serialization.torch_zip import DEFAULT_ROOT, get_archive_root, open_torch_file
from ckpt_tools.state_tree.leaf import TensorLeaf
from ckpt_tools.stores.source import Source

_UNSUPPORTED_FILES = {
    UNSUPPORTED_EXPERT_FILES: "experts (mixture of experts)",
    UNSUPPORTED_LAYER_FILES: "files of a pipeline's layers",
}

PARAM_FIELD, VOCAB_FIELD, IS_EXPERT_FIELD = "param", "vocab_tensor", "is_expert_param"

MAX_VOCAB_PADDING_BYTES = 64 << 20
"""Zeros are kept in memory; vocabularies are padded to a multiple of some hundred rows, 1 MB to 8 MB."""


HEAD_BYTES = 4096
"""One read that reaches the elements of such a file, which start at about 1,000 bytes."""


@dataclass(frozen=True, slots=True)
class UniversalFiles:
    """Paths of the files of one checkpoint: ``slot_paths`` by fqn and slot, ``model_paths`` of the model, one or in
    stage 3 one a rank.

    ``tp_model_paths`` are the model's files of the other tensor-parallel ranks, one each. ``tag`` is empty if the
    folder is the source itself.
    """

    tag: str
    slot_paths: Mapping[str, Mapping[str, str]]
    model_paths: tuple[str, ...]
    optimizer_path: str
    tp_model_paths: tuple[str, ...] = ()


def find_universal_files(source: Source, folder: str) -> UniversalFiles:
    """The files of the checkpoint in ``folder``. Raises UnsupportedError if it is of a kind of parallelism that is not
    read; IncompleteError if the model's file, or that of a rank, is missing."""
    prefix = f"{folder}/" if folder else ""
    paths = [path for path in source.files if path.startswith(prefix)]
    names = [path.removeprefix(prefix) for path in paths]
    refuse_files(names, folder, _UNSUPPORTED_FILES)
    slot_paths: dict[str, dict[str, str]] = {}
    for path in paths:
        match = match_slot_file(path)
        if match and (match["folder"] or "") == folder:
            slot_paths.setdefault(match["fqn"], {})[match["slot"]] = path
    model_paths = _find_model_paths(names, prefix)
    return UniversalFiles(
        folder.rpartition("/")[2],
        slot_paths,
        model_paths,
        prefix + OPTIMIZER_STATE_FILE,
        _find_tp_model_paths(names, prefix),
    )


def _find_model_paths(names: list[str], prefix: str) -> tuple[str, ...]:
    """The model's file of all ranks if there is one, because it has the weights; otherwise that of each rank. Raises
    IncompleteError if there is none, or if a rank has none."""
    if model_file_name() in names:
        return (prefix + model_file_name(),)
    matches = [(name, match) for name in names if (match := RANK_MODEL_FILE.fullmatch(name))]
    ranks = {int(match["rank"]): name for name, match in matches if not int(match["mp"])}
    for rank in range(max(1, len(ranks))):
        if rank not in ranks:
            missing = rank_model_file_name(rank) if ranks else model_file_name()
            raise IncompleteError("this file of the checkpoint is missing", path=prefix + missing)
    return tuple(prefix + ranks[rank] for rank in range(len(ranks)))


def _find_tp_model_paths(names: list[str], prefix: str) -> tuple[str, ...]:
    """The model's file of each tensor-parallel rank but the first. Raises IncompleteError if a rank has none."""
    path_by_rank: dict[int, str] = {}
    for name in names:
        match = MODEL_FILE.fullmatch(name) or RANK_MODEL_FILE.fullmatch(name)
        if match and int(match["mp"]) and not int(match.groupdict().get("rank", 0)):
            path_by_rank[int(match["mp"])] = prefix + name
    for rank in range(1, len(path_by_rank) + 1):
        if rank not in path_by_rank:
            raise IncompleteError("this file of the checkpoint is missing", path=f"{prefix}mp_rank_{rank:02d}_*")
    return tuple(path_by_rank[rank] for rank in range(1, len(path_by_rank) + 1))


@dataclass(frozen=True, slots=True)
class _SlotContent:
    """The content of a slot's file: a tensor whose storage starts at byte ``storage_start``, or a number. ``saved_as``
    is the name under which the file was written, empty if the archive does not have it. ``is_bare`` says that the
    tensor is the whole content, as stage 3 saves it."""

    value: Value
    saved_as: str
    storage_start: int = 0
    is_vocabulary: bool = False
    is_expert: bool = False
    is_bare: bool = False

    def require_tensor(self, path: str) -> StoredTensor:
        if not isinstance(self.value, StoredTensor):
            raise MalformedError("it does not contain a tensor, as the files of universal checkpoints do", path=path)
        return self.value

    def find_byte_range(self, path: str, numel: int) -> ByteRange:
        """The bytes of the tensor's first ``numel`` elements; opening has checked that the file has them."""
        tensor = self.require_tensor(path)
        start_byte = self.storage_start + tensor.storage_offset * tensor.dtype.item_bytes
        return ByteRange(path, start_byte, start_byte + numel * tensor.dtype.item_bytes)


@dataclass(slots=True)
class SlotFileReader:
    """Opens the files of slots. ``literals`` gathers plain numbers in them, and zeros. ``expert_tensors`` are the names
    of the tensors with all experts of AutoEP.

    Files of one size that are equal up to their elements hold the same kind of tensor, so that each except the
    first costs one read: 1.8 s of processor time instead of 3.7 s for the 8,000 files of 2,000 parameters.
    """

    source: Source
    expert_tensors: frozenset[str] = frozenset()
    literals: dict[str, bytes] = field(default_factory=dict)
    _contents: dict[str, _SlotContent] = field(default_factory=dict)
    _known_contents: dict[int, dict[bytes, _SlotContent]] = field(default_factory=lambda: defaultdict(dict))

    def open_files(self, paths: Sequence[str]) -> None:
        """Read the headers of files. Raises FormatError."""
        self._contents |= zip(paths, self.source.map_files(self._open_content, paths), strict=True)

    def build_shard_table(self, path: str, shape: Shape, fqn: str) -> ShardTable:
        """The shards of the slot in ``path`` of parameter ``fqn``, which has ``shape``. Raises MalformedError if the
        file has a tensor of another shape; UnsupportedError if it is of experts that the model does not have."""
        content = self._contents[path]
        if content.is_expert and split_expert_name(fqn) is None and fqn not in self.expert_tensors:
            raise UnsupportedError(
                "it is of experts (AutoEP), and the model's file has no experts of this name", path=path, key=fqn
            )
        tensor = content.require_tensor(path)
        if tuple(tensor.shape) == shape:
            return TensorLeaf.of(tensor, path, content.storage_start).shards
        # Older versions left the padding of stage 3 at the end.
        has_elements = tensor.numel == prod(shape) or (content.is_bare and tensor.numel > prod(shape))
        if len(tensor.shape) == 1 and has_elements and tensor.is_contiguous:
            return ShardTable.whole((prod(shape),), tensor.dtype, content.find_byte_range(path, prod(shape)))
        lacks_rows = bool(tensor.shape and shape) and tensor.shape[1:] == shape[1:] and tensor.shape[0] < shape[0]
        if content.is_vocabulary and lacks_rows and tensor.is_contiguous:
            return self._build_padded_table(path, content, shape)
        why = f"its shape is {list(tensor.shape)}, but that of the model is {list(shape)}"
        raise MalformedError(why, path=path, key=fqn)

    def read_shape(self, path: str) -> Shape:
        """The shape of the tensor in ``path``. Raises MalformedError."""
        return tuple(self._contents[path].require_tensor(path).shape)

    def read_scalar(self, path: str) -> ShardTable:
        """The shard of the 0-d tensor or the number in ``path``. Raises MalformedError if it has neither."""
        content = self._contents[path]
        if isinstance(content.value, StoredTensor) and content.value.numel == 1:
            return ShardTable.whole((), content.value.dtype, content.find_byte_range(path, 1))
        return self.store_number(path, content.value)

    def store_number(self, name: str, value: Value) -> ShardTable:
        """The shard of a plain number, which is kept under ``name``. Raises MalformedError if it is not one."""
        if not is_number(value):
            raise MalformedError(f"a step is a {type(value).__name__}, which is not a number", path=name)
        table, files = make_number_table(value, name)
        self.literals |= files
        return table

    def _open_content(self, source: Source, path: str) -> _SlotContent:
        # Files of one size whose bytes before the elements are equal have the same pickle, and so the same dtype, shape
        # and start of elements: the content of the first is that of the others.
        size = source.size(path)
        head_bytes, known_contents = source.read(path, 0, min(HEAD_BYTES, size)), self._known_contents[size]
        known_content = next(
            (each for prefix, each in [*known_contents.items()] if head_bytes.startswith(prefix)), None
        )
        if known_content is not None:
            return _check_saved_name(path, known_content)
        archive = open_torch_file(source, path)
        content = _read_content(archive)
        is_single = isinstance(content.value, StoredTensor) and len(archive.storages) == 1
        if is_single and 0 < content.storage_start <= len(head_bytes):
            known_contents[head_bytes[: content.storage_start]] = content
        return _check_saved_name(path, content)

    def _build_padded_table(self, path: str, content: _SlotContent, shape: Shape) -> ShardTable:
        """The shards of a vocabulary: its rows, and below them the zeros that DeepSpeed's loader adds
        (universal_checkpoint.py)."""
        tensor = content.require_tensor(path)
        rows, item_bytes = tensor.shape[0], tensor.dtype.item_bytes
        missing_bytes = (prod(shape) - tensor.numel) * item_bytes
        if missing_bytes > MAX_VOCAB_PADDING_BYTES:
            why = f"its vocabulary is {shape[0] - rows:,} rows too short, which is too many to add"
            raise UnsupportedError(why, path=path)
        zeros_file = make_literal_file_name("zeros")
        if len(self.literals.get(zeros_file, b"")) < missing_bytes:
            self.literals[zeros_file] = bytes(missing_bytes)
        stored_shard = Shard(Box.whole(tuple(tensor.shape)), content.find_byte_range(path, tensor.numel))
        zero_shard = Shard(Box((rows, *(0,) * (len(shape) - 1)), shape), ByteRange(zeros_file, 0, missing_bytes))
        return ShardTable.build(shape, tensor.dtype, [stored_shard, zero_shard])


def _check_saved_name(path: str, content: _SlotContent) -> _SlotContent:
    """``content`` itself. Raises MalformedError if the file was saved under the name of another slot."""
    if content.saved_as not in (get_archive_root(path), DEFAULT_ROOT, ""):
        raise MalformedError(f"it was saved as {content.saved_as}.pt; give it its name back", path=path)
    return content


def _read_content(archive: TorchArchive) -> _SlotContent:
    value = archive.value
    fields: Mapping[Value, Value] = value if isinstance(value, dict) else {PARAM_FIELD: value}
    tensor = fields.get(PARAM_FIELD)
    if not isinstance(tensor, StoredTensor):
        return _SlotContent(tensor, archive.archive_name)
    start = find_storage_start(archive, tensor)
    is_vocabulary, is_expert = bool(fields.get(VOCAB_FIELD)), bool(fields.get(IS_EXPERT_FIELD))
    return _SlotContent(
        tensor, archive.archive_name, start, is_vocabulary, is_expert, is_bare=not isinstance(value, dict)
    )
