"""Generates docs/layouts.md, and the layouts on the pages of docs/formats/, from the corpus: "I have these files: what
is it, what can I do?"

They are the same on every machine: names of files, counts of tensors and messages, no sizes, times or paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap

import pytest

import ckpt_tools
from ckpt_tools.core.option_names import use_command_line_spelling
from ckpt_tools.errors import CkptError
from fixtures.corpus import layouts, make
from fixtures.corpus.layout import Made

DOCS = Path(__file__).parent.parent.parent / "docs"
INDEX = "layouts.md"

INTRO, _, LISTS = (DOCS / INDEX).read_text().partition("\n## By family")
"""What a person wrote above the lists, which stays as it is."""

BY_NAME = """## Find it by a file's name

If several sections have a file, their pages are named. Files of the same place are in one line.

"""

_FAMILY = re.compile(r"^- \[([^]]+)\]\(([^)]+)\): (.+?)(?=\n- |\n\n)", re.MULTILINE | re.DOTALL)
_FAMILIES = _FAMILY.findall(LISTS.partition(BY_NAME)[0])
FAMILIES = {name: " ".join(about.split()) for name, _, about in _FAMILIES}
"""The families in their order, each with its introduction, which a person wrote."""

PAGES = {name: path for name, path, _ in _FAMILIES}
"""The page of each family in docs/, which a person wrote above its layouts."""

_LAYOUTS = re.compile(r"(?<=<!-- layouts:start -->\n).*(?=<!-- layouts:end -->\n)", re.DOTALL)

PARTS = {
    "DeepSpeed": {
        "deepspeed-moe": "DeepSpeed parallelism",
        "deepspeed-autoep": "DeepSpeed parallelism",
        "deepspeed-pipeline": "DeepSpeed parallelism",
        "deepspeed-tp": "DeepSpeed parallelism",
        "deepspeed-universal": "DeepSpeed universal",
    },
    "PyTorch": {"dcp": "DCP", "safetensors": "Hugging Face and Lightning", "": "torch files"},
    "Variants of DCP": {"": "DCP"},
    "Trainers around DCP": {"": "DCP"},
    "Quantized weights": {"": "Hugging Face and Lightning"},
}
"""Of families of the corpus that are on several pages, or on that of another: first words of layouts, and their page.
The first that fits holds."""

ADVISED = {
    "dcp-torchao",
    "dcp-two-models",
    "deepspeed-moe-old",
    "deepspeed-nvme",
    "torch-gan",
}
"""Refused layouts whose advice says more than the message."""

_OF_ALL = re.compile(
    r"(^| |(?<=[:.] ))(Convert (it|the weights) to any format"
    r"(, or `reshard` it(: (DeepSpeed|verl) resumes at the other world size)?"
    r"|, also back to ZeRO for any number of ranks|; it is a model without an optimizer|; (?=a )"
    r"|; for DeepSpeed, to zero1, zero2 or zero3)?"
    r"|The weights convert to any format"
    r"|It holds weights alone. `convert` writes them in any format, `consolidate` as one file"
    r"|Reshard it: the trainer resumes from what is written"
    r"|[Tt]he (experts of all ranks|stages) become one (tensor of each name|model, with [a-z ]+)"
    r"|[Pp]arts and stages become one model, with the names of one stage|[Tt]he parts are joined"
    r"|The parameters have the names of the model without a pipeline"
    r"|[Aa] universal checkpoint cannot hold its momentum)(?!;)[.:]? ?"
)
"""Advice for all layouts, and what the text of a page says."""

_OF_FILES = re.compile(
    r"(: (a file for each (layer, and the optimizer of each stage|expert)|(two|four) DCPs|numbered files and an index"
    r"|shards and their index|`(mp_rank_01|layer_01-model_01-)[_a-z]+\.pt`|a folder `\.ckpt` of a DCP and `meta\.pt`)"
    r"|, also if a trainer calls it \([^)]+\))(?=\.$)"
)
"""What the files show, or the text of a page says."""

FORMATS = {
    "DCP": "dcp",
    "Files of ranks": "sharded",
    "JAX": "orbax",
    "DeepSpeed universal": "universal",
    "Megatron": "megatron",
    "llama.cpp": "gguf",
    "nanotron": "nanotron",
    "numpy": "npz",
    "torch files": "torch",
}
"""What the layouts of a page open as, unless it is said."""

OF_TESTS = ("order.txt", "slots.pt")
"""Files that the tests add to a layout."""

OF_CHANCE = re.compile(r"HASH|[NM](?:\.[NM])*|README\.md")
"""Names that identify no layout."""

MAX_NAMED = 2
"""More folders with the same files are counted, not named."""

_BF16 = re.compile(r"(?:bf16_)?(zero_pp_rank_\w+_optim_states)")
"""DeepSpeed's files of optimizers, whose names begin with bf16_ in a run of that type."""

_HASH = re.compile(r"[0-9a-f]{16,}")
_NUMBER = re.compile(r"(?<!\d)(?<!fp)(?<!bf)(?<!\.h)(?<!\.pt)\d+")
"""Those that count something, unlike those of ``fp32``, ``bf16``, ``.h5`` and ``.pt2``."""

_ANY_NUMBER = re.compile(rf"{_NUMBER.pattern}|(?<![A-Za-z])[NMKLPQ](?![A-Za-z])")
"""A number, or a letter for one."""


def pages() -> dict[str, str]:
    """Every page by its path in docs/. Makes every layout that is not in the cache."""
    every = [make(name) for name in layouts()]
    by_family = {family: _alike_files(made for made in every if _page(made) == family) for family in FAMILIES}
    assert sum(len(group) for groups in by_family.values() for group in groups) == len(every), "each has a page"
    return {INDEX: index(_table(by_family))} | {
        path: with_layouts(path, map(_section, by_family[family])) for family, path in PAGES.items()
    }


def _page(made: Made) -> str:
    name, family = made.layout.name, made.layout.family
    parts = PARTS.get(family, {})
    return next((part for words, part in parts.items() if name.startswith(words)), family)


def _alike_files(found: Iterable[Made]) -> list[list[Made]]:
    """Layouts whose files differ in numbers alone together, in order of the first of each."""
    groups: dict[str, list[Made]] = {}
    for made in found:
        groups.setdefault(without_numbers(shown_files(made)), []).append(made)
    return list(groups.values())


def shown_files(made: Made) -> str:
    paths = (_BF16.sub(r"[bf16_]\1", path) for path in files_of(made))
    return "\n".join(["```", *tree(sorted(paths, key=lambda path: path.replace("[bf16_]", ""))), "```"])


def without_numbers(text: str) -> str:
    return _ANY_NUMBER.sub("#", text)


def index(table: str) -> str:
    families = "".join(f"{wrapped(f'- {_link(family)}: {about}', '  ')}\n" for family, about in FAMILIES.items())
    return f"{INTRO}\n## By family\n\n{families}\n{BY_NAME}{table}"


def with_layouts(path: str, sections: Iterable[str]) -> str:
    """The page, its layouts written again."""
    found = "\n".join(["## Its layouts\n", "[How to read them](../layouts.md).\n", *sections])
    text, count = _LAYOUTS.subn(lambda _: found, (DOCS / path).read_text())
    assert count == 1, path
    return text


def wrapped(text: str, indent: str = "") -> str:
    """Prose in lines of at most 118 characters, all but the first indented."""
    return "\n".join(wrap(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))


def _table(by_family: Mapping[str, Sequence[Sequence[Made]]]) -> str:
    """Files in order, each with the one section that has it, or the pages; those of the same place in one line."""
    found: dict[str, list[tuple[str, str]]] = {}
    for family, groups in by_family.items():
        for group in groups:
            for name in {pattern(path.rpartition("/")[2]) for path in files_of(group[0])}:
                found.setdefault(name, []).extend([(family, _heading(group))] * len(group))
    places: dict[str, list[str]] = {}
    for name in sorted((name for name in found if not OF_CHANCE.fullmatch(name)), key=_order):
        places.setdefault(_links(found[name]), []).append(f"`{name}`")
    return "".join(wrapped(f"- {', '.join(names)}: {links}", "  ") + "\n" for links, names in places.items())


def _links(sections: Sequence[tuple[str, str]]) -> str:
    if len({*sections}) == 1:
        return _link(*sections[0])
    return ", ".join(map(_link, dict.fromkeys(family for family, _ in sections)))


def _order(name: str) -> tuple[str, str]:
    return name.lstrip("._").lower(), name


def _link(family: str, heading: str = "") -> str:
    """A link from the index to a family's page, or to a section of it."""
    return f"[{heading}]({PAGES[family]}#{heading.replace(' ', '-')})" if heading else f"[{family}]({PAGES[family]})"


def _heading(group: Sequence[Made]) -> str:
    first = group[0].layout.name
    return first if len(group) == 1 else f"{first} and {len(group) - 1} more"


def _section(group: Sequence[Made]) -> str:
    """Layouts with the same files: the files once, then each layout and its outcome, and what holds for all of them."""
    lines = [f"### {_heading(group)}", "", shown_files(group[0]), ""]
    shared = [each for each in facts(group[0]) if len(group) > 1 and all(each in facts(made) for made in group)]
    lines += (_item(made, [each for each in facts(made) if each not in shared]) for made in group)
    of_all = wrapped(" ".join(map(of_all_in, shared)))
    return "\n".join([*lines, *(["", of_all] if of_all else [])]).rstrip() + "\n"


def facts(made: Made) -> list[str]:
    """Whether the layout is a stand-in, what opening it gives, and what can be done with it; a refusal is none."""
    layout = made.layout
    found = [] if layout.is_real else ["(A stand-in.)"]
    if layout.refusal is None:
        what = "" if made.state.optimizer else ", weights alone"
        as_what = "" if layout.opens_as == FORMATS.get(_page(made)) else f" as `{layout.opens_as}`"
        found += [f"**Opens{as_what}**{_where(made)}{what}."] if as_what + _where(made) + what else []
    advice = _OF_ALL.sub("", layout.advice) if layout.refusal is None else ""
    found.append(advice[:1].upper() + advice[1:])
    names = ", ".join(f"`{each}`" for each in layout.optional)
    found.append(names and f"Not needed: {names}.")
    return [each for each in found if each]


def about(made: Made) -> str:
    return f"- **{made.layout.name}**: {_OF_FILES.sub('', made.layout.about)}"


def of_all_in(fact: str) -> str:
    """A fact of all layouts of a section."""
    return fact.replace("(A stand-in.)", "All are stand-ins.").replace("**Opens", "**All open")


def _where(made: Made) -> str:
    is_plain = made.layout.source == "." or len(files_of(made)) == 1
    return "" if is_plain else f" from `{made.layout.source}`"


def _item(made: Made, its_facts: Sequence[str]) -> str:
    """Who writes the layout, what a refusal says to do, and the facts that are its own."""
    layout = made.layout
    refused = [] if layout.refusal is None else [f"**Refused**{_where(made)}: {message(made)}."]
    before = [each for each in its_facts if each.startswith("(")]
    after = [each for each in its_facts if each not in before]
    return wrapped(" ".join([about(made), *before, *refused, *after]), "  ")


def message(made: Made) -> str:
    """What to do by the advice, else by the error, or all that the error says if it names no way out."""
    if made.layout.name in ADVISED:
        return made.layout.advice[:1].lower() + made.layout.advice[1:].removesuffix(".")
    with use_command_line_spelling(), pytest.raises(CkptError) as refused:
        ckpt_tools.inspect(made.source)
    said = str(refused.value).replace(f"{made.folder}/", "").replace(str(made.folder), ".")
    return said.removeprefix(".: ").rpartition("; ")[2].replace("*", "\\*")


def files_of(made: Made) -> list[str]:
    """The files of the source, and those in the folders above it."""
    above = {made.source, *(made.folder / each for each in Path(made.layout.source).parents)}
    shown = (each for each in made.folder.rglob("*") if each.is_relative_to(made.source) or each.parent in above)
    files = (each.relative_to(made.folder).as_posix() for each in shown if each.is_file())
    return sorted(path for path in files if path not in OF_TESTS)


def pattern(name: str) -> str:
    """A file's name with letters for numbers: ``__N_M.distcp``."""
    letters = iter("NMKLPQ" * 8)
    return _NUMBER.sub(lambda _: next(letters), _HASH.sub("HASH", name))


@dataclass(slots=True)
class Folder:
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
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, inner in folder.folders.items():
        groups.setdefault(tuple(_lines(inner, indent + "    ")), []).append(f"{name}/")
    for lines, names in groups.items():
        more = f"{names[0]}    and {len(names) - 1} more directories with the same files"
        yield indent + (more if len(names) > MAX_NAMED else "  ".join(names))
        yield from lines
    yield from (indent + line for line in _names(folder.files))


def _names(names: Sequence[str]) -> Iterator[str]:
    """Names that differ in numbers alone are one line."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern(name), []).append(name)
    yield from map(_joined, groups.values())


def _joined(names: Sequence[str]) -> str:
    """``__N_0.distcp`` of ``__0_0.distcp`` and ``__1_0.distcp``: the numbers that differ become letters."""
    plain = [_HASH.sub("HASH", name) for name in names]
    columns = list(zip(*(_NUMBER.findall(name) for name in plain), strict=True))
    letters = iter("NMKLPQ" * 8)
    values = iter([column[0] if len({*column}) == 1 else next(letters) for column in columns])
    return _NUMBER.sub(lambda _: next(values), plain[0])
