"""Models of grey 28x28 images. Inference builds them too: their tensor names are the contract between both.

torchvision imports torch's compiler, which takes seconds, so only the models that are torchvision's import it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config.model_names import IMAGE_SIZE, NUM_CLASSES

if TYPE_CHECKING:
    from torchvision.models import VisionTransformer

PATCH_SIZE = 7


def build_model(layers: int = 10, heads: int = 2, width: int = 128, hidden: int = 128) -> VisionTransformer:
    """A ViT for one-channel 28x28 images, float32 [n, 1, 28, 28] to logits [n, 10]; weights from torch's global RNG.
    ``hidden`` is the width of the feed-forward layers.

    Turns PyTorch's fused inference attention off for the process: it is not for ZeRO-3's partitioned parameters, and
    rounds differently, so a run and the file made from it would not give the same bits.
    """
    from torchvision.models import VisionTransformer

    torch.backends.mha.set_fastpath_enabled(False)
    model = VisionTransformer(
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        num_layers=layers,
        num_heads=heads,
        hidden_dim=width,
        mlp_dim=hidden,
        num_classes=NUM_CLASSES,
    )
    model.conv_proj = one_channel_patches(width)
    return model


def get_vit_block_class() -> type[nn.Module]:
    from torchvision.models.vision_transformer import EncoderBlock

    return EncoderBlock


def one_channel_patches(width: int) -> nn.Conv2d:
    """Patch embedding for grey images, initialised like torchvision's three-channel one."""
    patches = nn.Conv2d(1, width, kernel_size=PATCH_SIZE, stride=PATCH_SIZE)
    nn.init.trunc_normal_(patches.weight, std=math.sqrt(1 / patches.weight[0].numel()))
    assert patches.bias is not None
    nn.init.zeros_(patches.bias)
    return patches


def build_resnet18() -> nn.Module:
    from torchvision import models

    model = models.resnet18(num_classes=NUM_CLASSES)
    model.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model


def get_resnet_block_class() -> type[nn.Module]:
    from torchvision.models.resnet import BasicBlock

    return BasicBlock


class ConvBlock(nn.Sequential):
    """A convolution that halves the image."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__(nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


class Cnn(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(ConvBlock(1, width), ConvBlock(width, 2 * width))
        self.hidden = nn.Linear(2 * width * (IMAGE_SIZE // 4) ** 2, 64)
        self.classifier = nn.Linear(64, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(functional.relu(self.hidden(self.convolutions(images).flatten(1))))
