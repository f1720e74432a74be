"""Names of Megatron-Core's files and of the tensors in them.

The slots of an optimizer stand in front of the name: ``optimizer.state.exp_avg.<name>``, with ``chained_1.`` before it
where experts have an optimizer of their own (megatron-core 0.16.1, optimizer/optimizer.py, distrib_optimizer.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import MASTER
from ckpt_tools.errors import CkptError
from ckpt_tools.stores.source import Source

COMMON_FILE = "common.pt"
CONFIG_FILE = "metadata.json"
"""Files that dist_checkpointing writes beside the index, the second one last."""

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""Beside the ``iter_`` folders of a run: the number of the last one that is finished, or ``release``."""

DATA_FILE_NAME = re.compile(r"[^/]+\.distcp")
ITERATION_FOLDER = re.compile(r"(?:.*/)?iter_(\d{1,18})/?")

FILE_NAME_PATTERN = r"metadata\.json|common\.pt|model_optim_rng\.pt|distrib_optim\.pt"
"""A pattern of the names of files in a checkpoint, beside those of a DCP."""

MAX_CONFIG_BYTES = 1 << 20
"""It names a backend and two versions."""

LAYER_WISE_FILE = re.compile(r"(?:.*/)?layer_wise_optimizer_\d+\.pt")
"""The layer-wise optimizer (Muon) of a data-parallel rank, beside the checkpoint or its folder (Megatron-LM,
training/checkpointing.py): all of the optimizer with ``--ckpt-format torch``, and once more what a ``torch_dist``
holds (NVIDIA-NeMo/Megatron-Bridge#2307)."""

_LEGACY_FILE = re.compile(r"(?:.*/)?(?:model_optim_rng|model_rng|distrib_optim)\.pt")


def find_torch_dist_folders(source: Source) -> list[str]:
    """The folders, as prefixes of paths, in which dist_checkpointing of Megatron-Core keeps a checkpoint."""
    names_by_folder: dict[str, set[str]] = {}
    for path in source.files:
        folder, slash, name = path.rpartition("/")
        if name in (".metadata", COMMON_FILE, CONFIG_FILE):
            names_by_folder.setdefault(folder + slash, set()).add(name)
    return [
        prefix
        for prefix, names in names_by_folder.items()
        if {".metadata", COMMON_FILE} <= names
        or (len(names) > 1 and read_backend(source, f"{prefix}{CONFIG_FILE}") is not None)
    ]


def read_backend(source: Source, path: str) -> str | None:
    """The form of the tensors by the ``metadata.json`` at ``path``; None if it is another file."""
    if path not in source.files or source.size(path) > MAX_CONFIG_BYTES:
        return None
    try:
        config = json.loads(source.read_all(path, limit_bytes=MAX_CONFIG_BYTES))
    except (CkptError, ValueError, RecursionError):
        return None
    backend = config.get("sharded_backend") if isinstance(config, dict) else None
    return backend if isinstance(backend, str) else None


def detect(source: Source) -> bool:
    return bool(find_torch_dist_folders(source)) or any(map(is_legacy_file, source.files))


def is_legacy_file(path: str) -> bool:
    """Whether Megatron-LM's format before dist_checkpointing gives this name to a file."""
    return _LEGACY_FILE.fullmatch(path) is not None


COMMON_ITEM = "common_state/shard_0_1"
"""The item of the common state since megatron-core 0.19; older versions write ``common.pt``."""

OWN_ITEM = "ckpt_tools/shard_0_1"
"""The item of ckpt-tools' own entries, which a ``torch_dist`` has no place for: a sharded object of one piece."""

MASTER_SLOTS = ("param", "fp32_param")
"""Slots of the fp32 copy of a parameter: of the distributed optimizer, and of the other (and of both up to 0.14)."""

_STATE_NAME = re.compile(r"(?:chained_(\d{1,9})\.)?optimizer\.state\.([^.]+)\.(.+)", re.DOTALL)
_BUCKET_NAME = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\..+", re.DOTALL)
_STACKED_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d)")
_SINGLE_LAYER = re.compile(r"(?:^|\.)(?:de|en)coder\.layers\.\d+\.", re.ASCII)
_LOCAL_SHARD = re.compile(r"\.linear_fc1\.(?:weight|bias)_[wv]$|\.experts\.experts\.\d+\.", re.ASCII)
_STACKED_EXPERTS = re.compile(r"\.experts\.experts\.(?!\d)")
_NUMBER = re.compile(r"\.\d+(?=\.)", re.ASCII)
_EXTRA_STATE = re.compile(r".+\._extra_state/shard_[\d.]+_[\d.]+", re.ASCII)
_IN_MODULE = re.compile(
    r"((?:.+\.)?(?:decoder|encoder|mtp)\..+?)\.(?:weight|bias|layer_norm_weight|layer_norm_bias)(?:[._][^.]+)?"
)


@dataclass(frozen=True, slots=True)
class StateName:
    """Optimizer state of the parameter ``name``; ``optimizer_number`` is the number of its optimizer, where the key
    has it."""

    name: str
    slot: str
    optimizer_number: int | None


def parse_state_name(key: str) -> StateName | None:
    """The optimizer state that ``key`` names; None if it names none."""
    match = _STATE_NAME.fullmatch(key)
    if match is None:
        return None
    slot = MASTER if match[2] in MASTER_SLOTS else match[2]
    return StateName(match[3], slot, int(match[1]) if match[1] is not None else None)


def is_bucket_state(key: str) -> bool:
    """Whether ``key`` is state in the distributed optimizer's own buffers: of ``dp_reshardable`` each is a tensor, of
    ``dp_zero_gather_scatter`` all are one object."""
    return _BUCKET_NAME.fullmatch(key) is not None


def find_content_flags(names: Iterable[str]) -> dict[str, bool]:
    """Flags of ``content_metadata`` with which Megatron's modules declare their tensors under these names. Megatron-LM
    and Megatron-Bridge pass them to the modules.

    Source: megatron-core 0.16.1, ``transformer/transformer_block.py``, ``transformer/mlp.py`` and
    ``transformer/moe/experts.py``, ``sharded_state_dict``.
    """
    names = list(names)
    patterns = {"non_homogeneous_layers": _SINGLE_LAYER, "singleton_local_shards": _LOCAL_SHARD}
    return {flag: any(map(pattern.search, names)) for flag, pattern in patterns.items()}


def is_expert_bias(name: str) -> bool:
    """Whether it is a router's correction bias: a buffer that stays fp32 in a model of 16 bits.

    Source: megatron-core 0.16.1, ``transformer/moe/router.py``, ``_maintain_float32_expert_bias``.
    """
    return name.endswith(".router.expert_bias")


def is_expert(name: str) -> bool:
    """Whether it is a parameter of an expert, which expert parallelism distributes. Shared experts are not."""
    return ".experts." in f".{name}"


def count_dims(name: str, stored_dims: int) -> int:
    """Dims of the parameter itself; ``stored_dims`` counts the layers and experts that are stacked in front as well."""
    return stored_dims - (_STACKED_LAYERS.search(name) is not None) - (_STACKED_EXPERTS.search(f".{name}") is not None)


def is_extra_state_item(name: str) -> bool:
    """Whether it names a piece of the object in which a module keeps what is not a tensor, such as scales of fp8."""
    return _EXTRA_STATE.fullmatch(name) is not None


def strip_numbers(name: str) -> str:
    """The module of such an object without the numbers of layers and experts, which not all forms have."""
    return _NUMBER.sub("", name.partition("/")[0])


def list_extra_states(weights: Mapping[str, Shape]) -> list[str]:
    """The pieces of such objects that modules with these weights may ask for when they load: one for each layer, and
    each expert. Attention has one, without any weight.

    Source: megatron-core 0.16.1, ``transformer/utils.py``, ``make_sharded_object_for_checkpoint``.
    """
    grid_by_module: dict[str, Shape] = {}
    for name, shape in weights.items():
        match = _IN_MODULE.fullmatch(name)
        if match is not None:
            grid_by_module[match[1]] = shape[: len(shape) - count_dims(name, len(shape))]
    if "decoder.final_norm" in grid_by_module and "output_layer.weight" in weights:
        # Of hybrid models; GPTModel asks for none of its head.
        grid_by_module["output_layer"] = ()
    attention = {
        f"{module.removesuffix('linear_proj')}core_attention": grid
        for module, grid in grid_by_module.items()
        if module.endswith(".linear_proj")
    }
    return [
        f"{module}._extra_state/shard_{'.'.join(map(str, at)) or 0}_{'.'.join(map(str, grid)) or 1}"
        for module, grid in (grid_by_module | attention).items()
        for at in product(*map(range, grid))
    ]
