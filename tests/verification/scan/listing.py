"""Prints the closed list as the items of ``docs/scanning_list.md``."""

import re
import sys
from collections.abc import Iterator
from itertools import product
from textwrap import wrap

from ckpt_tools.serialization.pickle.allowed_calls import CALLS
from ckpt_tools.serialization.pickle.closed_list import RULES
from ckpt_tools.serialization.pickle.dcp_metadata import RECORD_CLASSES
from ckpt_tools.serialization.pickle.shapes import NameRule

MAX_LINE = 120

MAX_WORDS = 7
"""Of arguments or of a state that the page spells."""

MAX_NAMES = 3
"""Names of one module that the page spells."""

SHORT_REASONS = {
    "its attributes are set one by one; they cannot be hooks": "attributes",
    "torch's own function; the view must lie inside its storage": "a view",
}
"""The page says at its top what these mean."""

_DOTTED = r"\w+(?:\.\w+)+"


def lines() -> Iterator[str]:
    """The list, line by line. Names that a pickle may use in one way, for one reason, are one item."""
    names: dict[tuple[str, str], list[str]] = {}
    for allowed_uses, reason, name in _entries():
        names.setdefault((allowed_uses, reason), []).append(name)
    for (may, reason), group in names.items():
        short = SHORT_REASONS.get(reason, _plain(reason))
        text = f"{_by_module(group)}: **{_plain(_shortened(may))}** ({short})"
        yield from wrap(
            text,
            MAX_LINE,
            initial_indent="- ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def _entries() -> Iterator[tuple[str, str, str]]:
    """What the names of each entry of the list may be used for, why, and the names; interpreted names first."""
    for ref, call in CALLS.items():
        yield call.arguments, call.reason, str(ref)
    for module, name in RECORD_CLASSES:
        yield "its fields, each of its type", "a record of a DCP, interpreted", f"{module}.{name}"
    for rule in RULES:
        for module in rule.modules.split():
            yield _allowed_uses(rule), rule.reason, f"{module}: {rule.names}"


def _allowed_uses(rule: NameRule) -> str:
    calls = (shape.text if shape.text.startswith("(") else f"(*{shape.text})" for shape in rule.call)
    parts = [f"call{text if _is_short(text) else '(its own arguments)'}" for text in calls]
    parts += [f"new{shape.text}" for shape in rule.new]
    parts += [f"state {rule.state.text if _is_short(rule.state.text) else 'of its own'}"] if rule.state else []
    parts += ["items"] if rule.has_items else []
    parts += ["items by key"] if rule.has_pairs else []
    return "; ".join(dict.fromkeys(parts)) or "stand as a value"


def _is_short(text: str) -> bool:
    return len(_shortened(text).split()) <= MAX_WORDS


def _by_module(names: list[str]) -> str:
    """``MODULE, MODULE: NAME NAME``: names that lie in the same modules together."""
    modules: dict[str, list[str]] = {}
    for each in names:
        module, _, found = each.partition(": ") if ": " in each else each.rpartition(".")
        for name in found.split():
            modules.setdefault(name, []).append(module)
    groups: dict[str, list[str]] = {}
    for name, found_in in modules.items():
        groups.setdefault(", ".join(found_in), []).append(name)
    return "; ".join(f"`{places}: {' '.join(_few(each))}`" for places, each in groups.items())


def _few(names: list[str]) -> list[str]:
    return names if len(names) <= MAX_NAMES else [*names[:MAX_NAMES], f"... ({len(names)} names)"]


def _shortened(text: str) -> str:
    """Classes under several modules, a tuple or list of the same, and a state in two forms are said once."""
    text = re.sub(rf"{_DOTTED}(?: or {_DOTTED})+", lambda found: _with_modules(found[0]), text)
    text = re.sub(r"\btuple of (.+?) or list of \1(?=[,;})]| or |$)", r"tuple or list of \1", text)
    return re.sub(r"(\{.*\}) or \(None, \1\)", r"\1 or (None, the same)", text)


def _with_modules(classes: str) -> str:
    """``NAME or NAME of MODULE or MODULE`` if each module has each of the names."""
    found = classes.split(" or ")
    modules, names = (list(dict.fromkeys(each)) for each in zip(*(name.rsplit(".", 1) for name in found), strict=True))
    if {".".join(each) for each in product(modules, names)} != set(found):
        return classes
    return f"{' or '.join(names)} of {' or '.join(modules)}"


def _plain(text: str) -> str:
    return text.replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
