"""The cards of recipes: what a test proved is what ``ckpt_tools/recipes/cards.json`` has of it, or is written there by
``pytest --write-pages``. Versions, dates and the parameters of the test are those of the last writing."""

import datetime
import fcntl
import json
import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ckpt_tools
from ckpt_tools.recipes.cards import CARDS_FILE, read_cards
from ckpt_tools.recipes.index import load_recipe
from tests.support.pages import WRITE_PAGES

Cards = dict[str, Any]


def prove(
    test: str,
    recipe: str,
    judges: Sequence[str],
    model: str,
    compared: str,
    *,
    bound: float = 0.0,
    way: str = "forward",
    optimizer: bool = False,
) -> None:
    """``judges`` are distributions, or names of what is not installed. To be called at the end of the test ``test``."""
    name = load_recipe(recipe).name
    stated = {"model": model, "compared": compared, "bound": bound, "way": way, "optimizer": optimizer}
    if WRITE_PAGES in os.environ:
        made = {"version": ckpt_tools.__version__, "date": str(datetime.datetime.now(datetime.UTC).date())}
        proof = {"judges": [_with_version(judge) for judge in judges], **stated, **made, "test": test}
        update_cards(lambda cards: _replace_proof(cards, name, proof))
        return
    card = read_cards().get(name, "there is none")
    assert any(
        {key: each[key] for key in stated} == stated
        and function_of(each["test"]) == function_of(test)
        and len(each["judges"]) == len(judges)
        and all(f"{found} ".startswith(f"{judge} ") for found, judge in zip(each["judges"], judges, strict=True))
        for each in ([] if isinstance(card, str) else card)
    ), f"the card of {name} does not say that {judges} prove {stated}; write it by pytest --write-pages '{test}'"


def function_of(test: str) -> str:
    return test.partition("[")[0]


def update_cards(change: Callable[[Cards], None]) -> None:
    """Write the changed cards. Tests in several processes do so at a time."""
    folder = os.open(CARDS_FILE.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        cards = json.loads(CARDS_FILE.read_text()) if CARDS_FILE.exists() else {}
        change(cards)
        new = Path(f"{CARDS_FILE}.new")
        new.write_text(_format_cards(cards))
        new.replace(CARDS_FILE)
    finally:
        os.close(folder)


def _with_version(judge: str) -> str:
    try:
        return f"{judge} {version(judge)}"
    except (PackageNotFoundError, ValueError):
        return judge


def _replace_proof(cards: Cards, name: str, proof: dict[str, Any]) -> None:
    def place(each: dict[str, Any]) -> tuple[str, ...]:
        return function_of(each["test"]), each["model"], each["way"]

    before = cards.get(name, [])
    kept = [each for each in ([] if isinstance(before, str) else before) if place(each) != place(proof)]
    cards[name] = sorted([*kept, proof], key=place)


def _format_cards(cards: Cards) -> str:
    """A line for each proof."""
    lines = []
    for name, card in sorted(cards.items()):
        proofs = json.dumps(card) if isinstance(card, str) else "[\n  " + ",\n  ".join(map(json.dumps, card)) + "\n ]"
        lines.append(f" {json.dumps(name)}: {proofs}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
