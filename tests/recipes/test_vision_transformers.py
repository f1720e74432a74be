"""Vision Transformers of timm, torchvision and transformers hold each other's weights and give the same logits.

The judges are the three libraries: each loads strictly what was converted, from tiny models with the same sizes, layer
norm eps 1e-6 and exact GELU. timm and transformers compute alike, to the last bit. torchvision multiplies in another
order, and is compared with ``BOUND``; torch's fused inference attention is off, as in our training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torchvision.models import VisionTransformer
from transformers import ViTConfig, ViTForImageClassification, ViTModel

import ckpt_tools
from ckpt_tools.errors import CkptError

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.extended]

IMAGE, HEADS, HIDDEN, MLP, CLASSES = 16, 2, 24, 40, 5
BOUND = 1e-6
"""Of torchvision's logits, as a part of the largest: 2e-7 at the size of ViT-B/16, mostly 0 in these tiny models."""

TINY = "a tiny Vision Transformer"


@pytest.fixture(autouse=True)
def no_fused_attention():
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


# The three libraries


def config(**changed: Any) -> ViTConfig:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": HEADS, "hidden_size": HIDDEN}
    sizes |= {"image_size": IMAGE, "patch_size": 4, "intermediate_size": MLP, "num_labels": CLASSES}
    return ViTConfig(**{"layer_norm_eps": 1e-6, **sizes, **changed})


def of_timm(**changed: Any) -> nn.Module:
    sizes: dict[str, Any] = {"depth": 2, "num_heads": HEADS, "embed_dim": HIDDEN, "mlp_ratio": MLP / HIDDEN}
    return timm.models.VisionTransformer(
        **{"img_size": IMAGE, "patch_size": 4, "num_classes": CLASSES, **sizes, **changed}
    )


def of_torchvision(**changed: Any) -> nn.Module:
    sizes: dict[str, Any] = {"num_layers": 2, "num_heads": HEADS, "hidden_dim": HIDDEN, "mlp_dim": MLP}
    return VisionTransformer(**{"image_size": IMAGE, "patch_size": 4, "num_classes": CLASSES, **sizes, **changed})


BUILD: dict[str, Callable[..., nn.Module]] = {
    "timm": of_timm,
    "torchvision": of_torchvision,
    "hub": lambda **changed: ViTForImageClassification(config(**changed)),
}


def randomized(model: nn.Module, seed: int = 1) -> nn.Module:
    """The model with each parameter drawn anew: a library starts many at 0 or 1, where a wrong map shows nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def logits(model: nn.Module) -> Tensor:
    images = torch.randn(3, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        out = model.eval()(images)
    return out if isinstance(out, Tensor) else out.logits


# Six directions


@dataclass(frozen=True, slots=True)
class Direction:
    source: str
    target: str
    recipe: str
    is_inverse: bool

    def __str__(self) -> str:
        return f"{self.source}-{self.target}"

    @property
    def judges(self) -> list[str]:
        return ["transformers" if each == "hub" else each for each in (self.source, self.target)]


RECIPES = {
    "vit_timm": ("timm", "hub"),
    "vit_torchvision": ("torchvision", "hub"),
    "vit_timm_torchvision": ("timm", "torchvision"),
}
DIRECTIONS = [
    way
    for recipe, (left, right) in RECIPES.items()
    for way in (Direction(left, right, recipe, False), Direction(right, left, recipe, True))
]


def saved(library: str, model: nn.Module, folder: Path, ending: str = ".pt") -> Path:
    """The checkpoint as its library's users have it: a folder of the hub, or a file of the state dict."""
    folder.mkdir()
    if library == "hub":
        model.save_pretrained(folder)
        return folder
    path = folder / f"model{ending}"
    state = model.state_dict()
    save_file(state, path) if ending == ".safetensors" else torch.save(state, path)
    return path


def convert(source: Path, out: Path, way: Direction, **options: Any) -> ckpt_tools.ConvertReport:
    return ckpt_tools.convert(source, out, recipe=way.recipe, inverse=way.is_inverse, **options)


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
@pytest.mark.parametrize("way", DIRECTIONS, ids=str)
def test_the_other_library_gives_the_same_logits(way, ending, card, tmp_path):
    model = randomized(BUILD[way.source]())
    source = saved(way.source, model, tmp_path / "source", ending)
    if way.target == "hub":
        config().save_pretrained(tmp_path / "config")
        convert(source, tmp_path / "out", way, to="safetensors", config=tmp_path / "config")
        found, info = ViTForImageClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(info.values()), info
    else:
        convert(source, tmp_path / f"out{ending}", way)
        state = torch.load(tmp_path / "out.pt") if ending == ".pt" else load_file(tmp_path / "out.safetensors")
        found = BUILD[way.target]()
        found.load_state_dict(state)
    wanted = logits(model)
    bound = BOUND if "torchvision" in str(way) else 0
    assert (logits(found) - wanted).abs().max() <= bound * wanted.abs().max()
    card(way.recipe, way.judges, TINY, "logits", bound=bound, way="inverse" if way.is_inverse else "forward")


# The optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(4, 3, IMAGE, IMAGE, generator=generator)
    labels = torch.randint(CLASSES, (4,), generator=generator)
    loss = nn.functional.cross_entropy(model.train()(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("way", [way for way in DIRECTIONS if "hub" not in str(way)], ids=str)
def test_training_continues_in_the_other_library(way, card, tmp_path):
    model = randomized(BUILD[way.source]())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        step(model, optimizer)
    tree = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(tree, checkpoint_id=tmp_path / "source", no_dist=True)
    convert(tmp_path / "source", tmp_path / "out", way, to="dcp")
    other = BUILD[way.target]()
    others_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    step(other, others_optimizer)
    weights, state = get_state_dict(other, others_optimizer)
    tree = {"model": weights, "optim": state}
    dcp.load(tree, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(other, others_optimizer, model_state_dict=weights, optim_state_dict=state)
    losses = [step(model, optimizer) for _ in range(3)]
    assert len(set(losses)) == 3, "losses that do not move show nothing"
    assert [step(other, others_optimizer) for _ in range(3)] == pytest.approx(losses, rel=BOUND)
    told = TINY, "the next losses"
    card(way.recipe, way.judges, *told, bound=BOUND, way="inverse" if way.is_inverse else "forward", optimizer=True)


# What is refused

REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, str]] = {
    "another image size": ("vit_timm", {}, {"image_size": 32}, "pos_embed"),
    "another width": ("vit_timm", {}, {"hidden_size": 32}, "cls_token"),
    "register tokens": ("vit_timm", {"reg_tokens": 4}, None, "reg_token"),
    "layer scale": ("vit_timm", {"init_values": 1e-5}, None, "blocks.0.ls1.gamma"),
    "the norm of an average": ("vit_timm", {"global_pool": "avg"}, None, "fc_norm"),
    "a representation layer": ("vit_torchvision", {"representation_size": 7}, None, "heads.pre_logits"),
}
"""The recipe, changes of the model and those of a config.json, and what the sentence names."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_other_library_or_config_json_does_not_have_is_refused(case, tmp_path):
    recipe, changed, configured, name = REFUSED[case]
    library = "torchvision" if recipe == "vit_torchvision" else "timm"
    source, out = saved(library, BUILD[library](**changed), tmp_path / "source"), tmp_path / "out.safetensors"
    options: dict[str, Any] = {}
    if configured is not None:
        config(**configured).save_pretrained(tmp_path / "config")
        out, options = tmp_path / "out", {"to": "safetensors", "config": tmp_path / "config"}
    with pytest.raises(CkptError) as caught:
        ckpt_tools.convert(source, out, recipe=recipe, **options)
    assert not out.exists()
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_the_hubs_pooler_is_dropped_and_named(tmp_path):
    model = randomized(ViTModel(config()))
    model.save_pretrained(tmp_path / "bare")
    state = load_file(tmp_path / "bare" / "model.safetensors")
    save_file({f"vit.{name}": tensor for name, tensor in state.items()}, tmp_path / "hub.safetensors")
    report = ckpt_tools.convert(tmp_path / "hub.safetensors", tmp_path / "out.pt", recipe="vit_timm", inverse=True)
    assert any("pooler" in str(note) for note in report.plan.notes)
    found = of_timm(num_classes=0)
    found.load_state_dict(torch.load(tmp_path / "out.pt"))
    images = torch.randn(3, 3, IMAGE, IMAGE)
    with torch.no_grad():
        assert torch.equal(found.eval().forward_features(images), model.eval()(images).last_hidden_state)
