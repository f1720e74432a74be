"""Built-in recipes for transformers 5 are those that its own `revert_weight_conversion` gives for tiny models.

`tests/end_to_end/test_recipes_transformers.py` converts the models.
"""

from collections.abc import Mapping

import pytest
import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

import ckpt_tools
from ckpt_tools.recipes.index import list_recipes, load_recipe
from tests.recipes import families, generate

pytestmark = [pytest.mark.extended, pytest.mark.judges]

OF_TRANSFORMERS = [recipe for recipe in list_recipes() if recipe.left == "transformers 5"]
MODELS = [model for recipe in OF_TRANSFORMERS for model in recipe.models]


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if bits(found[name]) != bits(wanted[name])] == []


def test_from_pretrained_reads_the_transposed_files(tmp_path):
    """Files that `save_pretrained` of qwen3_vl_moe writes are not transposed; the published ones are."""
    model = families.build("qwen3_vl_moe")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "live.pt")
    ckpt_tools.convert(tmp_path / "live.pt", tmp_path / "hub", to="safetensors", recipe="qwen3_vl_moe")
    found, info = type(model).from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not any(info.values()), info
    assert_same(found.state_dict(), model.state_dict())


def test_each_model_type_has_one_recipe_or_needs_none():
    assert len(MODELS) == len(set(MODELS))
    assert set(MODELS) <= set(families.FAMILIES)
    for name in set(families.FAMILIES) - set(MODELS):
        model = families.build(name, tie_word_embeddings=False)
        assert_same(revert_weight_conversion(model, dict(model.state_dict())), model.state_dict())


def test_the_installed_transformers_gives_the_same_file(card):
    """`python -m tests.recipes.generate` changes nothing."""
    version = load_recipe("qwen2_moe").source.split()[-1]
    assert generate.generate().replace(transformers.__version__, version) == generate.FILE.read_text()
    for recipe in OF_TRANSFORMERS:
        types = f"tiny models of {', '.join(recipe.models)}"
        card(recipe.name, ["transformers"], types, "the place of each element, by revert_weight_conversion")
