"""Which files of a checkpoint's folder trainers write, by name. Pure.

``prune`` removes a checkpoint only if every file in its folder is one of these, or one that its reader names. Whatever
else lies there is somebody's own, and the checkpoint stays.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from ckpt_tools.formats.deepspeed.names import ANY

_DCP = r"\.metadata(?:\.tmp)?|__\d+\.metadata|__\d+_\d+\.distcp"
_WEIGHTS = (
    r"(?:model|pytorch_model|adapter_model|diffusion_pytorch_model|pytorch_lora_weights)(?:-\d{5}-of-\d{5})?"
    r"\.(?:safetensors|bin|pt)|shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors|(?:model|pytorch_model|adapter_model|"
    r"diffusion_pytorch_model)\.(?:safetensors|bin)\.index\.json"
)
_TRAINER = (
    r"trainer_state\.json|training_args\.bin|(?:optimizer|scheduler|sampler|dl_state_dict)(?:_\d+)?\.(?:pt|bin)"
    r"|scaler(?:_\d+)?\.pt|rng_state(?:_\d+)?\.pth|(?:random_states|custom_checkpoint)_\d+\.pkl"
    r"|(?:pytorch_model_fsdp|optimizer)(?:_\d+)?(?:_rank\d+)?\.bin|meta\.pt"
)
_CONFIGS = (
    r"config\.json|generation_config\.json|adapter_config\.json|tokenizer\.(?:json|model)|tokenizer_config\.json"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.(?:json|txt)|merges\.txt|spiece\.model|chat_template\.(?:jinja|json)"
    r"|sentencepiece\.bpe\.model|(?:pre|video_pre)?processor_config\.json"
)
_RANKS = (
    r"(?:model|optim|extra_state)_world_size_\d+_rank_\d+\.pt|fsdp_config\.json|data\.pt|metadata\.pkl"
    r"|(?:model|optimizer|optim|lr_scheduler|train_state|dataloader|ema)_\d+\.(?:pt|safetensors)|rank\d+\.pt"
)
_MEGATRON = (
    r"metadata\.json|common\.pt|integrity\.json|(?:run_)?config\.yaml|modelopt_run_config\.yaml|(?:latest_)?train_state\.pt"
    r"|model_optim_rng\.pt|distrib_optim\.pt|consolidate\.sh|losses\.json"
)
_ORBAX = r"_CHECKPOINT_METADATA|_METADATA|_sharding|manifest\.ocdbt|commit_success\.txt|process_\d+|[0-9a-f]{32}"
_RAY = r"\.is_checkpoint|\.metadata\.json|\.tune_metadata"

_NAMES = re.compile("|".join((_DCP, ANY, _WEIGHTS, _TRAINER, _CONFIGS, _RANKS, _MEGATRON, _ORBAX, _RAY)))

_FOLDERS = re.compile(
    r"actor|critic|huggingface|tokenizer|processor|model|optim|optimizer|optimizer_\d+|pytorch_model|pytorch_model_\d+"
    r"|pytorch_model_fsdp_\d+|model_and_optim|train|dataloader|rng|checkpoint|global_step\d+|mp_rank_\d+(?:_\d+){0,2}"
    r"|default|state|params|opt_state|d|ocdbt\.process_\d+|array_metadatas|rank_?\d+|weights"
)
_UNIVERSAL = re.compile(r"(?:.+/)?zero/(?:optimizer_state|[^/]+/(?:fp32|exp_avg|exp_avg_sq|step|[a-z_]{1,40}))\.pt")

_ITEM = re.compile(r"[^/]+/(?:metadata|metrics|commit_success\.txt)")
"""An item of Orbax that holds JSON has a name of the user's choice."""

_MARKERS = re.compile(
    r"\.metadata|__\d+\.metadata|metadata\.json|metadata\.pkl|trainer_state\.json|_CHECKPOINT_METADATA|_METADATA"
    r"|commit_success\.txt|manifest\.ocdbt|random_states_\d+\.pkl|latest|latest_universal|meta\.pt"
    r"|model_world_size_\d+_rank_\d+\.pt|model_optim_rng\.pt"
)
_STATES = re.compile(r".*_model_states\.pt")
_MODEL = re.compile(r"(?:model|pytorch_model|adapter_model|shard)[-_.\w]*\.(?:safetensors|bin|pt)|.*\.safetensors")


def is_trainers(path: str) -> bool:
    """Whether trainers write a file of this path in the folder of a checkpoint."""
    *folders, name = path.split("/")
    if _UNIVERSAL.fullmatch(path) is not None:
        return True
    return _NAMES.fullmatch(name) is not None and all(_FOLDERS.fullmatch(each) is not None for each in folders)


def strangers(paths: Collection[str]) -> set[str]:
    """Those of a checkpoint's files that no trainer writes."""
    others = {path for path in paths if not is_trainers(path)}
    return {path for path in others if not _ITEM.fullmatch(path)} if "_CHECKPOINT_METADATA" in paths else others


def in_order_of_removal(paths: Iterable[str]) -> list[list[str]]:
    """The files without which nothing takes the rest for a whole checkpoint, then the model, then all others."""
    batches: list[list[str]] = [[], [], [], []]
    for path in sorted(paths):
        batches[_stage(path.rpartition("/")[2])].append(path)
    return [batch for batch in batches if batch]


def _stage(name: str) -> int:
    stages = (_MARKERS, _STATES, _MODEL)
    return next((number for number, form in enumerate(stages) if form.fullmatch(name)), len(stages))
