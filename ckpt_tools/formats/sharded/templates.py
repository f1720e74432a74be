"""Files of the same item of a checkpoint, told by their names: the same but for the rank in them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

from ckpt_tools.trainers.names import rank_file

RANK, WORLD = "{rank}", "{world}"

_NUMBER = re.compile(r"\d{1,9}")
_OF_THE_RANK = re.compile(
    r"[-_.]*(?:world_size[-_.]*\{world\}[-_.]*)?(?:(?:dp|fsdp|mp|global)?[-_.]*rank)?[-_.]*\{rank\}"
)


def by_template(ranks: Mapping[str, int]) -> dict[str, list[str]]:
    """Files, whose ranks are known, by their names with the rank left out. A number that equals the rank may be another
    thing: what most files agree on is taken, the last one if that does not decide."""
    options = {path: _templates(path.rpartition("/")[2], {rank}) for path, rank in ranks.items()}
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
        for template, number in _templates(path.rpartition("/")[2], ranks):
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
    known = rank_file(name)
    spans = [known.span("rank")] if known else [match.span() for match in _NUMBER.finditer(name)]
    return [(name[:a] + RANK + name[b:], int(name[a:b])) for a, b in spans if int(name[a:b]) in ranks]


def without_world(template: str, world: int) -> str:
    """A template whose world size, if it says one, is left out too."""
    return template.replace(f"world_size_{world}_rank_{RANK}", f"world_size_{WORLD}_rank_{RANK}")


def label(template: str) -> str:
    """Label of an item: the template without the rank and the ending."""
    known = rank_file(template.replace(RANK, "0"))
    if known is not None and known.groupdict().get("index", "") in (None, "0"):
        return "model" if known["item"] == "pytorch_model_fsdp" else "optimizer"
    stem = template.rpartition(".")[0] or template
    return _OF_THE_RANK.sub("", re.sub(r"world_size_\d+", f"world_size_{WORLD}", stem), count=1).strip("-_.") or "state"
