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
from typing import TYPE_CHECKING

from ckpt_tools.errors import UnsupportedError
from ckpt_tools.messages.wording import natural_sort_key

if TYPE_CHECKING:
    from ckpt_tools.stores.source import Source

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"

RECOVERY_SCRIPTS = frozenset({"zero_to_fp32.py", "zero_to_torch.py"})
"""Written beside ``latest``, engine.py ``_copy_recovery_script``."""

MODEL_FILE = re.compile(r"mp_rank_(?P<mp>\d{1,9})_model_states\.pt")
RANK_MODEL_FILE = re.compile(r"zero_pp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_model_states\.pt")
OPTIM_FILE = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_?optim_states\.pt")
"""The engine still reads names without the last underscore, ``_get_all_zero_checkpoint_names``."""
LAYER_FILE = re.compile(r"layer_(?P<layer>\d{1,9})(?P<cut>-model_(?P<tp>\d{1,9}))?-model_states\.pt")
EXPERT_FILE = re.compile(
    r"layer_(?P<layer>\d{1,9})_expert_(?P<expert>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_model_states\.pt"
)
EXPERT_OPTIM_FILE = re.compile(r"expp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_optim_states\.pt")

MODEL_FILES = (MODEL_FILE, RANK_MODEL_FILE)
_NATIVE_FILES = (*MODEL_FILES, OPTIM_FILE, LAYER_FILE, EXPERT_FILE, EXPERT_OPTIM_FILE)

FILES = (
    r"(?:zero_pp_rank_\d+_)?mp_rank_\d+(?:_\d+)?_model_states\.pt|layer_[\w-]+[-_]model_states\.pt"
    r"|(?:bf16_|fp16_)?(?:zero_pp|expp)_rank_\d+_mp_rank_\d+_?optim_states\.pt"
    r"|latest|latest_universal|zero_to_(?:fp32|torch)\.py"
)
"""A pattern of the names that any version gives to files in a tag or beside the tags."""

UNSUPPORTED_EXPERT_FILES = re.compile(r"(layer_\d+_)?expert_.*|expp_rank_.*")
UNSUPPORTED_LAYER_FILES = re.compile(r"layer_\d+[-_].*")
OFFLOADED_FILES = re.compile(r"offloaded_tensors/.*")

UNIVERSAL_MASTER_SLOT = "fp32"
"""The slot of a parameter's fp32 master in a universal checkpoint, which every parameter has."""
OPTIMIZER_STATE_FILE = "zero/optimizer_state.pt"

_SLOT_FILE = re.compile(r"(?:(?P<folder>.+?)/)??zero/(?P<fqn>.+)/(?P<slot>[^/]+)\.pt", re.DOTALL)
_UNIVERSAL_MASTER_PATH = re.compile(r"(?P<folder>.*?)/?zero/.+/fp32\.pt")


def model_file_name(mp: int = 0) -> str:
    """The model's file of stages 0, 1 and 2."""
    return f"mp_rank_{mp:02d}_model_states.pt"


def rank_model_file_name(rank: int, mp: int = 0) -> str:
    """The model's file of a rank in stage 3."""
    return f"zero_pp_rank_{rank}_{model_file_name(mp)}"


def optim_file_name(rank: int, mp: int = 0) -> str:
    """The optimizer's file of a rank; bf16 runs have ``bf16_`` in front."""
    return f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"


def layer_file_name(layer: int, tp_suffix: str = "") -> str:
    """The file of a pipeline's layer; ``tp_suffix`` is ``-model_01`` for tensor-parallel rank 1."""
    return f"layer_{layer:02d}{tp_suffix}-model_states.pt"


def expert_file_name(layer: int, expert: int) -> str:
    """The file of an expert, by the number of its layer among those with experts."""
    return f"layer_{layer}_expert_{expert}_{model_file_name()}"


def expert_optim_file_name(rank: int) -> str:
    """The optimizer's file of an expert-parallel rank, without ZeRO."""
    return f"expp_rank_{rank}_mp_rank_00_optim_states.pt"


def replace_rank(name: str, rank: int) -> str:
    """The name that a file of the same kind has on ``rank``."""
    return re.sub(r"(zero_pp|expp)_rank_\d+", rf"\1_rank_{rank}", name)


def is_native_file_name(name: str) -> bool:
    """Whether a current version gives this name to a file of a tag folder."""
    return any(pattern.fullmatch(name) for pattern in _NATIVE_FILES)


def is_deepspeed_file_name(path: str) -> bool:
    """Whether any version gives this name to a file of a tag, or to one beside the tags."""
    return re.fullmatch(FILES, path.rpartition("/")[2]) is not None


def is_model_file_name(name: str) -> bool:
    return any(form.fullmatch(name) for form in MODEL_FILES)


def parse_rank_pairs(names: Iterable[str], *patterns: re.Pattern[str]) -> set[tuple[int, int]]:
    """The rank and the model-parallel rank in each of ``names`` that matches one of ``patterns``; a rank that is not in
    the name is 0."""
    matches = (match for name in names for form in patterns if (match := form.fullmatch(name)))
    return {(int(match.groupdict().get("rank") or 0), int(match["mp"])) for match in matches}


def find_tag_folders(paths: Iterable[str]) -> list[str]:
    """The folders that hold native files, in the order of their names; ``""`` is the source itself."""
    native_folders, universal_folders = set(), set()
    for path in paths:
        folder, _, name = path.rpartition("/")
        if is_native_file_name(name):
            native_folders.add(folder)
        elif path.endswith("/fp32.pt") and (match := _UNIVERSAL_MASTER_PATH.fullmatch(path)):
            universal_folders.add(match["folder"])
    return sorted(native_folders - universal_folders, key=natural_sort_key)


def match_slot_file(path: str) -> re.Match[str] | None:
    """The ``folder``, ``fqn`` and ``slot`` of a parameter's file in a universal checkpoint."""
    # Where no slot follows, the pattern would try every way to cut the path first.
    return _SLOT_FILE.fullmatch(path) if path.endswith(".pt") and not path.endswith("/.pt") else None


def find_universal_folders(paths: Iterable[str]) -> list[str]:
    """The folders that hold universal checkpoints, in the order of their names; ``""`` is the source itself."""
    matches = filter(None, map(match_slot_file, paths))
    folders = {match["folder"] or "" for match in matches if match["slot"] == UNIVERSAL_MASTER_SLOT}
    return sorted(folders, key=natural_sort_key)


def detect_native(source: Source) -> bool:
    return bool(find_tag_folders(source.files))


def detect_universal(source: Source) -> bool:
    """Whether there are universal checkpoints and no native ones.

    ``ds_to_universal`` writes beside the checkpoint that it converts; the folder is then a native one.
    """
    folders = set(find_universal_folders(source.files))
    split_paths = (path.rpartition("/") for path in source.files)
    outside = [name for folder, _, name in split_paths if folder not in folders]
    return bool(folders) and not any(is_model_file_name(name) or name.endswith("optim_states.pt") for name in outside)


def describe_folder(folder: str) -> str:
    """The tag folder, for messages."""
    return f"the tag {folder!r}" if folder else "the folder"


def refuse_files(names: Iterable[str], folder: str, refused_kinds: dict[re.Pattern[str], str]) -> None:
    """Raises UnsupportedError if one of ``names`` in the tag ``folder`` matches a pattern of ``refused_kinds``, which
    has a description of each."""
    for name in names:
        for pattern, description in refused_kinds.items():
            if pattern.fullmatch(name):
                text = f"{describe_folder(folder)} holds {description} ({name})"
                raise UnsupportedError(f"{text}, which are not supported")


MAX_EXPERTS = 1 << 20
"""Most experts of one layer, so that a number of a damaged file does not make a list of that length."""

EXPERT_INFIX = ".deepspeed_moe.experts.deepspeed_experts."
_EXPERT_TENSOR_NAME = re.compile(
    rf"(?P<prefix>.+{re.escape(EXPERT_INFIX)})(?P<number>\d{{1,9}})\.(?P<rest>.+)", re.DOTALL
)


def split_expert_name(name: str) -> tuple[str, int, str] | None:
    """The name of an expert's tensor as that of its layer's experts, its number and the rest; None for any other."""
    match = _EXPERT_TENSOR_NAME.fullmatch(name)
    return (match["prefix"], int(match["number"]), match["rest"]) if match else None
