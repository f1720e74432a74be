"""The text of the built-in recipes: TOML pages that people write, and pages made of the blocks of ``transformers.txt``.

That file is generated, with a block for each family of models that lacks what all their pages say. The page of a block:

    [mixtral]                                about = "..."
    about = "..."                            left = "transformers 5"
    models = ["mixtral", "minimax"]          right = "hub"
    sizes.expert = "config.num_experts"      models = ["mixtral", "minimax"]
    optional "a.{layer}" -> "b.{layer}"      source = "transformers 5.23.0"
                                             others = "same"

                                             [sizes]
                                             expert = "config.num_experts"

                                             [[map]]
                                             left = "a.{layer}"
                                             right = "b.{layer}"
                                             optional = true

``inspect`` searches the text of all pages before it reads a recipe, so that this module imports nothing that costs
time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

from ckpt_tools.core.names import zero_numbers

BUILT_IN_FOLDER = Path(__file__).parent / "builtin"

MAX_LINE_LENGTH = 120

_BLOCK_NAME = re.compile(r"^\[(\w+)\]\n", re.MULTILINE)
_BLOCK_MAP = re.compile(r'([a-z_ ]*)(["{].*) -> (.*)')
_STACKED_KEY = re.compile(r'^stacked\s*=\s*\{\s*(left|right)\s*=\s*\["([^"]+)"\]', re.MULTILINE)
_RIGHT_KEY = re.compile(r"^right\s*=.*$", re.MULTILINE)


@cache
def _find_pages() -> Mapping[str, Path | str]:
    """The file or the block of each recipe, in the order of names. A block has the first line of its file before it,
    which is the source of all."""
    source, *names_and_blocks = _BLOCK_NAME.split((BUILT_IN_FOLDER / "transformers.txt").read_text())
    names, blocks = names_and_blocks[::2], names_and_blocks[1::2]
    pages: dict[str, Path | str] = {path.stem: path for path in BUILT_IN_FOLDER.glob("*.toml")}
    pages |= {name: f"{source.strip()}\n{block.strip()}" for name, block in zip(names, blocks, strict=True)}
    return dict(sorted(pages.items()))


def list_built_in_names() -> tuple[str, ...]:
    return tuple(_find_pages())


def read_built_in_page(name: str) -> str:
    """The page of a recipe of ``list_built_in_names``."""
    page = _find_pages()[name]
    return make_page(page) if isinstance(page, str) else page.read_text()


def make_page(block: str) -> str:
    """The page of a block."""
    source, about, models, *rest = block.splitlines()
    maps = [found for line in rest if (found := _BLOCK_MAP.fullmatch(line))]
    sizes = [line.removeprefix("sizes.") for line in rest if line.startswith("sizes.")]
    ties = [line for line in rest if line.startswith("tied")]
    head = [about, 'left = "transformers 5"', 'right = "hub"', models, source, 'others = "same"', *ties]
    page = [*map(_wrap_array, head), *(["", "[sizes]", *sizes] if sizes else [])]
    for flags, left, right in (found.groups() for found in maps):
        page += ["", "[[map]]", f"left = {left}", f"right = {right}", *(f"{flag} = true" for flag in flags.split())]
    return "\n".join(page) + "\n"


def _wrap_array(line: str) -> str:
    """A line of a page; an array that is too long for one has a line for each item."""
    if len(line) <= MAX_LINE_LENGTH or not line.endswith("]"):
        return line
    return line.replace("[", "[\n  ").replace(", ", ",\n  ").replace("]", ",\n]")


def find_likely_pages(names: Collection[str]) -> dict[str, str]:
    """The built-in pages, by name, that may be made for such names, by the text of their patterns between variables: it
    may find one that is not, and misses none."""
    name_shapes = set(map(zero_numbers, names))
    pages = {name: read_built_in_page(name) for name in list_built_in_names()}
    return {name: page for name, page in pages.items() if _may_take_names(page, name_shapes)}


def _may_take_names(page: str, names: Collection[str]) -> bool:
    """True if each pattern of a side that needs a tensor may match a name, and one of them has a variable."""
    head, *lines = page.split("[[map]]")
    stacked_match = _STACKED_KEY.search(head)
    # The lines that need a tensor: they are not optional, and have no other spelling.
    alternative_sides = {found[0] for line in lines if "one_way = true" in line and (found := _RIGHT_KEY.search(line))}
    optional_marks = ("optional = true", "one_way = true", *alternative_sides)
    required_lines = [line for line in lines if not any(text in line for text in optional_marks)]
    for side in ("left", "right"):
        prefix = stacked_match[2] if stacked_match is not None and stacked_match[1] == side else None
        has_variable = False
        for pattern in (pattern for line in required_lines for pattern in _find_patterns(line, side)):
            if not any(_may_match(form, names) for form in _list_forms(pattern, prefix)):
                break
            has_variable |= "{" in pattern
        else:
            if has_variable:
                return True
    return False


def _find_patterns(line: str, side: str) -> list[str]:
    """The names of a side of a ``[[map]]``, which built-in recipes write in one line of text."""
    side_match = re.search(rf"^{side}\s*=\s*(.*)$", line, re.MULTILINE)
    if side_match is None:
        return []
    names_with_shapes = re.findall(r'"([^"]+)"\s*=', side_match[1])
    return names_with_shapes or re.findall(r'"([^"]+)"', side_match[1])


def _list_forms(pattern: str, stacked_prefix: str | None) -> list[str]:
    """The pattern, and the one for layers that are stacked in one tensor: these lack the variable of
    ``stacked_prefix``."""
    if stacked_prefix is None or not pattern.startswith(stacked_prefix):
        return [pattern]
    return [pattern, stacked_prefix.partition("{")[0] + pattern.removeprefix(stacked_prefix)]


def _may_match(pattern: str, names: Collection[str]) -> bool:
    if "{" not in pattern:
        return pattern in names
    head, *middle, tail = re.split(r"\{[^}]*\}", pattern)
    return any(
        len(name) >= len(head) + len(tail)
        and name.startswith(head)
        and name.endswith(tail)
        and all(part in name for part in middle)
        for name in names
    )
