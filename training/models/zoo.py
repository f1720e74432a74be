"""Models by name: their constructors and blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torchvision.models.efficientnet import MBConv
from torchvision.models.mobilenetv3 import InvertedResidual
from torchvision.models.resnet import BasicBlock
from torchvision.models.vision_transformer import EncoderBlock

from ckpt_tools.errors import FormatError

from ..config.model_names import HUGGING_FACE, VOCABULARY
from ..config.options import first_line
from . import image_models
from .experts import MixtureBlock, MixtureModel
from .language_model import Block, LanguageModel


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model whose constructor draws the weights from torch's global RNG. Each instance of a class in ``blocks`` is
    sharded and checkpointed separately. ``whole_first``: weights are drawn after all blocks are built, so no block can
    be sharded before."""

    build: Callable[[], nn.Module]
    blocks: tuple[type[nn.Module], ...]
    whole_first: bool = False

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """Blocks in the order of their calls, none within another."""
        return [module for module in model.modules() if isinstance(module, self.blocks)]


_BY_NAME: Mapping[str, ModelSpec] = {
    "vit": ModelSpec(image_models.build_model, (EncoderBlock,)),
    "cnn": ModelSpec(image_models.Cnn, (image_models.ConvBlock,)),
    "cnn-lstm": ModelSpec(image_models.CnnLstm, (image_models.ConvBlock,)),
    "ensemble": ModelSpec(image_models.Ensemble, (image_models.Cnn,)),
    # torchvision draws the convolutions of these again after all are built.
    "resnet18": ModelSpec(image_models.resnet18, (BasicBlock,), whole_first=True),
    "mobilenet_v3": ModelSpec(image_models.mobilenet_v3, (InvertedResidual,), whole_first=True),
    "efficientnet_b0": ModelSpec(image_models.efficientnet_b0, (MBConv,), whole_first=True),
    "vgg11_bn": ModelSpec(image_models.SmallVgg, (nn.Conv2d,), whole_first=True),
    "lm": ModelSpec(LanguageModel, (Block,)),
    "lm-moe": ModelSpec(MixtureModel, (Block, MixtureBlock)),
}


def spec_of(model: str) -> ModelSpec:
    """Model of ``--model``. Raises ``FormatError`` if its folder is not usable."""
    return _hugging_face(Path(model.removeprefix(HUGGING_FACE))) if model.startswith(HUGGING_FACE) else _BY_NAME[model]


def logits_of(output: Any) -> Tensor:
    """Logits in a model's output, which transformers wraps."""
    answer = output[0] if isinstance(output, tuple) else output
    return answer if isinstance(answer, Tensor) else answer.logits


def added_loss_of(output: Any) -> Tensor | None:
    """Auxiliary loss in a model's output, such as for balancing experts."""
    return output[1] if isinstance(output, tuple) else None


def _hugging_face(folder: Path) -> ModelSpec:
    """Causal language model of transformers from ``folder/config.json``; code in the folder is not run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
    except (OSError, ValueError, KeyError) as error:
        raise FormatError(f"{folder} has no config.json of a causal language model: {first_line(error)}") from error
    if config.vocab_size < VOCABULARY:
        raise FormatError(f"{folder}: vocab_size is {config.vocab_size}, and the text has {VOCABULARY} bytes")
    config.use_cache = False
    names = model_class._no_split_modules or []
    blocks = tuple(getattr(sys.modules[model_class.__module__], name) for name in names)
    return ModelSpec(lambda: model_class(config), blocks, whole_first=True)
