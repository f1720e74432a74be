"""Runs docs/recipes.md and the pages that follow it: each command does what is printed under it."""

import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torchvision.models import VisionTransformer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, ViTConfig, ViTModel

from ckpt_tools.recipes.reading import parse_recipe
from fixtures import launch, megatron_moe_models
from fixtures import megatron_models as mm
from tests.support.pages import ROOT, blocks, check_commands

pytestmark = pytest.mark.extended

DOCS = ROOT / "docs"
PAGES = tuple(DOCS / f"recipes{part}.md" for part in ("", "_megatron", "_trainers"))
"""In this order: a page uses outputs of those before it."""


def mixture_of_experts(folder: Path) -> None:
    """A model of transformers 5 with a step of AdamW, and its configuration."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=256,
        intermediate_size=64,
    )
    model = Qwen3MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(16)[None]
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": weights, "optim": state}, checkpoint_id=folder / "run/checkpoint-2", no_dist=True)
    config.save_pretrained(folder / "config")


def vision_transformers(folder: Path) -> None:
    """A model of torchvision, with its names of before 0.13 too, one of transformers, and configurations."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10, layer_norm_eps=1e-6)
    config.save_pretrained(folder / "vit-config")
    ViTModel(config).save_pretrained(folder / "vit-model")
    model = VisionTransformer(32, 8, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10)
    weights = model.state_dict()
    torch.save(weights, folder / "vit.pt")
    old = {name.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): w for name, w in weights.items()}
    torch.save(old, folder / "vit-0.12.pth")


def trainers(folder: Path) -> None:
    """Checkpoints that torchtitan and OLMo-core wrote, and the configurations of their models."""
    for name, of in (("titan", "torchtitan_llama"), ("olmo", "olmo_core_olmo2")):
        with zipfile.ZipFile(ROOT / f"tests/corpus/trainers/{of}.zip") as archive:
            archive.extractall(folder / name)
        (folder / name / "dcp").rename(folder / name / "step-2")


def megatron_run(folder: Path) -> None:
    """A dense model that megatron-core trained, and a configuration of transformers."""
    (folder / "qwen3").mkdir()
    launch.pool(1).run(mm.produce, "qwen3", {}, "bf16", "stacked", "", folder / "qwen3")


def megatron_mixture(folder: Path) -> None:
    """A run of megatron-core, with a configuration of transformers' model beside it."""
    launch.pool(1).run(megatron_moe_models.produce, ("qwen3_moe",), folder / "runs")


SOURCES: tuple[Callable[[Path], None], ...] = (
    mixture_of_experts,
    vision_transformers,
    megatron_run,
    megatron_mixture,
    trainers,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("page")
    for make in SOURCES:
        make(made)
    return made


def test_every_command_prints_what_the_page_says(folder):
    for page in PAGES:
        check_commands(page, folder)


def test_the_files_are_recipes():
    recipe, *copying, growing = (
        parse_recipe(text, "mine", "mine.toml") for text in blocks(DOCS / "recipes_own.md", "toml")
    )
    assert len(recipe.lines) == 3
    assert recipe.inverse().inverse() == recipe
    assert [len(each.copy_rules[0].numbers) for each in copying] == [8, 48]
    assert [rule.new for rule in growing.grow_rules] == ["mean", "mean"]
