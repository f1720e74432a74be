"""LoRA by PEFT on ``hf:FOLDER``: the model's own weights are frozen, and the adapter beside them is trained.

A checkpoint has both, so a run resumes anywhere without the base model. Names are PEFT's: ``base_model.model.`` before
all, ``MODULE.base_layer`` where a module has an adapter.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from ckpt_tools.errors import UsageError

from ..config.references import first_line, parse_arguments
from ..config.train_config import TrainConfig

ARGUMENTS = (
    "r lora_alpha lora_dropout target_modules exclude_modules layers_to_transform layers_pattern rank_pattern "
    "alpha_pattern use_rslora init_lora_weights bias"
)
"""Arguments of ``LoraConfig`` with which the result is the base model plus ``scale B A``."""

INITIAL = (True, False, "gaussian")
"""Values of ``init_lora_weights`` that leave the base model as it is."""


def add_adapter(config: TrainConfig, module: nn.Module) -> nn.Module:
    """The model with a new adapter on it, if the run trains one. Raises ``UsageError`` if it does not fit."""
    arguments = parse_arguments(config.lora, "lora")
    if not arguments:
        return module
    if unknown := sorted(arguments.keys() - {*ARGUMENTS.split()}):
        raise UsageError(f"--lora {unknown[0]} is not taken; it is one of {', '.join(ARGUMENTS.split())}")
    if (initial := arguments.get("init_lora_weights", True)) not in INITIAL:
        raise UsageError(f"--lora init_lora_weights is true, false or gaussian, not {initial!r}")
    from peft import LoraConfig, get_peft_model

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT calls what transformers 6 will not have
            return get_peft_model(module, LoraConfig(task_type="CAUSAL_LM", **arguments))
    except (TypeError, ValueError) as error:
        raise UsageError(f"--lora: {first_line(error)}") from error


class BaseModel(nn.Module):
    """The base model in a model of PEFT, with its own names of tensors, and without the adapter."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base = model.get_base_model()

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        tensors = self.base.state_dict(*args, **options).items()
        return {name.replace(".base_layer.", "."): value for name, value in tensors if ".lora_" not in name}


def base_model_of(config: TrainConfig, model: nn.Module) -> nn.Module:
    """The model that ``--init-from`` has the weights of."""
    return BaseModel(model) if config.lora else model
