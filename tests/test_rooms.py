"""The folders of training and inference, and which others each may import: never upward, never in a circle."""

from __future__ import annotations

from graphlib import TopologicalSorter

import pytest

from tests.support.imports import IMPORTS, MODULES, ROOT

TABLES: dict[str, dict[str, set[str]]] = {
    "training": {
        "config": set(),
        "models": {"config"},
        "data": {"config"},
        "checkpoints": {"config", "models"},
        "engines": {"config", "models", "checkpoints"},
        "loop": {"config", "models", "data", "checkpoints", "engines"},
        "launchers": {"config", "models", "data", "checkpoints", "engines", "loop"},
        "examples": set(),
        "studies": {"config", "models", "data", "checkpoints", "engines", "loop", "launchers"},
    },
    "inference": {
        "common": set(),
        "models": {"common"},
        "batch": {"common", "models"},
        "serving": {"common", "models"},
    },
}
"""For each tree its rooms, and for each room the others that it may import."""

ROOTS: dict[str, set[str]] = {"training": {"__main__"}, "inference": {"demo"}}
"""Modules beside the rooms. They may import all rooms, and no room imports them."""


def room_of(tree: str, module: str) -> str | None:
    """The room of a module of the tree; None for the tree itself and for modules of other trees."""
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] or None if first == tree else None


@pytest.mark.parametrize("tree", TABLES)
def test_rooms_import_only_what_their_table_allows(tree):
    table = TABLES[tree]
    here = {room_of(tree, module) for module in MODULES} - {None}
    assert here == table.keys() | ROOTS[tree]
    assert {path.parent.name for path in (ROOT / tree).glob("*/*.py")} == table.keys()
    list(TopologicalSorter(table).static_order())
    wrong = [
        f"{found.module}:{found.line} imports {found.target}"
        for found in IMPORTS
        if (room := room_of(tree, found.module)) in table
        and room_of(tree, found.target) not in {None, room, *table[f"{room}"]}
    ]
    assert not wrong
