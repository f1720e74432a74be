"""Generates docs/layouts.md and docs/layouts/ from the corpus: "I have these files: what is it, what can I do?"

The pages are the same on every machine: names of files, counts of tensors and messages, no sizes, times or paths.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap

import pytest

import ckpt_tools
from ckpt_tools.core.option_names import on_command_line
from ckpt_tools.core.wording import count
from ckpt_tools.errors import CkptError
from fixtures.corpus import layouts, make
from fixtures.corpus.layout import Made

DOCS = Path(__file__).parent.parent.parent / "docs"
INDEX = "layouts.md"
FOLDER = "layouts"

INTRO = """# Layouts

You have files and want to know what they are, and what you can do with them. These pages show every layout that the
tests of ckpt-tools know: its files, who writes it, and how ckpt-tools opens it, or the message that refuses it.

Each layout is made by its real writer in the tests. If it opens, every tensor is compared bit by bit with what the
framework itself holds. If its writer does not run in the tests, the layout is made from its documentation and marked
as a stand-in.

Start with the first two of these commands.

| command | what it does |
|---|---|
| `ckpt-tools inspect PATH` | says what you have: format, step, parameters, optimizer. \
PATH is a file, or the folder of one checkpoint |
| `ckpt-tools ls RUN` | lists the checkpoints of a run and says whether each is complete ([runs](runs.md)). \
`RUN@latest` names the newest complete one in every command |
| `ckpt-tools convert PATH OUT --to FORMAT` | writes another format: `dcp`, `zero1`, `zero2`, `zero3`, `universal`, \
`sharded` or `megatron` to continue training, `safetensors`, `torch`, `gguf` or `npz` for the model |
| `ckpt-tools reshard PATH OUT --world-size N` | writes the same format for another number of ranks |
| `ckpt-tools consolidate PATH model.safetensors` | writes the model's weights as one file |
| `ckpt-tools scan PATH` | says whether loading the files could run code ([scanning](scanning.md)) |

[The command line](cli.md) has all options, and the [glossary](glossary.md) explains the words. In the names below, `N`
and `M` stand for numbers, such as that of a rank, and `HASH` for random letters and digits.
"""

BY_NAME = """## Find it by a file's name

If many layouts have a file, their pages are named, with the number of layouts that have it.

"""

FAMILIES = {
    "Hugging Face and Lightning": "Folders of transformers, accelerate and PEFT, and Lightning's `.ckpt`, where one "
    "process or DDP wrote them, or FSDP gathered the whole state ([Hugging Face](formats/huggingface.md)).",
    "PyTorch": "What torch and safetensors write themselves ([DCP](formats/dcp.md), [torch files](formats/torch.md)).",
    "Variants of DCP": "`torch.distributed.checkpoint` with other settings than its defaults ([DCP](formats/dcp.md)).",
    "Trainers around DCP": "Folders of trainers that save through `torch.distributed.checkpoint` "
    "([which trainers](formats/dcp.md#a-trainers-folder-is-given-back)).",
    "Files of ranks": "A `torch.save` file a rank, each with its part of every tensor ([sharded](formats/sharded.md)).",
    "DeepSpeed": "Folders of `save_checkpoint` ([DeepSpeed](formats/deepspeed.md)) and universal checkpoints "
    "([universal](formats/universal.md)).",
    "Megatron": "Folders of Megatron-LM and of what is built on it ([Megatron](formats/megatron.md)).",
    "nanotron": "Folders of Hugging Face's nanotron ([nanotron](formats/nanotron.md)).",
    "Quantized weights": "Models whose weights are packed. The tensors are copied as they are.",
    "llama.cpp": "[GGUF](formats/gguf.md) files.",
    "MLX": "Models of Apple's MLX ([MLX](formats/mlx.md)).",
    "JAX": "Folders of Orbax ([Orbax](formats/orbax.md)). Reading them needs `pip install ckpt-tools[orbax]`.",
    "numpy": "Arrays ([npz](formats/npz.md)).",
    "Other frameworks": "Known, and not read.",
}
"""The pages in their order, each with its introduction; links are relative to docs/."""

MAX_LINKS = 6
"""Links of a file in the table; if more layouts have it, their pages are linked."""

OF_TESTS = ("order.txt", "slots.pt")
"""Files that the tests add to a layout."""

OF_CHANCE = re.compile(r"HASH|[NM](?:\.[NM])*|README\.md")
"""Names that identify no layout."""

MIN_ALIKE = 3
"""Folders with the same files are shown as one from this number on."""

_HASH = re.compile(r"[0-9a-f]{16,}")
_NUMBER = re.compile(r"(?<!\d)(?<!fp)(?<!bf)(?<!\.h)(?<!\.pt)\d+")
"""Those that count something, unlike those of ``fp32``, ``bf16``, ``.h5`` and ``.pt2``."""


def pages() -> dict[str, str]:
    """Every page by its path in docs/. Makes every layout that is not in the cache."""
    every = [make(name) for name in layouts()]
    by_family = {family: [made for made in every if made.layout.family == family] for family in FAMILIES}
    assert sum(map(len, by_family.values())) == len(every), "each layout is of a family that has a page"
    return {INDEX: index(_table(every))} | {
        page_of(family): family_page(family, map(_section, found)) for family, found in by_family.items()
    }


def page_of(family: str) -> str:
    """The path of a family's page in docs/."""
    return f"{FOLDER}/{family.lower().replace(' ', '-').replace('.', '-')}.md"


def index(table: str) -> str:
    """docs/layouts.md, with the table of files."""
    families = "".join(f"{wrapped(f'- {_link(family)}: {about}', '  ')}\n" for family, about in FAMILIES.items())
    return f"{INTRO}\n## By family\n\n{families}\n{BY_NAME}{table}"


def family_page(family: str, sections: Iterable[str]) -> str:
    """The page of one family, with its sections."""
    about = wrapped(FAMILIES[family].replace("](formats/", "](../formats/"))
    return "\n".join([f"# {family}\n", f"{about}\n", "[All layouts](../layouts.md).\n", *sections])


def wrapped(text: str, indent: str = "") -> str:
    """Prose in lines of at most 118 characters, all but the first indented."""
    return "\n".join(wrap(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))


def _table(every: Sequence[Made]) -> str:
    found: dict[str, list[Made]] = {}
    for made in every:
        for name in dict.fromkeys(pattern(path.rpartition("/")[2]) for path in files_of(made)):
            found.setdefault(name, []).append(made)
    names = sorted((name for name in found if not OF_CHANCE.fullmatch(name)), key=_order)
    return "| file | layouts |\n|---|---|\n" + "".join(f"| `{name}` | {_links(found[name])} |\n" for name in names)


def _links(found: Sequence[Made]) -> str:
    """Links to the layouts, or to the families of many."""
    if len(found) <= MAX_LINKS:
        return ", ".join(_link(made.layout.family, made.layout.name) for made in found)
    counts = Counter(made.layout.family for made in found)
    return ", ".join(f"{_link(family)} ({counts[family]})" for family in FAMILIES if counts[family])


def _order(name: str) -> tuple[str, str]:
    return name.lstrip("._").lower(), name


def _link(family: str, layout: str = "") -> str:
    """A link from the index to a family's page, or to a layout on it."""
    return f"[{layout}]({page_of(family)}#{layout})" if layout else f"[{family}]({page_of(family)})"


def _section(made: Made) -> str:
    layout = made.layout
    lines = [f"## {layout.name}", "", wrapped(layout.about + ("" if layout.is_real else " (A stand-in.)")), ""]
    lines += ["```", *tree(files_of(made)), "```", "", _outcome(made)]
    if layout.advice:
        lines += ["", wrapped(layout.advice)]
    if layout.optional:
        names = ", ".join(f"`{each}`" for each in layout.optional)
        lines += ["", wrapped(f"It can be read without {names} too, and then lacks their content.")]
    return "\n".join(lines) + "\n"


def _outcome(made: Made) -> str:
    layout = made.layout
    where = "" if layout.source == "." else f" from `{layout.source}`"
    if layout.refusal is not None:
        return f"**Refused**{where}:\n\n```\n{message(made)}\n```"
    weights = count(len(made.state.weights), "weight")
    state = count(len(made.state.optimizer), "tensor")
    optimizer = f" and {state} of the optimizer" if made.state.optimizer else ""
    return f"**Opens as `{layout.opens_as}`**{where}, with {weights}{optimizer} in this example."


def message(made: Made) -> str:
    """The error message of the command line."""
    with on_command_line(), pytest.raises(CkptError) as refused:
        ckpt_tools.inspect(made.source)
    said = str(refused.value).replace(f"{made.folder}/", "").replace(str(made.folder), ".")
    return wrapped(said)


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
    """Content of a folder."""

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
        if "HASH" in form:  # How many there are is chance too.
            yield f"{_joined(group)}    (one file or more)"
        else:
            yield group[0] if len(group) == 1 else f"{_joined(group)}    ({count(len(group), 'file')})"


def _joined(names: Sequence[str]) -> str:
    """``__N_0.distcp`` of ``__0_0.distcp`` and ``__1_0.distcp``: the numbers that differ become letters."""
    plain = [_HASH.sub("HASH", name) for name in names]
    columns = list(zip(*(_NUMBER.findall(name) for name in plain), strict=True))
    letters = iter("NMKLPQ" * 8)
    values = iter([column[0] if len({*column}) == 1 else next(letters) for column in columns])
    return _NUMBER.sub(lambda _: next(values), plain[0])
