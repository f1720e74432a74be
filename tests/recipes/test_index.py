"""Recipes by name: built-in ones, files, models, and those of other distributions."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import ckpt_tools
from ckpt_tools.cli.main import group
from ckpt_tools.errors import UsageError
from ckpt_tools.recipes import index, pages
from ckpt_tools.recipes.index import load_recipe
from tests.support import moe

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def forgotten():
    """The recipes that a test installs are looked for in it, and forgotten after it."""
    for cached in (index.list_recipes, index._list_plugin_files):
        cached.cache_clear()
    yield
    for cached in (index.list_recipes, index._list_plugin_files):
        cached.cache_clear()


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """``plugin(distribution, **files)``: a distribution whose package holds these recipes, installed without pip."""

    def make(distribution: str, value: str = "", **files: str) -> Path:
        folder = tmp_path / distribution
        info = folder / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        package = f"recipes_of_{distribution}"
        (info / "entry_points.txt").write_text(f"[ckpt_tools.recipes]\n{distribution} = {value or package}\n")
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text("raise SystemError('it is found and not run')\n")
        for name, text in files.items():
            (folder / package / f"{name}.toml").write_text(text)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    return make


def printed(*words: str) -> str:
    done = CliRunner().invoke(group, list(words))
    assert done.exit_code == 0, done.output
    return done.output


def test_every_built_in_recipe_is_listed_and_shown():
    lines = {line.split()[0]: line for line in printed("recipes").splitlines()[1:]}
    assert tuple(lines) == pages.list_built_in_names()
    assert {path.stem for path in pages.BUILT_IN_FOLDER.glob("*.toml")} < lines.keys()
    for name in lines:
        assert printed("recipes", "show", name) == pages.read_built_in_page(name)
        recipe = load_recipe(name)
        assert (recipe.name, bool(recipe.about)) == (name, True)
        assert load_recipe(name, inverse=True).left == recipe.right
    listed = {name: each.name for each in ckpt_tools.list_recipes() for name in each.also}
    assert listed["qwen3_moe"] == "qwen2_moe"
    for name, recipe in listed.items():
        assert load_recipe(name).name == recipe
        assert re.search(rf"; also .*\b{name}\b", lines[recipe])


def test_the_page_of_a_generated_recipe_is_one_that_people_could_write():
    block = """\
source = "transformers 5.23.0"
about = "Ours: names that differ on the hub"
models = ["one", "two"]
tied = { "lm_head.weight" = "embed.weight" }
sizes.expert = "config.num_experts"
{ "{prefix...}down" = "{expert} H F" } -> { "{prefix...}{expert}.w2" = "H F" }
optional "a.{layer}" -> "b.{layer}"
otherwise "a.{rest...}" -> "c.{rest...}"
"""
    assert (
        pages.make_page(block)
        == """\
about = "Ours: names that differ on the hub"
left = "transformers 5"
right = "hub"
models = ["one", "two"]
source = "transformers 5.23.0"
others = "same"
tied = { "lm_head.weight" = "embed.weight" }

[sizes]
expert = "config.num_experts"

[[map]]
left = { "{prefix...}down" = "{expert} H F" }
right = { "{prefix...}{expert}.w2" = "H F" }

[[map]]
left = "a.{layer}"
right = "b.{layer}"
optional = true

[[map]]
left = "a.{rest...}"
right = "c.{rest...}"
otherwise = true
"""
    )
    models = [f"a_model_of_number_{number}" for number in range(9)]
    long = pages.make_page(block.replace('["one", "two"]', str(models).replace("'", '"')))
    assert [f'  "{model}",' for model in models] == long.splitlines()[4:13]
    assert max(map(len, long.splitlines())) <= pages.MAX_LINE_LENGTH


def test_a_plug_in_adds_recipes(plugin):
    plugin("mine", one=moe.RECIPE, two=moe.RECIPE.replace("tinymoe", "othermoe"))
    assert [each.name for each in ckpt_tools.list_recipes()][-2:] == ["one", "two"]
    assert ckpt_tools.show_recipe("one").text == moe.RECIPE
    assert load_recipe("othermoe", inverse=True).name == "two"
    assert "Fused experts to one tensor an expert" in printed("recipes")
    assert printed("recipes", "show", "two").startswith("\nabout")


def test_a_model_of_two_recipes_is_refused(plugin):
    plugin("mine", one=moe.RECIPE, two=moe.RECIPE)
    with pytest.raises(UsageError, match=r"recipe='tinymoe' is a model of several recipes; choose one of one, two"):
        load_recipe("tinymoe")


def test_two_of_one_name_are_refused(plugin):
    plugin("mine", one=moe.RECIPE)
    plugin("theirs", one=moe.RECIPE)
    for ask in (ckpt_tools.list_recipes, lambda: load_recipe("one")):
        with pytest.raises(UsageError, match=r"mine 1\.0, theirs 1\.0 each give a recipe 'one'; uninstall one"):
            ask()


def test_one_of_a_built_in_name_is_refused(plugin):
    plugin("mine", mixtral=moe.RECIPE, two=moe.RECIPE)
    assert load_recipe("mixtral").left == "transformers 5"
    for ask in (ckpt_tools.list_recipes, lambda: load_recipe("two")):
        with pytest.raises(UsageError, match=r"mine 1\.0 gives a recipe 'mixtral', which is built in; uninstall it"):
            ask()


def test_one_that_is_wrong_is_named_if_it_is_needed(plugin):
    plugin("mine", one=moe.RECIPE, bad="x = 1")
    assert load_recipe("one").name == "one"
    for ask in (ckpt_tools.list_recipes, lambda: load_recipe("bad"), lambda: load_recipe("nothing")):
        with pytest.raises(UsageError, match=r"bad\.toml"):
            ask()


@pytest.mark.parametrize("value", ["nowhere", "no.where", "recipes_of_mine:x", "json"])
def test_a_package_without_recipes_is_refused(value, plugin):
    plugin("mine", value)
    with pytest.raises(UsageError, match=r"the recipes of mine 1\.0 cannot be found"):
        ckpt_tools.list_recipes()
