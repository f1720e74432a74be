"""Built-in recipes for transformers 5 give what `save_pretrained` writes, and back, and refuse the wrong direction.

The judge is transformers' own `revert_weight_conversion`, on a tiny model of each family with noise in every tensor.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

import ckpt_tools
from ckpt_tools.errors import CkptError
from ckpt_tools.recipes import list_recipes, load_recipe
from tests.recipes import families, generate
from tests.support.sweep import tiered

pytestmark = pytest.mark.extended

OF_TRANSFORMERS = [recipe for recipe in list_recipes() if recipe.left == "transformers 5"]
MODELS = [model for recipe in OF_TRANSFORMERS for model in recipe.models]
OF_RECIPES = [recipe.models[0] for recipe in OF_TRANSFORMERS]
"""One model type of each recipe."""
TIED = list({str(recipe.tied): recipe.models[0] for recipe in OF_TRANSFORMERS if recipe.tied}.values())
"""One model type for each pair of tied names."""


def hub_state(model: Any) -> Mapping[str, Tensor]:
    """What `save_pretrained` writes; of a model whose published files are transposed, what those have."""
    state = revert_weight_conversion(model, dict(model.state_dict()))
    pattern = generate.TRANSPOSED.get(model.config.model_type)
    return {
        name: tensor.transpose(1, 2).contiguous() if pattern is not None and pattern.search(name) else tensor
        for name, tensor in state.items()
    }


def saved(model: Any, folder: Path, ending: str) -> Path:
    """A file of the live state dict with `config.json` beside it."""
    model.config.save_pretrained(folder)
    path = folder / f"live{ending}"
    if ending == ".pt":
        torch.save(model.state_dict(), path)
    else:
        save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path)
    return path


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if bits(found[name]) != bits(wanted[name])] == []


@pytest.mark.parametrize("name", tiered(MODELS, test=(), extended=OF_RECIPES[::2]))
def test_a_family_becomes_its_hub_files_and_comes_back(name, tmp_path):
    model = families.build(name, tie_word_embeddings=False)
    live = saved(model, tmp_path, (".pt", ".safetensors")[MODELS.index(name) % 2])
    hub, back = tmp_path / "hub.safetensors", tmp_path / "back.safetensors"
    ckpt_tools.convert(live, hub, recipe=name)
    assert_same(load_file(hub), hub_state(model))
    ckpt_tools.convert(hub, back, recipe=name, inverse=True)
    assert_same(load_file(back), model.state_dict())
    for wrong, inverse in ((hub, False), (live, True)):
        with pytest.raises(CkptError):
            ckpt_tools.convert(wrong, tmp_path / "wrong.safetensors", recipe=name, inverse=inverse)
    assert not (tmp_path / "wrong.safetensors").exists()


@pytest.mark.parametrize("name", tiered(TIED, test=(), extended=TIED[::2]))
def test_a_tied_head_is_left_out_and_given_back(name, tmp_path):
    """`save_pretrained` itself is the judge: it writes no tied names, and no notes of ours on them."""
    model = families.build(name, tie_word_embeddings=True)
    live = saved(model, tmp_path, ".pt")
    model.save_pretrained(tmp_path / "real")
    real = tmp_path / "real" / "model.safetensors"
    ckpt_tools.convert(live, tmp_path / "hub.safetensors", recipe=name)
    if name not in generate.TRANSPOSED:
        assert_same(load_file(tmp_path / "hub.safetensors"), load_file(real))
        ckpt_tools.convert(real, tmp_path / "back.pt", recipe=name, inverse=True)
        assert_same(torch.load(tmp_path / "back.pt", weights_only=True), model.state_dict())


@pytest.mark.soak
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_reads_what_a_family_becomes(name, tmp_path):
    """With no missing and no unexpected tensor, and with the same loss to the last bit."""
    model = families.build(name)
    ckpt_tools.convert(saved(model, tmp_path, ".pt"), tmp_path / "hub", to="safetensors", recipe=name)
    found, info = type(model).from_pretrained(tmp_path / "hub", output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info
    assert_same(found.state_dict(), model.state_dict())
    if families.FAMILIES[name].trains:
        with torch.no_grad():
            losses = [families.loss(each.eval()(**families.batch(each))) for each in (model, found)]
        assert torch.equal(*losses)


def test_from_pretrained_reads_the_transposed_files(tmp_path):
    """Files that `save_pretrained` of qwen3_vl_moe writes are not transposed; the published ones are."""
    model = families.build("qwen3_vl_moe")
    live = saved(model, tmp_path, ".safetensors")
    ckpt_tools.convert(live, tmp_path / "hub", to="safetensors", recipe="qwen3_vl_moe")
    found, info = type(model).from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not any(info.values()), info
    assert_same(found.state_dict(), model.state_dict())


def test_each_model_type_has_one_recipe_or_needs_none():
    assert len(MODELS) == len(set(MODELS))
    assert set(MODELS) <= set(families.FAMILIES)
    for name in set(families.FAMILIES) - set(MODELS):
        model = families.build(name, tie_word_embeddings=False)
        assert_same(hub_state(model), model.state_dict())


def test_the_installed_transformers_gives_the_same_files():
    """`python -m tests.recipes.generate` changes nothing."""
    texts = {recipe.name: recipe.text for recipe in OF_TRANSFORMERS}
    made = generate.generate()
    version = load_recipe("qwen2_moe").source.split()[-1]
    assert {name: text.replace(transformers.__version__, version) for name, text in made.items()} == texts
