"""diffusers' training scripts (0.42, examples/): accelerate's ``save_state``, whose hook saves the model into a folder
of its own, such as ``unet``, ``transformer`` or ``controlnet``, and its moving average into ``unet_ema``.
"""

from __future__ import annotations

import re

from ckpt_tools.errors import UnsupportedError
from ckpt_tools.messages.wording import join_names
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.accelerate import OPTIMIZER, find_last_model_number
from ckpt_tools.trainers.halves import make_halves_of_files
from ckpt_tools.trainers.record import CheckpointHalves, Trainer

_AVERAGE_FOLDER = re.compile(r".*_ema|ema_.*")


def _find_halves(source: Source, format_name: str | None) -> CheckpointHalves | None:
    """Raises UnsupportedError if there are several models."""
    weight_files = [path for path in source.files if path.endswith(".safetensors")]
    has_model = any("/" not in path for path in weight_files) or find_last_model_number(source.files) is not None
    if OPTIMIZER not in source.files or has_model or format_name not in (None, "safetensors"):
        return None
    folders = sorted({path.partition("/")[0] for path in weight_files})
    models = [each for each in folders if _AVERAGE_FOLDER.fullmatch(each) is None]
    if len(models) > 1:
        raise UnsupportedError(
            f"there are several models ({join_names(models)}) of one optimizer; name the folder of one for its weights"
        )
    return make_halves_of_files(source, "", f"{models[0]}/", OPTIMIZER) if models else None


DIFFUSERS = Trainer(
    name="diffusers",
    folders=r"(?:unet|transformer|prior|controlnet|vqmodel)(?:_ema)?",
    find_halves=_find_halves,
)
