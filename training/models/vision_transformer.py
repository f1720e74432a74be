"""The Vision Transformer that every run trains and every consolidated file is loaded into.

Its fully qualified names (``conv_proj.weight``, ``encoder.layers.encoder_layer_0.ln_1.weight``, ...) are the contract
between a training run and the file made from its checkpoint, so inference builds the model from here as well; this
module imports nothing else of the package.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torchvision.models import VisionTransformer

from ..config.model_names import IMAGE_SIZE as IMAGE_SIZE
from ..config.model_names import NUM_CLASSES as NUM_CLASSES

PATCH_SIZE = 7
HIDDEN_DIM = 128


def build_model() -> VisionTransformer:
    """A ViT for one-channel 28x28 images, float32 [n, 1, 28, 28] to logits [n, 10]; weights from torch's global RNG.

    Turns PyTorch's fused inference attention off for the process. It is taken where a module's parameters are plain
    tensors and not where ZeRO-3 keeps them partitioned, and it rounds otherwise (logits differ by 7e-7): without it,
    a run and the file made from it give the same bits.
    """
    torch.backends.mha.set_fastpath_enabled(False)
    model = VisionTransformer(
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        num_layers=10,
        num_heads=2,
        hidden_dim=HIDDEN_DIM,
        mlp_dim=128,
        num_classes=NUM_CLASSES,
    )
    model.conv_proj = one_channel_patches()
    return model


def one_channel_patches() -> nn.Conv2d:
    """The patch embedding for grey images, initialised as torchvision initialises its three-channel one."""
    patches = nn.Conv2d(1, HIDDEN_DIM, kernel_size=PATCH_SIZE, stride=PATCH_SIZE)
    nn.init.trunc_normal_(patches.weight, std=math.sqrt(1 / patches.weight[0].numel()))
    assert patches.bias is not None
    nn.init.zeros_(patches.bias)
    return patches


def encoder_blocks(model: VisionTransformer) -> list[nn.Module]:
    """The encoder layers in order: the units FSDP2 shards one by one."""
    return list(model.encoder.layers)
