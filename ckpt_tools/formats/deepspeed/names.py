"""Names of DeepSpeed's files. Pure.

A save directory holds a folder for each tag, and ``latest`` names one of them (deepspeed/runtime/engine.py
``_get_ckpt_name``, ``_get_rank_zero_ckpt_name``, ``_get_expert_ckpt_name``, ``_get_optimizer_ckpt_name``). The tag
folder of a universal checkpoint holds ``zero/<fqn>/<slot>.pt`` for each parameter, ``zero/optimizer_state.pt`` and the
model's files; ``latest_universal`` names it (deepspeed/checkpoint/ds_to_universal.py). ``deepspeed.moe`` names an
expert's tensors ``block.deepspeed_moe.experts.deepspeed_experts.3.up.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpt_tools.core.wording import natural_sort_key
from ckpt_tools.errors import UnsupportedError

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"

SCRIPTS = frozenset({"zero_to_fp32.py", "zero_to_torch.py"})
"""Written beside ``latest``, engine.py ``_copy_recovery_script``."""

MODEL = re.compile(r"mp_rank_(?P<mp>\d{1,9})_model_states\.pt")
RANK_MODEL = re.compile(r"zero_pp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_model_states\.pt")
OPTIM = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_?optim_states\.pt")
"""The engine still reads names without the last underscore, ``_get_all_zero_checkpoint_names``."""
LAYER = re.compile(r"layer_(?P<layer>\d{1,9})(?P<cut>-model_(?P<tp>\d{1,9}))?-model_states\.pt")
EXPERT = re.compile(r"layer_(?P<layer>\d{1,9})_expert_(?P<expert>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_model_states\.pt")
EXPERT_OPTIM = re.compile(r"expp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_optim_states\.pt")

MODELS = (MODEL, RANK_MODEL)
_NATIVE = (*MODELS, OPTIM, LAYER, EXPERT, EXPERT_OPTIM)

FILES = (
    r"(?:zero_pp_rank_\d+_)?mp_rank_\d+(?:_\d+)?_model_states\.pt|layer_[\w-]+[-_]model_states\.pt"
    r"|(?:bf16_|fp16_)?(?:zero_pp|expp)_rank_\d+_mp_rank_\d+_?optim_states\.pt"
    r"|latest|latest_universal|zero_to_(?:fp32|torch)\.py"
)
"""A pattern of the names that any version gives to files in a tag or beside the tags."""


OTHER_EXPERTS = re.compile(r"(layer_\d+_)?expert_.*|expp_rank_.*")
OTHER_LAYERS = re.compile(r"layer_\d+[-_].*")
OFFLOADED = re.compile(r"offloaded_tensors/.*")

MASTER_FILE = "fp32"
"""The slot of a parameter's fp32 master in a universal checkpoint, which every parameter has."""
OPTIMIZER_STATE = "zero/optimizer_state.pt"

_STATE = re.compile(r"(?:(?P<folder>.+?)/)??zero/(?P<fqn>.+)/(?P<slot>[^/]+)\.pt", re.DOTALL)
_UNIVERSAL = re.compile(r"(?P<folder>.*?)/?zero/.+/fp32\.pt")


def model_name(mp: int = 0) -> str:
    """The model's file of stages 0, 1 and 2."""
    return f"mp_rank_{mp:02d}_model_states.pt"


def rank_model_name(rank: int, mp: int = 0) -> str:
    """The model's file of a rank in stage 3."""
    return f"zero_pp_rank_{rank}_{model_name(mp)}"


def optim_name(rank: int, mp: int = 0) -> str:
    """The optimizer's file of a rank; bf16 runs have ``bf16_`` in front."""
    return f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"


def layer_name(layer: int, cut: str = "") -> str:
    """The file of a pipeline's layer; ``cut`` is ``-model_01`` for tensor-parallel rank 1."""
    return f"layer_{layer:02d}{cut}-model_states.pt"


def expert_name(layer: int, expert: int) -> str:
    """The file of an expert, by the number of its layer among those with experts."""
    return f"layer_{layer}_expert_{expert}_{model_name()}"


def expert_optim_name(rank: int) -> str:
    """The optimizer's file of an expert-parallel rank, without ZeRO."""
    return f"expp_rank_{rank}_mp_rank_00_optim_states.pt"


def of_rank(name: str, rank: int) -> str:
    """The name that a file of the same kind has on ``rank``."""
    return re.sub(r"(zero_pp|expp)_rank_\d+", rf"\1_rank_{rank}", name)


def is_native(name: str) -> bool:
    """Whether a current version gives this name to a file of a tag folder."""
    return any(pattern.fullmatch(name) for pattern in _NATIVE)


def is_deepspeeds(path: str) -> bool:
    """Whether any version gives this name to a file of a tag, or to one beside the tags."""
    return re.fullmatch(FILES, path.rpartition("/")[2]) is not None


def is_model(name: str) -> bool:
    return any(form.fullmatch(name) for form in MODELS)


def numbers(names: Iterable[str], *forms: re.Pattern[str]) -> set[tuple[int, int]]:
    """The rank and the model-parallel rank of each of ``names`` that has one of ``forms``."""
    matches = (match for name in names for form in forms if (match := form.fullmatch(name)))
    return {(int(match.groupdict().get("rank") or 0), int(match["mp"])) for match in matches}


def tag_folders(paths: Iterable[str]) -> list[str]:
    """The folders that hold native files, in the order of their names; ``""`` is the source itself."""
    native, universal = set(), set()
    for path in paths:
        folder, _, name = path.rpartition("/")
        if is_native(name):
            native.add(folder)
        elif path.endswith("/fp32.pt") and (match := _UNIVERSAL.fullmatch(path)):
            universal.add(match["folder"])
    return sorted(native - universal, key=natural_sort_key)


def slot_file(path: str) -> re.Match[str] | None:
    """The ``folder``, ``fqn`` and ``slot`` of a parameter's file in a universal checkpoint."""
    # Where no slot follows, the pattern would try every way to cut the path first.
    return _STATE.fullmatch(path) if path.endswith(".pt") and not path.endswith("/.pt") else None


def universal_folders(paths: Iterable[str]) -> list[str]:
    """The folders that hold universal checkpoints, in the order of their names; ``""`` is the source itself."""
    found = {match["folder"] or "" for path in paths if (match := slot_file(path)) and match["slot"] == MASTER_FILE}
    return sorted(found, key=natural_sort_key)


def is_universal(paths: Iterable[str]) -> bool:
    """Whether there are universal checkpoints and no native ones.

    ``ds_to_universal`` writes beside the checkpoint that it converts; the folder is then a native one.
    """
    paths = list(paths)
    folders = set(universal_folders(paths))
    beside = [name for folder, _, name in (path.rpartition("/") for path in paths) if folder not in folders]
    return bool(folders) and not any(is_model(name) or name.endswith("optim_states.pt") for name in beside)


def place(folder: str) -> str:
    """The tag folder, for messages."""
    return f"the tag {folder!r}" if folder else "the folder"


def refuse(names: Iterable[str], folder: str, kinds: dict[re.Pattern[str], str]) -> None:
    """Raises UnsupportedError where a file of the tag ``folder`` is of one of ``kinds``, which are not read."""
    for name in names:
        for pattern, what in kinds.items():
            if pattern.fullmatch(name):
                raise UnsupportedError(f"{place(folder)} holds {what} ({name}), which are not supported")


INFIX = ".deepspeed_moe.experts.deepspeed_experts."
_NAME = re.compile(rf"(?P<prefix>.+{re.escape(INFIX)})(?P<number>\d{{1,9}})\.(?P<rest>.+)", re.DOTALL)


def split_expert(name: str) -> tuple[str, int, str] | None:
    """The name of an expert's tensor as that of its layer's experts, its number and the rest; None for any other."""
    match = _NAME.fullmatch(name)
    return (match["prefix"], int(match["number"]), match["rest"]) if match else None
