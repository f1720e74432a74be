"""Names of the files of ranks: of which folder, of which item, of which rank.

Two programs name them in a way of their own, and their names alone are a sign: verl
(``model_world_size_2_rank_0.pt``, fsdp_checkpoint_manager.py) and accelerate (``pytorch_model_fsdp_0_rank0.bin``,
utils/fsdp_utils.py, accelerate 1.15.0). All others are known by what the files hold, and their names tell the items of
a checkpoint apart: the files of one item have the same name but for the rank in it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.names import TRAINERS_OWN

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

VERL = re.compile(r"(?P<item>[a-z_]+)_world_size_(?P<world>\d{1,9})_rank_(?P<rank>\d{1,9})\.pt")
ACCELERATE = re.compile(r"(?P<item>pytorch_model_fsdp|optimizer)(?:_(?P<index>\d{1,9}))?_rank(?P<rank>\d{1,9})\.bin")

MANAGER = "metadata.pkl"
"""The index of torch_checkpointing, beside its ``{item}_{rank}.pt``."""

RANK, WORLD = "{rank}", "{world}"

_NUMBER = re.compile(r"\d{1,9}")
_OF_THE_RANK = re.compile(
    r"[-_.]*(?:world_size[-_.]*\{world\}[-_.]*)?(?:(?:dp|fsdp|mp|global)?[-_.]*rank)?[-_.]*\{rank\}"
)


def is_candidate(path: str) -> bool:
    """Whether a file could be a rank's: one of torch's, and not one that is known to be a trainer's own."""
    name = base(path)
    is_trainers_own = any(fnmatchcase(name, pattern) for pattern in TRAINERS_OWN)
    return name.endswith(SUFFIXES) and (says_its_rank(path) or not is_trainers_own)


def base(path: str) -> str:
    return path.rpartition("/")[2]


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def says_its_rank(path: str) -> bool:
    """Whether the name alone says that a file is a rank's."""
    name = base(path)
    return VERL.fullmatch(name) is not None or ACCELERATE.fullmatch(name) is not None


def are_those_of_ranks(paths: Iterable[str]) -> bool:
    """Whether the names of the files at the top say that they are those of ranks: one alone could be a whole state."""
    return sum("/" not in path and says_its_rank(path) for path in paths) > 1


def folders(paths: Iterable[str]) -> list[str]:
    """Folders that hold files of ranks by their names."""
    found = [folder_of(path) for path in paths if says_its_rank(path)]
    return list(dict.fromkeys(found))


def worlds(paths: Iterable[str]) -> set[int]:
    """The world sizes that verl's names say."""
    return {int(found["world"]) for path in paths if (found := VERL.fullmatch(base(path)))}


def by_template(ranks: Mapping[str, int]) -> dict[str, list[str]]:
    """Files, whose ranks are known, by their names with the rank left out. A number that equals the rank may be another
    thing: what most files agree on is taken, the last one if that does not decide."""
    options = {path: _templates(base(path), {rank}) for path, rank in ranks.items()}
    counts = Counter(template for found in options.values() for template, _ in found)
    items: defaultdict[str, list[str]] = defaultdict(list)
    for path, found in options.items():
        template = max(reversed(found), key=lambda each: counts[each[0]])[0] if found else ""
        items[template].append(path)
    return dict(items)


def numbered(paths: Collection[str], ranks: Collection[int]) -> dict[str, dict[int, str]]:
    """Files whose ranks are not known by their content, by template and by the number in its place: those templates
    that have a file for some rank of ``ranks``. If two fit a file, the one that has more files is taken."""
    found: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for path in paths:
        for template, number in _templates(base(path), ranks):
            found[template][number] = path
    taken: set[str] = set()
    chosen = {}
    for template in sorted(found, key=lambda each: (-len(found[each]), -each.find(RANK))):
        files = {number: path for number, path in found[template].items() if path not in taken}
        if files:
            chosen[template] = files
            taken |= set(files.values())
    return chosen


def _templates(name: str, ranks: Collection[int]) -> list[tuple[str, int]]:
    """Every way to see one of ``ranks`` in a name."""
    known = VERL.fullmatch(name) or ACCELERATE.fullmatch(name)
    spans = [known.span("rank")] if known else [match.span() for match in _NUMBER.finditer(name)]
    return [(name[:a] + RANK + name[b:], int(name[a:b])) for a, b in spans if int(name[a:b]) in ranks]


def without_world(template: str, world: int) -> str:
    """A template whose world size, if it says one, is left out too."""
    return template.replace(f"world_size_{world}_rank_{RANK}", f"world_size_{WORLD}_rank_{RANK}")


def label(template: str) -> str:
    """What an item is called: the template without the rank and the ending."""
    known = ACCELERATE.fullmatch(template.replace(RANK, "0"))
    if known is not None and known["index"] in (None, "0"):
        return "model" if known["item"] == "pytorch_model_fsdp" else "optimizer"
    stem = template.rpartition(".")[0] or template
    return _OF_THE_RANK.sub("", re.sub(r"world_size_\d+", f"world_size_{WORLD}", stem), count=1).strip("-_.") or "state"


_KEYS = (b"version", b"world_size", b"metadata")
"""The keys of its dict."""

_END = 1 << 10
"""Bytes at the start and at the end, where they stand."""


def is_managed(source: Source, folder: str = "") -> bool:
    """Whether a folder has such an index; a file of this name can be anything."""
    path = f"{folder}/{MANAGER}" if folder else MANAGER
    if path not in source.files:
        return False
    size = source.size(path)
    ends = source.read(path, 0, min(size, _END)) + source.read(path, max(size - _END, 0), size)
    return all(sign in ends for sign in _KEYS)
