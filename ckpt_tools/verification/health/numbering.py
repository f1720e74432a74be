"""Layers, experts and adapters that are missing, as the numbers in the tensors' own names show it. Pure.

A group of layers is what lies below a name such as ``model.layers``, the outermost one with a number behind it. Its
items are layers if most of them have modules of their own: ``layers.0`` and ``layers.2`` of ``nn.Sequential(Linear,
ReLU, Linear)`` have none, and ``layers.1`` is not missing there. Nor do those of convolutional networks count, whose
blocks differ and may have no parameters. A gap is a finding where ``config.json`` counts more layers, or where three of
four are alike.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.names import zero_numbers
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.verification.health.report import HealthFinding, HealthRule

_LAYER_GROUP = re.compile(r"(?:.*\.)?(?:layers?|h|\w*blocks?|\w+_layers)")
_OTHER_TOWER = re.compile(r"vis|image|audio|speech|draft|mtp")
_EXPERT = re.compile(r"((?:.*\.)?\w*experts)\.(?:expert_)?(\d+)\.(.+)")
_LORA_PART = re.compile(r"(?<=\.)(lora_(?:embedding_)?)(A|B|a|b|down|up)(?=\.|$)")
_LORA_PARTNERS = {"A": "B", "B": "A", "a": "b", "b": "a", "down": "up", "up": "down"}

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CONFIG_SECTIONS = ("text_config", "llm_config", "language_config")

MIN_COMPARED_LAYERS = 4
"""Of fewer layers none is the rule."""

RARE_SHARE = 10
"""One in so many layers may be the exception that is reported."""


class ExpertId(NamedTuple):
    """The experts of one layer by their name, and the number of one of them."""

    group: str
    number: int


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one name: for each number the rest of its tensors' names, without their numbers."""

    name: str
    rests_by_number: Mapping[int, frozenset[str]]

    @property
    def usual(self) -> tuple[frozenset[str], int]:
        """Parts that most layers have, and the number of layers with them."""
        return Counter(self.rests_by_number.values()).most_common(1)[0]

    @property
    def has_modules(self) -> bool:
        num_with_modules = sum(any("." in rest for rest in rests) for rests in self.rests_by_number.values())
        return 2 * num_with_modules > len(self.rests_by_number)

    @property
    def is_convolutional(self) -> bool:
        """Whether an item has a batch norm, as those of convolutions have."""
        return any(rest.endswith("running_mean") for rests in self.rests_by_number.values() for rest in rests)


def parse_expert(name: str) -> tuple[ExpertId, str] | None:
    """The expert that a tensor is of, and the rest of its name; None if its name numbers none."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else (ExpertId(match[1], int(match[2])), match[3])


def find_fused_group(name: str, shape: Shape) -> str | None:
    """The name of the experts whose matrices are the rows of a tensor; None if its rows are something else."""
    parts = name.split(".")
    ends = [end for end, part in enumerate(parts, 1) if part.endswith("experts") and "shared" not in part]
    return ".".join(parts[: ends[-1]]) if ends and len(shape) == 3 and parse_expert(name) is None else None


def is_lora_name(name: str) -> bool:
    return _LORA_PART.search(f".{name}") is not None


def find_missing_parts(shapes: Mapping[str, Shape], config: Mapping[str, Any] | None) -> Iterator[HealthFinding]:
    """Findings of what these names lack. ``config`` is the content of ``config.json``, if there is one."""
    base_names = [name for name in shapes if not is_lora_name(name)]
    groups = group_layers(base_names)
    num_layers, num_experts = (find_config_count(config or {}, keys) for keys in (LAYER_KEYS, EXPERT_KEYS))
    main_group = _find_main_group(groups, config or {}, num_layers or 0)
    for group in groups:
        if group.is_convolutional:
            continue
        yield from _find_missing_layers(group, num_layers if group is main_group else None)
        yield from _find_layers_without(group)
    if len(base_names) < len(shapes):
        yield from _find_missing_pairs(shapes)
    yield from _find_missing_experts(base_names, num_experts)
    for name, shape in shapes.items():
        if num_experts is None or _OTHER_TOWER.search(name) or find_fused_group(name, shape) is None:
            continue
        if shape[0] < num_experts:
            what = f"it has {format_count(shape[0], 'expert')} of the {num_experts:,} that config.json says"
            yield HealthFinding(HealthRule.MISSING_EXPERT, name, what, value=num_experts - shape[0])


def find_config_count(config: Mapping[str, Any], keys: Collection[str]) -> int | None:
    """The first of ``keys`` that has a whole number in the section of the text model, or else in ``config.json``."""
    sections = (*(config.get(name) for name in _CONFIG_SECTIONS), config)
    values = (section.get(key) for section in sections if isinstance(section, Mapping) for key in keys)
    return next((value for value in values if type(value) is int), None)


def group_layers(names: Collection[str]) -> list[LayerGroup]:
    rests: dict[str, dict[int, set[str]]] = {}
    for name in names:
        parts = name.split(".")
        position = next((at for at, part in enumerate(parts) if part.isdecimal()), 0)
        group = ".".join(parts[:position])
        if _LAYER_GROUP.fullmatch(group):
            rest = zero_numbers(".".join(parts[position + 1 :]))
            rests.setdefault(group, {}).setdefault(int(parts[position]), set()).add(rest)
    groups = (LayerGroup(name, {n: frozenset(each) for n, each in items.items()}) for name, items in rests.items())
    return [group for group in groups if group.has_modules]


def _find_main_group(groups: Collection[LayerGroup], config: Mapping[str, Any], num_layers: int) -> LayerGroup | None:
    """The layers that the number in ``config.json`` is of: the most numerous ones, without towers of other inputs. None
    if it may be that of several together, or of blocks of convolutions."""
    # The number of an encoder with a decoder is that of either.
    candidates = [each for each in groups if not _OTHER_TOWER.search(each.name)]
    candidates = list(groups) if config.get("is_encoder_decoder") is True else candidates or list(groups)
    counts = [len(each.rests_by_number) for each in candidates]
    if any(each.is_convolutional for each in groups) or max(counts, default=0) < num_layers <= sum(counts):
        return None
    return max(candidates, key=lambda each: len(each.rests_by_number), default=None)


def _find_missing_layers(group: LayerGroup, num_layers: int | None) -> Iterator[HealthFinding]:
    numbers = group.rests_by_number.keys()
    is_uniform = 4 * group.usual[1] >= 3 * len(numbers)
    if not is_uniform and len(numbers) >= (num_layers or 0):
        return
    expected = max(num_layers or 0, max(numbers) + 1)
    missing = [number for number in range(expected) if number not in numbers]
    if missing:
        known = "config.json says" if num_layers == expected else "their numbers show"
        what = f"{_format_numbers('layer', missing)} of the {expected:,} that {known}"
        yield HealthFinding(HealthRule.MISSING_LAYER, group.name, what, value=len(missing))


def _format_numbers(noun: str, numbers: Collection[int]) -> str:
    ending, verb = ("", "is") if len(numbers) == 1 else ("s", "are")
    return f"{noun}{ending} {join_names(list(map(str, numbers)))} {verb} missing"


def _find_layers_without(group: LayerGroup) -> Iterator[HealthFinding]:
    """Layers with a part of the tensors that more than half of them have. The first and the last one may be others:
    ModernBERT's first has no norm, Swin's last no downsampling."""
    rests_by_number = group.rests_by_number
    counts, (usual, num_usual) = Counter(rests_by_number.values()), group.usual
    if len(rests_by_number) < MIN_COMPARED_LAYERS or 2 * num_usual <= len(rests_by_number):
        return
    for number in sorted(rests_by_number)[1:-1]:
        rests = rests_by_number[number]
        if rests < usual and counts[rests] <= max(1, len(rests_by_number) // RARE_SHARE):
            lacking = sorted(usual - rests)
            what = f"it lacks {join_names(lacking)}, which {num_usual:,} of {len(rests_by_number):,} layers have"
            yield HealthFinding(HealthRule.MISSING_TENSOR, f"{group.name}.{number}", what, value=len(lacking))


def _find_missing_experts(names: Collection[str], num_experts: int | None) -> Iterator[HealthFinding]:
    groups: dict[str, dict[int, set[str]]] = {}
    for name in names:
        if (parsed := parse_expert(name)) is not None:
            groups.setdefault(parsed[0].group, {}).setdefault(parsed[0].number, set()).add(parsed[1])
    usual_counts: dict[str, Counter[int]] = {}
    for name, experts in groups.items():
        usual_counts.setdefault(zero_numbers(name), Counter())[max(experts) + 1] += 1
    for name, experts in groups.items():
        usual = usual_counts[zero_numbers(name)].most_common(1)[0][0]
        is_main = not _OTHER_TOWER.search(name)
        expected = max((num_experts if is_main else None) or usual, max(experts) + 1)
        missing = [number for number in range(expected) if number not in experts]
        if missing:
            what = f"{_format_numbers('expert', missing)} of {expected:,}"
            yield HealthFinding(HealthRule.MISSING_EXPERT, name, what, value=len(missing))
        all_rests = frozenset[str]().union(*experts.values())
        for number, rests in sorted(experts.items()):
            if rests != all_rests:
                what = f"it lacks {join_names(sorted(all_rests - rests))}, which others have"
                yield HealthFinding(HealthRule.MISSING_EXPERT, f"{name}.{number}", what)


def _find_missing_pairs(names: Collection[str]) -> Iterator[HealthFinding]:
    for name in names:
        match = _LORA_PART.search(f".{name}")
        if match is None or name.endswith(".bias"):
            continue
        start, stop = match.start(2) - 1, match.end(2) - 1
        partner = f"{name[:start]}{_LORA_PARTNERS[match[2]]}{name[stop:]}"
        if partner not in names:
            yield HealthFinding(HealthRule.LORA_PAIR, name, f"there is no {partner}")
