"""Prints the closed list as the items of ``docs/scanning_list.md``."""

import sys
from collections.abc import Iterator
from textwrap import wrap

from ckpt_tools.serialization.pickle.closed_list import iter_list_entries

MAX_LINE = 120


def lines() -> Iterator[str]:
    """The list, line by line. Names that a pickle may use in one way, for one reason, are one item."""
    names: dict[tuple[str, str], list[str]] = {}
    for entry in iter_list_entries():
        names.setdefault((entry.allowed_uses, entry.reason), []).append(entry.names)
    for (may, reason), group in names.items():
        text = f"{_by_module(group)}: **{_plain(may)}** ({_plain(reason)})"
        yield from wrap(
            text,
            MAX_LINE,
            initial_indent="- ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def _by_module(names: list[str]) -> str:
    """``MODULE: NAME NAME`` for each module."""
    found: dict[str, list[str]] = {}
    for each in names:
        module, _, name = each.partition(": ") if ": " in each else each.rpartition(".")
        found.setdefault(module, []).append(name)
    return ", ".join(f"`{module}: {' '.join(each)}`" for module, each in found.items())


def _plain(text: str) -> str:
    return text.replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
