"""Each built-in recipe has a card that its tests wrote, or that says that no framework judges it."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

import ckpt_tools
from ckpt_tools.recipes.cards import read_cards
from ckpt_tools.recipes.pages import list_built_in_names, read_built_in_page
from tests.support.cards import function_of, update_cards
from tests.support.commands import run_command
from tests.support.pages import ROOT, WRITE_PAGES

IN_NUMPY = "its tests compute what the trainer's own converter does, written anew in numpy"
UNJUDGED = {
    "nanotron_llama": IN_NUMPY,
    "nanotron_llama_interleaved": IN_NUMPY,
    "torchtitan_gpt_oss": IN_NUMPY,
    "torchtitan_qkv": "its test cuts the tensors of a checkpoint of torchtitan with numpy",
}


@pytest.mark.quick
def test_each_recipe_has_a_card_and_one_without_a_judge_says_so():
    names = {*list_built_in_names()}
    if WRITE_PAGES in os.environ:
        update_cards(lambda cards: [cards.pop(name) for name in [*cards] if name not in names])
        update_cards(lambda cards: cards.update(UNJUDGED))
        read_cards.cache_clear()
    assert {name: card for name, card in read_cards().items() if isinstance(card, str)} == UNJUDGED
    assert {*read_cards()} == names
    assert all(read_cards().values())


@pytest.mark.extended
def test_each_proof_is_of_a_test_that_is_there():
    tests = {each["test"] for card in read_cards().values() if not isinstance(card, str) for each in card}
    files = sorted({function_of(test).partition("::")[0] for test in tests})
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "--soak", *files]
    environment = {name: value for name, value in os.environ.items() if name != WRITE_PAGES}
    found = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert tests <= {*found.splitlines()}


def test_a_card_is_shown_as_text_and_as_json(tmp_path):
    shown = run_command("recipes", "show", "vit_timm", "--card").out.splitlines()
    assert shown[0] == "vit_timm: timm to hub"
    assert shown[1].split("\t") == ["judge", "way", "optimizer", "largest difference", "proved by", "of"]
    rows = [line.split("\t") for line in shown[2:]]
    assert {row[1] for row in rows} == {"to timm", "to hub"}
    assert all("timm " in row[0] and row[3] == "0: bit for bit" and row[5].endswith("logits") for row in rows)
    found = json.loads(run_command("recipes", "show", "vit_timm", "--json").out)
    assert found["text"] == read_built_in_page("vit_timm")
    (first, _) = ckpt_tools.show_recipe("vit_timm").card.proofs
    assert found["card"]["proofs"][0] == json.loads(json.dumps(dataclasses.asdict(first)))
    assert run_command("recipes", "show", "vit_timm").out == read_built_in_page("vit_timm")


def test_a_recipe_without_a_judge_says_so(tmp_path):
    assert (
        run_command("recipes", "show", "torchtitan_qkv", "--card").out.splitlines()[1].startswith("no judge: its test")
    )
    file = tmp_path / "vit_timm.toml"
    file.write_text(read_built_in_page("vit_timm") + "# mine\n")
    shown = run_command("recipes", "show", file, "--card").out
    assert shown.endswith("no judge: it is not built in, and no test of ckpt-tools has it\n")
    assert ckpt_tools.show_recipe(file).card == ckpt_tools.RecipeCard(
        (), "it is not built in, and no test of ckpt-tools has it"
    )
