"""Models of grey 28x28 images: the default Vision Transformer, torchvision's convolutional networks and small ones.

Inference builds them too: their tensor names are the contract between both. The convolutional networks have no dropout
or stochastic depth, so a step depends on weights and samples only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision import models as torchvision_models
from torchvision.models import VisionTransformer

from ..config.model_names import IMAGE_SIZE, NUM_CLASSES

PATCH_SIZE = 7


def build_model(layers: int = 10, heads: int = 2, width: int = 128, hidden: int = 128) -> VisionTransformer:
    """A ViT for one-channel 28x28 images, float32 [n, 1, 28, 28] to logits [n, 10]; weights from torch's global RNG.
    ``hidden`` is the width of the feed-forward layers.

    Turns PyTorch's fused inference attention off for the process. It applies to plain parameters but not to ZeRO-3's
    partitioned ones, and rounds differently (logits differ by 7e-7): without it, a run and the file made from it give
    the same bits.
    """
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


def one_channel_patches(width: int) -> nn.Conv2d:
    """Patch embedding for grey images, initialised like torchvision's three-channel one."""
    patches = nn.Conv2d(1, width, kernel_size=PATCH_SIZE, stride=PATCH_SIZE)
    nn.init.trunc_normal_(patches.weight, std=math.sqrt(1 / patches.weight[0].numel()))
    assert patches.bias is not None
    nn.init.zeros_(patches.bias)
    return patches


VGG_IMAGE_SIZE = 32  # VGG halves the image five times: 28 pixels would end at 0


def resnet18() -> nn.Module:
    model = torchvision_models.resnet18(num_classes=NUM_CLASSES)
    model.conv1 = _first(model.conv1)
    return model


def mobilenet_v3() -> nn.Module:
    model = torchvision_models.mobilenet_v3_small(num_classes=NUM_CLASSES, dropout=0.0)
    model.features[0][0] = _first(model.features[0][0])
    return model


def efficientnet_b0() -> nn.Module:
    model = torchvision_models.efficientnet_b0(num_classes=NUM_CLASSES, dropout=0.0, stochastic_depth_prob=0.0)
    model.features[0][0] = _first(model.features[0][0])
    return model


def _first(layer: nn.Conv2d) -> nn.Conv2d:
    return nn.Conv2d(
        1,
        layer.out_channels,
        kernel_size=layer.kernel_size,  # type: ignore[arg-type]
        stride=layer.stride,  # type: ignore[arg-type]
        padding=layer.padding,  # type: ignore[arg-type]
        bias=layer.bias is not None,
    )


class SmallVgg(nn.Module):
    """torchvision's VGG11 with batch norm and one linear layer, 512 x 10, in place of three for 224x224."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torchvision_models.vgg11_bn(num_classes=1, init_weights=False).features
        self.features[0] = _first(self.features[0])
        self.classifier = nn.Linear(512, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        large = functional.interpolate(images, size=(VGG_IMAGE_SIZE, VGG_IMAGE_SIZE), mode="nearest")
        return self.classifier(self.features(large).flatten(1))


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


class CnnLstm(nn.Module):
    """Convolutions, and an LSTM over the rows of their output."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(ConvBlock(1, 16), ConvBlock(16, 32))
        self.lstm = nn.LSTM(32 * (IMAGE_SIZE // 4), 64, batch_first=True)
        self.classifier = nn.Linear(64, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.convolutions(images).permute(0, 2, 1, 3).flatten(2)
        _, (last, _) = self.lstm(rows)
        return self.classifier(last[-1])


class Ensemble(nn.Module):
    """Networks of different widths; their logits are averaged."""

    def __init__(self, widths: Sequence[int] = (16, 24)) -> None:
        super().__init__()
        self.members = nn.ModuleList(map(Cnn, widths))

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([member(images) for member in self.members]).mean(0)
