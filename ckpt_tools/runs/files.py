"""Files that ``prune`` may remove, by name, in their order. Pure.

``prune`` removes a checkpoint only if trainers and formats write every file in its folder, by these names, or if its
reader names it. Any other file belongs to the user, and the checkpoint stays.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cache

from ckpt_tools.formats.dcp import names as dcp
from ckpt_tools.formats.deepspeed import names as deepspeed
from ckpt_tools.formats.megatron import names as megatron
from ckpt_tools.formats.orbax import names as orbax
from ckpt_tools.trainers.all import TRAINERS
from ckpt_tools.trainers.names import pattern

_WEIGHTS = (
    r"(?:model|pytorch_model|adapter_model|diffusion_pytorch_model|pytorch_lora_weights)(?:-\d{5}-of-\d{5})?"
    r"\.(?:safetensors|bin|pt)|(?:model|pytorch_model|adapter_model|diffusion_pytorch_model)\.(?:safetensors|bin)"
    r"\.index\.json"
)
_FOLDERS = (
    r"model|optim|optimizer|global_step\d+|mp_rank_\d+(?:_\d+){0,2}"
    r"|default|state|params|opt_state|d|ocdbt\.process_\d+|array_metadatas"
)
_UNIVERSAL = re.compile(r"(?:.+/)?zero/(?:optimizer_state|[^/]+/(?:fp32|exp_avg|exp_avg_sq|step|[a-z_]{1,40}))\.pt")

_ITEM = re.compile(r"[^/]+/(?:metadata|metrics|commit_success\.txt)")
"""An item of Orbax that holds JSON has a name of the user's choice."""

_LAST = (
    deepspeed.LATEST,
    deepspeed.LATEST_UNIVERSAL,
    dcp.METADATA,
    megatron.CONFIG_FILE,
    orbax.CHECKPOINT,
    orbax.TREE,
    orbax.COMMITTED,
    orbax.MANIFEST,
)
_STATES = re.compile(r".*_model_states\.pt")
_MODEL = re.compile(r"(?:model|pytorch_model|adapter_model|shard)[-_.\w]*\.(?:safetensors|bin|pt)|.*\.safetensors")


@cache
def _forms() -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    read = (re.escape(name) for trainer in TRAINERS for name in trainer.reads)
    own = pattern("own", "optimizer", "others").pattern
    files = "|".join((dcp.FILES, deepspeed.FILES, _WEIGHTS, megatron.FILES, orbax.FILES, own, *read))
    last = "|".join((dcp.ALONE.pattern, r"model_optim_rng\.pt", *map(re.escape, _LAST)))
    return re.compile(files), _with(_FOLDERS, "folders"), _with(last, "last")


def _with(names: str, field: str) -> re.Pattern[str]:
    return re.compile(f"{names}|{pattern(field).pattern}")


def is_known(path: str) -> bool:
    """Whether a trainer or a format writes a file of this path in the folder of a checkpoint."""
    if _UNIVERSAL.fullmatch(path) is not None:
        return True
    *folders, name = path.split("/")
    files, inner, _ = _forms()
    return files.fullmatch(name) is not None and all(inner.fullmatch(each) is not None for each in folders)


def strangers(paths: Collection[str]) -> set[str]:
    """Those of a checkpoint's files that no trainer and no format writes."""
    others = {path for path in paths if not is_known(path)}
    return {path for path in others if not _ITEM.fullmatch(path)} if orbax.CHECKPOINT in paths else others


def in_order_of_removal(paths: Iterable[str]) -> list[list[str]]:
    """Files written last, then the model, then all others: without the first, the rest is not taken for whole."""
    stages = (_forms()[2], _STATES, _MODEL)
    batches: list[list[str]] = [[], [], [], []]
    # Of an item of Orbax, _METADATA first.
    for path in sorted(paths, key=lambda path: (not path.endswith("/_METADATA"), path)):
        name = path.rpartition("/")[2]
        batches[next((number for number, form in enumerate(stages) if form.fullmatch(name)), len(stages))].append(path)
    return [batch for batch in batches if batch]
