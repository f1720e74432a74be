"""Files that ``prune`` may remove, by name, in their order. Pure.

``prune`` removes a checkpoint only if trainers and formats write every file in its folder, by these names, or if its
reader names it. Any other file belongs to the user, and the checkpoint stays.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from ckpt_tools.formats.dcp import names as dcp
from ckpt_tools.formats.deepspeed import names as deepspeed
from ckpt_tools.formats.megatron import names as megatron
from ckpt_tools.formats.orbax import names as orbax
from ckpt_tools.trainers.all import TRAINERS
from ckpt_tools.trainers.names import combine_patterns

_WEIGHT_FILES = (
    r"(?:model|pytorch_model|adapter_model|diffusion_pytorch_model|pytorch_lora_weights)(?:-\d{5}-of-\d{5})?"
    r"\.(?:safetensors|bin|pt)|(?:model|pytorch_model|adapter_model|diffusion_pytorch_model)\.(?:safetensors|bin)"
    r"\.index\.json"
)
_FOLDER_NAMES = (
    r"model|optim|optimizer|global_step\d+|mp_rank_\d+(?:_\d+){0,2}"
    r"|default|state|params|opt_state|d|ocdbt\.process_\d+|array_metadatas"
)
_UNIVERSAL_FILE = re.compile(
    r"(?:.+/)?zero/(?:optimizer_state|[^/]+/(?:fp32|exp_avg|exp_avg_sq|step|[a-z_]{1,40}))\.pt"
)

_ORBAX_ITEM_FILE = re.compile(r"[^/]+/(?:metadata|metrics|commit_success\.txt)")
"""An item of Orbax that holds JSON has a name of the user's choice."""

_FORMAT_FILES = (dcp.FILE_NAME_PATTERN, deepspeed.FILES, megatron.FILE_NAME_PATTERN, orbax.FILE_NAME_PATTERN)
_PARSED_FILES = (re.escape(name) for trainer in TRAINERS for name in trainer.entry_parsers)
_TRAINER_FILES = combine_patterns("own", "optimizer", "others").pattern
_FILE_NAME = re.compile("|".join((*_FORMAT_FILES, _WEIGHT_FILES, _TRAINER_FILES, *_PARSED_FILES)))
_FOLDER_NAME = re.compile(f"{_FOLDER_NAMES}|{combine_patterns('folders').pattern}")

_LAST_WRITTEN_NAMES = (
    *(deepspeed.LATEST, deepspeed.LATEST_UNIVERSAL, dcp.METADATA, megatron.CONFIG_FILE),
    *(orbax.CHECKPOINT_FILE, orbax.TREE_FILE, orbax.COMMIT_FILE, orbax.OCDBT_MANIFEST, "model_optim_rng.pt"),
)
_REMOVAL_STAGES = (
    re.compile(
        "|".join((*map(re.escape, _LAST_WRITTEN_NAMES), dcp.RANK_INDEX_NAME.pattern, combine_patterns("last").pattern))
    ),
    re.compile(r".*_model_states\.pt"),
    re.compile(r"(?:model|pytorch_model|adapter_model|shard)[-_.\w]*\.(?:safetensors|bin|pt)|.*\.safetensors"),
    re.compile(r".*", re.DOTALL),
)
"""Names of files by when they are removed: those written last, then the model, then all others."""


def is_known_file(path: str) -> bool:
    """Whether a trainer or a format writes a file of this path in the folder of a checkpoint."""
    if _UNIVERSAL_FILE.fullmatch(path) is not None:
        return True
    *folders, name = path.split("/")
    return _FILE_NAME.fullmatch(name) is not None and all(map(_FOLDER_NAME.fullmatch, folders))


def find_unknown_files(paths: Collection[str]) -> set[str]:
    """The files of a checkpoint that no trainer and no format writes."""
    is_orbax = orbax.CHECKPOINT_FILE in paths
    unknown_paths = (path for path in paths if not is_known_file(path))
    return {path for path in unknown_paths if not (is_orbax and _ORBAX_ITEM_FILE.fullmatch(path))}


def batch_for_removal(paths: Iterable[str]) -> list[list[str]]:
    """Files written last, then the model, then all others: without the first, the rest is not taken for whole."""
    batches: list[list[str]] = [[] for _ in _REMOVAL_STAGES]
    # Of an item of Orbax, _METADATA first.
    for path in sorted(paths, key=lambda path: (not path.endswith("/_METADATA"), path)):
        name = path.rpartition("/")[2]
        batches[next(stage for stage, form in enumerate(_REMOVAL_STAGES) if form.fullmatch(name))].append(path)
    return [batch for batch in batches if batch]
