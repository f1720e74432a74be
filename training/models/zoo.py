"""Models by name, of a transformers configuration, or from a function of the user's.

LoRA by PEFT is for ``hf:FOLDER``: the model's own weights are frozen, and the adapter beside them is trained. A
checkpoint has both, so a run resumes anywhere without the base model. Names are PEFT's: ``base_model.model.`` before
all, ``MODULE.base_layer`` where a module has an adapter.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ckpt_tools.errors import FormatError, UsageError

from ..config.model_names import folder_of, read_config
from ..config.references import Reference, call_function, first_line, is_function, parse_arguments, text_of
from ..config.train_config import TrainConfig
from . import image_models
from .experts import MixtureModel
from .language_model import LanguageModel, TransformerBlock
from .losses import standard_loss

Loss = Callable[[Callable[..., Any], Any], Tensor]
"""Loss of a batch, 0-d, from the model and the batch."""

ParameterGroups = Sequence[Mapping[str, Any]]
"""Parameter groups as torch's optimizers take them, with names for ``params``."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainableModel:
    """A model, its blocks in the order of their calls, none within another, its loss and its parameter groups. Each
    block is sharded and checkpointed separately."""

    module: nn.Module
    blocks: Sequence[nn.Module] = ()
    loss: Loss = standard_loss
    groups: ParameterGroups = ()

    def list_parameter_groups(self) -> list[Mapping[str, Any]]:
        """Groups of the parameters that are trained."""
        known = dict(self.module.named_parameters())
        if self.groups:
            return [{**group, "params": [known[name] for name in group["params"]]} for group in self.groups]
        return [{"params": [one for one in known.values() if one.requires_grad]}]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """``make`` draws the weights from torch's global RNG. Instances of the classes in ``early`` have their weights when
    their constructor ends, so they can be sharded before the others are made."""

    make: Callable[[], TrainableModel]
    early: tuple[type[nn.Module], ...] = ()


_BY_NAME: Mapping[str, tuple[Callable[..., nn.Module], Callable[[], type[nn.Module]]]] = {
    "vit": (image_models.build_model, image_models.get_vit_block_class),
    "cnn": (image_models.Cnn, lambda: image_models.ConvBlock),
    "resnet18": (image_models.build_resnet18, image_models.get_resnet_block_class),
    "lm": (LanguageModel, lambda: TransformerBlock),
    "lm-moe": (MixtureModel, lambda: TransformerBlock),
}
"""Each model of this package, and the class of its blocks."""

WHOLE_FIRST = ("resnet18",)  # torchvision draws its convolutions again after all are built


def build_own_model(name: str, **sizes: Any) -> nn.Module:
    """A model of this package. Raises ``UsageError`` if it has no such sizes."""
    try:
        return _BY_NAME[name][0](**sizes)
    except (TypeError, ValueError, AssertionError, RuntimeError, ZeroDivisionError) as error:
        arguments = ", ".join(f"{key}={value}" for key, value in sizes.items())
        raise UsageError(f"the model {name} cannot be built with {arguments}: {first_line(error)}") from error


def make_spec(config: TrainConfig) -> ModelSpec:
    """Model of ``--model``. Raises ``FormatError`` if its folder is not usable, ``UsageError`` if its function cannot
    be imported."""
    if is_function(config.model):
        return ModelSpec(partial(_build_users_model, config.model, config.model_arguments))
    if (folder := folder_of(config.model)) is not None:
        return _make_hugging_face_spec(config, folder)
    build, block = _BY_NAME[name := text_of(config.model)]
    blocks = (block(),)
    return _make_spec_of_blocks(partial(build, **config.model_arguments), blocks, () if name in WHOLE_FIRST else blocks)


def _make_spec_of_blocks(
    build: Callable[[], nn.Module], blocks: tuple[type[nn.Module], ...], early: tuple[type[nn.Module], ...] = ()
) -> ModelSpec:
    def make() -> TrainableModel:
        module = build()
        return TrainableModel(module, [each for each in module.modules() if isinstance(each, blocks)])

    return ModelSpec(make, early)


def _build_users_model(reference: Reference, arguments: Mapping[str, Any]) -> TrainableModel:
    """Model from the module, or the dictionary with it as ``model``, that the function returns."""
    returned, name = call_function(reference, "model", **arguments), text_of(reference)
    parts = dict(returned) if isinstance(returned, Mapping) else {"model": returned}
    module = parts.pop("model", None)
    if unknown := sorted(parts.keys() - {"blocks", "loss", "groups"}):
        raise UsageError(f"--model {name}: {unknown[0]!r} is not one of model, blocks, loss and groups")
    if not isinstance(module, nn.Module):
        raise UsageError(f"--model {name} gives {type(module).__name__}, and a torch.nn.Module is needed")
    blocks = tuple(parts.pop("blocks", ()))
    inside = {*module.modules()} - {module}
    if wrong := next((each for each in blocks if each not in inside), None):
        raise UsageError(f"--model {name}: a block, {type(wrong).__name__}, is not a module of the model")
    loss, groups = parts.get("loss") or standard_loss, parts.get("groups")
    if not callable(loss):
        raise UsageError(f"--model {name}: loss is {type(loss).__name__}, and a function of model and batch is needed")
    return TrainableModel(module, blocks, loss, () if groups is None else _name_groups(groups, module, name))


def _name_groups(groups: Any, module: nn.Module, name: str) -> ParameterGroups:
    """The user's groups, or those that a function makes of the module, by names: they are made once, because sharding
    replaces the parameters, and in ZeRO-3 their shapes."""
    unnamed = list(call_function(groups, "model", module) if callable(groups) else groups)
    if not unnamed or not all(isinstance(group, Mapping) and "params" in group for group in unnamed):
        raise UsageError(f"--model {name}: groups are dictionaries with params, as torch.optim takes them")
    names = {each: key for key, each in module.named_parameters()}
    named = [{**group, "params": [names.get(each) for each in group["params"]]} for group in unnamed]
    inside = {each for group in named for each in group["params"]}
    if None in inside:
        raise UsageError(f"--model {name}: groups have a parameter that the model does not have")
    if left := [key for each, key in names.items() if each.requires_grad and key not in inside]:
        raise UsageError(f"--model {name}: {left[0]} is in no group; freeze it (requires_grad) or add it to one")
    return named


def _make_hugging_face_spec(config: TrainConfig, folder: Path) -> ModelSpec:
    """Causal language model of transformers from ``folder/config.json``, with the adapter of ``--lora``."""
    from transformers import AutoModelForCausalLM

    described = read_config(folder)
    try:
        model_class = AutoModelForCausalLM._model_mapping[type(described)]
    except KeyError as error:
        raise FormatError(f"{folder} has no config.json of a causal language model: {first_line(error)}") from error
    if config.model_arg:
        raise UsageError(f"--model-arg is not for {text_of(config.model)}, whose sizes are in its config.json")
    described.use_cache = False
    names = model_class._no_split_modules or []
    blocks = tuple(getattr(sys.modules[model_class.__module__], name) for name in names)
    return _make_spec_of_blocks(lambda: add_adapter(config, model_class(described)), blocks)


LORA_ARGUMENTS = (
    "r lora_alpha lora_dropout target_modules exclude_modules layers_to_transform layers_pattern rank_pattern "
    "alpha_pattern use_rslora init_lora_weights bias"
)
"""Arguments of ``LoraConfig`` with which the result is the base model plus ``scale B A``."""

INITIAL_LORA_WEIGHTS = (True, False, "gaussian")
"""Values of ``init_lora_weights`` that leave the base model as it is."""


def add_adapter(config: TrainConfig, module: nn.Module) -> nn.Module:
    """The model with a new adapter on it, if the run trains one. Raises ``UsageError`` if it does not fit."""
    arguments = parse_arguments(config.lora, "lora")
    if not arguments:
        return module
    if unknown := sorted(arguments.keys() - {*LORA_ARGUMENTS.split()}):
        raise UsageError(f"--lora {unknown[0]} is not taken; it is one of {', '.join(LORA_ARGUMENTS.split())}")
    if (initial := arguments.get("init_lora_weights", True)) not in INITIAL_LORA_WEIGHTS:
        raise UsageError(f"--lora init_lora_weights is true, false or gaussian, not {initial!r}")
    from peft import LoraConfig, get_peft_model

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT calls what transformers 6 will not have
            return get_peft_model(module, LoraConfig(task_type="CAUSAL_LM", **arguments))
    except (TypeError, ValueError) as error:
        raise UsageError(f"--lora: {first_line(error)}") from error


class PeftBaseModel(nn.Module):
    """The base model in a model of PEFT, with its own names of tensors, and without the adapter."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base = model.get_base_model()

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        tensors = self.base.state_dict(*args, **options).items()
        return {name.replace(".base_layer.", "."): value for name, value in tensors if ".lora_" not in name}


def unwrap_base_model(config: TrainConfig, model: nn.Module) -> nn.Module:
    """The model that ``--init-from`` has the weights of."""
    return PeftBaseModel(model) if config.lora else model
