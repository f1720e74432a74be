"""The default Vision Transformer. Inference builds it too: its tensor names are the contract between both."""

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

    Turns PyTorch's fused inference attention off for the process. It applies to plain parameters but not to ZeRO-3's
    partitioned ones, and rounds differently (logits differ by 7e-7): without it, a run and the file made from it give
    the same bits.
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
    """Patch embedding for grey images, initialised like torchvision's three-channel one."""
    patches = nn.Conv2d(1, HIDDEN_DIM, kernel_size=PATCH_SIZE, stride=PATCH_SIZE)
    nn.init.trunc_normal_(patches.weight, std=math.sqrt(1 / patches.weight[0].numel()))
    assert patches.bias is not None
    nn.init.zeros_(patches.bias)
    return patches
