"""docs/layouts.md, made of the corpus: "I have these files: what is it, what can I do?"

It is the same wherever it is made: it has names of files and counts of tensors, no sizes, times or paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from ckpt_tools.core.wording import count
from fixtures.corpus import layouts, make
from fixtures.corpus.layout import Made

PAGE = Path(__file__).parent.parent.parent / "docs" / "layouts.md"

INTRO = """# Layouts

You have files and want to know what they are, and what you can do with them. This page shows every layout that the
tests of ckpt-tools know: its files, who writes it, and how ckpt-tools opens it, or the sentence that refuses it. Each
layout is made by its real writer in the tests. Of those that open, every tensor is compared bit by bit with what the
framework itself holds. A layout that could not be made that way is marked as a stand-in: it is made from the
documented layout.

`ckpt-tools inspect PATH` says what you have, and `ckpt-tools ls RUN` lists the checkpoints of a run ([runs](runs.md)).
In the names below, `N` and `M` stand for numbers, such as that of a rank. The [glossary](glossary.md) explains the
words.

## Find it by a file's name

"""

MIN_ALIKE = 3
"""So many folders with the same files are shown as one."""

_HASH = re.compile(r"[0-9a-f]{16,}")
_NUMBER = re.compile(r"\d+")


def page() -> str:
    """The whole page. Makes every layout that is not in the cache."""
    every = [make(name) for name in layouts()]
    families = [(family, list(group)) for family, group in groupby(every, key=lambda made: made.layout.family)]
    sections = (section for family, group in families for section in (f"## {family}\n", *map(_section, group)))
    return INTRO + _table(every) + "\n" + "\n".join(sections)


def _table(every: Sequence[Made]) -> str:
    found: dict[str, dict[str, None]] = {}
    for made in every:
        for path in files_of(made):
            found.setdefault(pattern(path.rpartition("/")[2]), {})[made.layout.name] = None
    rows = (f"| `{name}` | {', '.join(map(_link, found[name]))} |" for name in sorted(found, key=_order))
    return "| file | layouts |\n|---|---|\n" + "".join(f"{row}\n" for row in rows)


def _order(name: str) -> tuple[str, str]:
    return name.lstrip("._").lower(), name


def _link(name: str) -> str:
    return f"[{name}](#{re.sub(r'[^a-z0-9_-]', '', name.lower().replace(' ', '-'))})"


def _section(made: Made) -> str:
    layout = made.layout
    lines = [f"### {layout.name}", "", layout.about + ("" if layout.is_real else " (A stand-in.)"), ""]
    lines += ["```", *tree(files_of(made)), "```", "", _outcome(made)]
    if layout.advice:
        lines += ["", layout.advice]
    if layout.optional:
        names = ", ".join(f"`{each}`" for each in layout.optional)
        lines += ["", f"It can lack {names}, and is read without what these files hold."]
    return "\n".join(lines) + "\n"


def _outcome(made: Made) -> str:
    layout = made.layout
    where = "" if layout.source == "." else f" from `{layout.source}`"
    if layout.refusal is not None:
        return f"**Refused**: {layout.refusal}."
    weights = count(len(made.state.weights), "weight")
    state = count(len(made.state.optimizer), "tensor")
    optimizer = f" and {state} of the optimizer" if made.state.optimizer else ""
    return f"**Opens as `{layout.opens_as}`**{where}, with {weights}{optimizer} in this example."


def files_of(made: Made) -> list[str]:
    return sorted(path.relative_to(made.folder).as_posix() for path in made.folder.rglob("*") if path.is_file())


def pattern(name: str) -> str:
    """A file's name with letters in the place of numbers: ``__N_M.distcp``."""
    letters = iter("NMKLPQ" * 8)
    return _NUMBER.sub(lambda _: next(letters), _HASH.sub("HASH", name))


@dataclass(slots=True)
class Folder:
    """What lies in a folder."""

    folders: dict[str, Folder] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


def tree(paths: Iterable[str]) -> list[str]:
    """The files as lines, those of one kind in one line."""
    root = Folder()
    for path in paths:
        *folders, name = path.split("/")
        at = root
        for each in folders:
            at = at.folders.setdefault(each, Folder())
        at.files.append(name)
    return list(_lines(root, ""))


def _lines(folder: Folder, indent: str) -> Iterator[str]:
    shown = {name: list(_lines(inner, indent + "    ")) for name, inner in folder.folders.items()}
    for name, more in _alike(shown):
        yield f"{indent}{name}/" + (f"    and {more} more folders with the same files" if more else "")
        yield from shown[name]
    yield from (indent + line for line in _names(folder.files))


def _alike(shown: Mapping[str, list[str]]) -> Iterator[tuple[str, int]]:
    """Each folder that is shown, and how many are like it."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, lines in shown.items():
        groups.setdefault(tuple(lines), []).append(name)
    for names in groups.values():
        if len(names) >= MIN_ALIKE:
            yield names[0], len(names) - 1
        else:
            yield from ((name, 0) for name in names)


def _names(names: Sequence[str]) -> Iterator[str]:
    """Names that differ in numbers alone are one line."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern(name), []).append(name)
    for form, group in groups.items():
        yield (
            group[0]
            if len(group) == 1 and form.count("HASH") == 0
            else f"{_joined(group)}    ({count(len(group), 'file')})"
        )


def _joined(names: Sequence[str]) -> str:
    """``__N_0.distcp`` of ``__0_0.distcp`` and ``__1_0.distcp``: the numbers that differ become letters."""
    plain = [_HASH.sub("HASH", name) for name in names]
    columns = list(zip(*(_NUMBER.findall(name) for name in plain), strict=True))
    letters = iter("NMKLPQ" * 8)
    values = iter([column[0] if len({*column}) == 1 else next(letters) for column in columns])
    return _NUMBER.sub(lambda _: next(values), plain[0])
