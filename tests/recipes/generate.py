"""Generator of the file of built-in recipes for transformers 5: live names (`state_dict()`) to hub names
(`save_pretrained`). `ckpt_tools.recipes.pages` says how it is written.

    python -m tests.recipes.generate

Each tiny model of tests/recipes/families.py gets a different number in every element, and transformers'
`revert_weight_conversion` says where each number goes. Names and shapes that change become the lines of a recipe;
model types with equal lines share a block.
"""

import importlib.metadata
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from tests.recipes import families

FILE = Path(__file__).parents[2] / "ckpt_tools" / "recipes" / "builtin" / "transformers.txt"
PREFIX, REST, EXPERT = "{prefix...}", "{rest...}", "{expert}"
NUMBERS = ("{layer}", "{block}", "{part}")

# Published files have these weights with the last two axes exchanged. `from_pretrained` reads both, by their shapes.
TRANSPOSED = {"qwen3_vl_moe": re.compile(r"mlp\.experts\.(gate_up|down)_proj$")}
# Names that a checkpoint of the family may lack: its configuration switches them, or has them in some layers alone.
VARIANTS = re.compile(r"lm_head|image_newline|weights_(in|out)|shared_expert|mlp\.gate_up_proj|\.bias$")
# Keys of configurations for the number of routed experts.
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Sizes of fields that differ, in the variables of the file.
HEADS = {
    "K": "config.linear_num_key_heads",
    "D": "config.linear_key_head_dim",
    "V": "config.linear_num_value_heads",
    "W": "config.linear_value_head_dim",
}
FIELDS = {"w1": "gate", "w3": "up"}

Name = tuple[str, ...]
"""The parts of a tensor's name, with `{layer}` and the like for numbers that vary."""
Array = npt.NDArray[np.int64]
Instance = tuple[dict[str, Array], dict[str, Array]]
"""Tensors of both sides that consist of the same elements."""


class NotExpressibleError(Exception):
    pass


@dataclass(frozen=True)
class Line:
    """One [[map]]: names and shapes on both sides, or no shapes for a rename."""

    left: tuple[tuple[Name, str], ...]
    right: tuple[tuple[Name, str], ...]
    literal: bool = False
    otherwise: bool = False

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """Names as the block has them: what both sides share before the first number is any prefix."""
        sides = [[name for name, _ in side] for side in (self.left, self.right)]
        shared = len(_common(itertools.chain(*sides)))
        numbers = [n for n, part in enumerate(sides[0][0]) if part.startswith("{") and part != REST]
        cut = 0 if self.literal else min(shared, numbers[0] - 1 if numbers else shared, *(len(n) - 1 for n in sides[0]))
        prefix = PREFIX if cut > 0 else ""
        return tuple([prefix + ".".join(name[max(cut, 0) :]) for name in side] for side in sides)  # type: ignore[return-value]


def _common(names: Iterable[Name]) -> Name:
    first, *others = names
    count = 0
    while all(len(other) > count and len(first) > count and other[count] == first[count] for other in others):
        count += 1
    return first[:count]


def trace(model: Any) -> list[Instance]:
    """The smallest groups of tensors, live and hub, that consist of the same elements."""
    live: dict[str, Array] = {}
    total = 0
    for name, tensor in model.state_dict().items():
        live[name] = np.arange(total, total + tensor.numel()).reshape(tensor.shape)
        total += tensor.numel()
    hub = {
        name: tensor.numpy().astype(np.int64)
        for name, tensor in revert_weight_conversion(
            model, {name: torch.from_numpy(array.astype(np.float64)) for name, array in live.items()}
        ).items()
    }
    if pattern := TRANSPOSED.get(model.config.model_type):
        hub = {name: array.swapaxes(1, 2) if pattern.search(name) else array for name, array in hub.items()}
    elements = np.sort(np.concatenate([array.ravel() for array in hub.values()]))
    if not np.array_equal(elements, np.arange(total)):
        raise NotExpressibleError(f"{model.config.model_type}: elements are lost or used twice")
    return _groups(live, hub)


def _groups(live: Mapping[str, Array], hub: Mapping[str, Array]) -> list[Instance]:
    names = list(live)
    starts = np.array([live[name].flat[0] for name in names])
    groups: dict[str, Instance] = {}
    for name, array in hub.items():
        owners = [names[n] for n in np.unique(np.searchsorted(starts, array.ravel(), side="right") - 1)]
        left: dict[str, Array] = {owner: live[owner] for owner in owners}
        right: dict[str, Array] = {name: array}
        for owner in owners:
            if owner in groups:
                left, right = groups[owner][0] | left, groups[owner][1] | right
        groups.update(dict.fromkeys(left, (left, right)))
    return list({id(group): group for group in groups.values()}.values())


def lines_of(instances: Sequence[Instance]) -> dict[Name, Line]:
    """A line for each live name, with `{layer}` for the numbers that both sides share."""
    alike = defaultdict(list)
    for left, right in instances:
        alike[tuple(frozenset(_template(name) for name in side) for side in (left, right))].append((left, right))
    lines: dict[Name, Line] = {}
    for group in alike.values():
        line = _line(group)
        for name, _ in line.left:
            if lines.setdefault(name, line) != line:
                raise NotExpressibleError(f"{name} has two maps")
    return lines


def _template(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "#", name)


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def _line(group: Sequence[Instance]) -> Line:
    """One line for tensors whose names differ in numbers alone."""
    values: dict[tuple[int, str], list[list[tuple[int, ...]]]] = {}
    for side in (0, 1):
        for template in dict.fromkeys(_template(name) for name in group[0][side]):
            values[side, template] = [
                [_numbers(name) for name in instance[side] if _template(name) == template] for instance in group
            ]
    # The numbers at each place, one for each instance; None where they vary within one: those of experts.
    columns: dict[tuple[int, str], list[tuple[int, ...] | None]] = {
        key: [
            None
            if any(len({row[place] for row in rows}) > 1 for rows in instances)
            else tuple(r[0][place] for r in instances)
            for place in range(key[1].split(".").count("#"))
        ]
        for key, instances in values.items()
    }
    shared: Counter[tuple[int, ...]] = Counter(column for column in next(iter(columns.values())) if column is not None)
    for other in columns.values():
        shared &= Counter(column for column in other if column is not None)
    names = {key: _name(key[1], columns[key], shared) for key in columns}
    shapes = {tuple(sorted(_shapes(*instance).items())) for instance in group}
    if len(shapes) > 1:
        raise NotExpressibleError(f"{names}: layers differ")
    texts = dict(shapes.pop())
    left, right = [[(name, texts.get(key, "")) for key, name in names.items() if key[0] == side] for side in (0, 1)]
    return Line(tuple(left), tuple(right))


def _name(template: str, columns: Sequence[tuple[int, ...] | None], shared: Counter[tuple[int, ...]]) -> Name:
    left, remaining, names = iter(columns), shared.copy(), iter(NUMBERS)
    parts = []
    for part in template.split("."):
        if part != "#":
            parts.append(part)
            continue
        column = next(left)
        if column is None:
            parts.append(EXPERT)
        elif remaining[column] > 0:
            remaining[column] -= 1
            parts.append(next(names))
        elif len(set(column)) == 1:
            parts.append(str(column[0]))
        else:
            raise NotExpressibleError(f"{template}: a number that the other side does not have")
    return tuple(parts)


def _shapes(left: Mapping[str, Array], right: Mapping[str, Array]) -> dict[tuple[int, str], str]:
    """Shapes of one instance, by side and template; none for a rename."""
    if len(left) == len(right) == 1 and np.array_equal(next(iter(left.values())), next(iter(right.values()))):
        return {}
    side = 0 if len(left) == 1 else 1
    whole, parts = (left, right) if side == 0 else (right, left)
    if len(whole) != 1:
        raise NotExpressibleError(f"{list(left)} to {list(right)}")
    ((name, array),) = whole.items()
    order = np.argsort(array, axis=None)
    ranks = {part: np.searchsorted(array.flat[order], numbers) for part, numbers in parts.items()}
    boxes = {part: _box(np.unravel_index(order[rank], array.shape), array.shape) for part, rank in ranks.items()}
    shape, written = _written(name, array.shape, boxes)
    return {(side, _template(name)): shape} | {(1 - side, _template(part)): text for part, text in written.items()}


Box = list[tuple[int, int, int]]
"""For each axis of the whole: the part's axis (-1: none), first index, length."""


def _box(indices: Sequence[Array], shape: Sequence[int]) -> Box:
    part = indices[0].shape
    varying = [[axis for axis in range(len(part)) if (index != index.take([0], axis)).any()] for index in indices]
    # Axes of one element vary nowhere: they keep their order.
    ones = iter([axis for axis in range(len(part)) if [axis] not in varying])
    box = []
    for index, axes, size in zip(indices, varying, shape, strict=True):
        first = int(index.flat[0])
        if len(axes) > 1:
            raise NotExpressibleError("not a box")
        if axes:
            along = [-1 if axis == axes[0] else 1 for axis in range(len(part))]
            if (index != first + np.arange(part[axes[0]]).reshape(along)).any():
                raise NotExpressibleError("not a box")
        axis = axes[0] if axes else next(ones, -1) if size == 1 else -1
        box.append((axis, first, part[axis] if axes else 1))
    return box


def _written(whole: str, shape: Sequence[int], boxes: Mapping[str, Box]) -> tuple[str, dict[str, str]]:
    """The shapes in the recipe's language: of the whole and of each part."""
    names = iter(("F", "C", "J"))
    axes: list[str] = []
    parts: dict[str, dict[int, str]] = {part: {} for part in boxes}
    for axis, size in enumerate(shape):
        ranges = {(box[axis][1], box[axis][2]) for box in boxes.values()}
        if size == 1:
            axes.append("1")
            for part, box in boxes.items():
                parts[part][box[axis][0]] = "1"
        elif all(box[axis][0] < 0 for box in boxes.values()):
            for part, box in boxes.items():
                if _numbers(part)[-1] != box[axis][1]:
                    raise NotExpressibleError(f"{part}: expert {box[axis][1]}")
            axes.append(EXPERT)
        elif ranges == {(0, size)}:
            known = {families.TEXT["hidden_size"]: "H"} if "H" not in axes else {}
            known |= {families.EXPERTS["num_experts"]: "E"} if axis == 0 else {}
            axes.append(known.get(size) or next(names))
            for part, box in boxes.items():
                parts[part][box[axis][0]] = axes[-1]
        else:
            fields = {box[axis][1]: (_field(part), box[axis][2]) for part, box in boxes.items()}
            axes.append(_record(whole, dict(fields[first] for first in sorted(fields))))
            for part, box in boxes.items():
                parts[part][box[axis][0]] = _field(part)
    written = {part: " ".join(tokens[axis] for axis in sorted(tokens)) for part, tokens in parts.items()}
    return " ".join(axes), written


def _field(name: str) -> str:
    part = [part for part in name.split(".") if part not in ("weight", "bias")][-1]
    return FIELDS.get(part, part.split("_")[0])


def _record(whole: str, fields: Mapping[str, int]) -> str:
    """Fields one after the other, of one size or of the heads of a linear attention.

    `revert_weight_conversion` cuts q, k and v into thirds; in published models v is larger.
    """
    if "linear_attn.conv1d" in whole:
        return "(q:K*D k:K*D v:V*W)"
    if len(set(fields.values())) > 1:
        raise NotExpressibleError(f"sizes of {fields}")
    return "(" + " ".join(f"{field}:N" for field in fields) + ")"


def ordered(lines: Mapping[Name, Line], narrow: Collection[Name]) -> list[Line]:
    """Lines as few as possible: what names below a node have in common is one line."""
    return list(dict.fromkeys(_subtree((), dict(lines), (), narrow)))


def _subtree(node: Name, lines: Mapping[Name, Line], default: Name, narrow: Collection[Name]) -> list[Line]:
    """Lines for the names below `node`, which go to the same below `default` if no line names them.

    `narrow`: nodes for which one line would say too much.
    """
    targets = {name: _target(node, name, line) for name, line in lines.items()}
    counts = Counter(targets.values())
    if set(counts) == {default}:
        return []
    if len(lines) == 1:
        return list(lines.values())
    followers = defaultdict(list)
    for name, target in targets.items():
        if target:
            followers[target].append(name)
    common, names = max(followers.items(), key=lambda item: len(item[1]), default=((), []))
    # Higher up than where these names part, a line would say more than they do, but for a module that only moves.
    apart = len({name[len(node)] for name in names}) > 1 or common[-1:] == node[-1:]
    is_all = len(names) == len(lines)
    # Of two lines with exceptions, one inside the other, both would be `otherwise`.
    is_nested = default != node
    outer = bool(node) and node not in narrow and common != default and apart and (is_all or not is_nested)
    outer = outer and len(names) > counts[default]
    inner = common if outer else default
    below: dict[str, dict[Name, Line]] = defaultdict(dict)
    for name, line in lines.items():
        below[name[len(node)]][name] = line
    found = [line for part, sub in below.items() for line in _subtree((*node, part), sub, (*inner, part), narrow)]
    wide = Line((((*node, REST), ""),), (((*common, REST), ""),), otherwise=bool(found))
    return [*found, wide] if outer else found


def _target(node: Name, name: Name, line: Line) -> Name | None:
    """The new name of `node` if the rest of the name below it stays; else None."""
    rest = name[len(node) :]
    if any(shape for _, shape in line.left) or len(line.right) > 1:
        return None
    right = line.right[0][0]
    return right[: len(right) - len(rest)] if right[len(right) - len(rest) :] == rest else None


@dataclass(frozen=True)
class Recipe:
    """Lines and ties. `is_counted`: each stacked tensor has as many experts as config.json says."""

    lines: tuple[Line, ...]
    tied: tuple[tuple[str, str], ...]
    is_counted: bool

    @property
    def shapes(self) -> list[str]:
        return [shape for line in self.lines for _, shape in line.left if shape]

    @property
    def is_stacked(self) -> bool:
        return any(EXPERT in shape for shape in self.shapes)

    def sizes(self, models: Sequence[str]) -> dict[str, str]:
        """Variables that config.json tells: those that shapes cannot, and those that tell a wrong checkpoint."""
        heads = HEADS if any("K*D" in shape for shape in self.shapes) else {}
        hidden = {"H": "config.hidden_size"} if TRANSPOSED.keys() & set(models) else {}
        keys = [key for model in models for key in _expert_keys(model)] if self.is_counted else []
        experts = {"expert": " | ".join(f"config.{key}" for key in dict.fromkeys(keys))} if keys else {}
        return heads | hidden | experts


def _expert_keys(family: str) -> list[str]:
    """The keys of config.json for the number of experts of the family's tensors: today's and earlier ones."""
    plain = type(families.config(family).get_text_config())()
    names = plain.attribute_map
    (own,) = (key for key in EXPERT_KEYS if key in plain.to_dict())
    return [key for key in EXPERT_KEYS if names.get(key, key) == own]


def recipe_of(family: str) -> Recipe:
    model = families.build(family, tie_word_embeddings=False)
    instances = trace(model)
    lines = lines_of(instances)
    number = re.compile(r"experts\.(\d+)\.")
    literal: set[Name] = set()
    narrow: set[Name] = set()
    while True:
        found = [replace(line, literal=line.left[0][0] in literal) for line in ordered(lines, narrow)]
        wrong = _misread(found, lines)
        if wrong is None:
            stacked = ([match[1] for name in right if (match := number.search(name))] for _, right in instances)
            num_experts = {max(map(int, numbers)) + 1 for numbers in stacked if numbers}
            return Recipe(tuple(found), _tied(model, lines), num_experts == {families.EXPERTS["num_experts"]})
        name = wrong.left[0][0]
        if wrong.literal and (name[-1] != REST or name[:-1] in narrow):
            raise NotExpressibleError(f"{name} takes names of others")
        if wrong.literal:
            narrow.add(name[:-1])
        literal.add(name)


def _misread(found: Sequence[Line], lines: Mapping[Name, Line]) -> Line | None:
    """A line that takes a name in one direction and gives it a name that is not its own."""
    for line in lines.values():
        sides = [[".".join(name) for name, _ in side] for side in (line.left, line.right)]
        for side, name in [(0, name) for name in sides[0]] + [(1, name) for name in sides[1]]:
            matches = [(each, read) for each in found if (read := _read(each, side, name))]
            plain = [match for match in matches if not match[0].otherwise] or matches
            if not plain and name not in sides[1 - side]:
                raise NotExpressibleError(f"{name} stays")
            wrong = [each for each, read in plain if read != sides[1 - side]]
            if not wrong and len({str(each.names) for each, _ in plain}) > 1:
                wrong = [min((each for each, _ in plain), key=lambda each: len(each.names[side][0]))]
            if wrong:
                return wrong[0]
    return next((line for line in found if not line.literal and _reads_other_side(line, lines)), None)


def _reads_other_side(line: Line, lines: Mapping[Name, Line]) -> bool:
    """True if the line takes names of the side that it leads to: twice the same recipe would then do harm."""
    both = [{".".join(name) for each in lines.values() for name, _ in (each.left, each.right)[side]} for side in (0, 1)]
    return any(_read(line, side, name) for side in (0, 1) for name in both[1 - side] - both[side])


def _read(line: Line, side: int, text: str) -> list[str] | None:
    """The other side's names for one of this side's; `{layer}` stands for itself."""
    names = line.names
    for name in names[side]:
        pattern = (
            re.escape(name).replace(r"\{prefix\.\.\.\}", "(?P<prefix>.*)").replace(r"\{rest\.\.\.\}", "(?P<rest>.*)")
        )
        if match := re.fullmatch(pattern, text):
            found = match.groupdict()
            return [
                n.replace(PREFIX, found.get("prefix", "")).replace(REST, found.get("rest", "")) for n in names[1 - side]
            ]
    return None


def _tied(model: Any, lines: Mapping[Name, Line]) -> tuple[tuple[str, str], ...]:
    """Hub names of the head and the embedding that it may share."""
    keys = getattr(model, "_tied_weights_keys", None) or {}
    found = []
    for head, embedding in keys.items():
        names = [tuple(name.split(".")) for name in (head, embedding)]
        if all(name in lines for name in names):
            found.append(tuple(".".join(lines[name].right[0][0]) for name in names))
    return tuple(found)  # type: ignore[arg-type]


def block_of(recipe: Recipe, models: Sequence[str]) -> str:
    block = [f'about = "{about(recipe, models)}"', _array("models", models)]
    if recipe.tied:
        block.append("tied = { " + ", ".join(f'"{head}" = "{embedding}"' for head, embedding in recipe.tied) + " }")
        by_default = []
        for name in models:
            # A configuration without the key means this: `config.json` leaves out what is the class's default.
            made = AutoConfig.for_model(name)
            if all(getattr(part, "tie_word_embeddings", False) is True for part in (made, made.get_text_config())):
                by_default.append(name)
        if by_default:
            block.append(_array("tied_by_default", by_default))
    block += [f'sizes.{name} = "{size}"' for name, size in recipe.sizes(models).items()]
    needed = [line for line in recipe.lines if _is_needed(line)] or recipe.lines
    block += dict.fromkeys(_map(line, optional=line not in needed) for line in recipe.lines)
    return "\n".join(block) + "\n"


def _array(key: str, values: Sequence[str]) -> str:
    quoted = [f'"{value}"' for value in values]
    return f"{key} = [{', '.join(quoted)}]"


def about(recipe: Recipe, models: Sequence[str]) -> str:
    what = "fused experts, which are one tensor each" if recipe.is_stacked else "names and shapes that differ"
    what = what if recipe.shapes else "names that differ"
    more = f" and {len(models) - 1} more" if len(models) > 1 else ""
    return f"{families.FAMILIES[models[0]].architecture if models else ''}{more}: {what} on the hub"


def _map(line: Line, optional: bool) -> str:
    sides = []
    for side, names in zip((line.left, line.right), line.names, strict=True):
        pairs = [f'"{name}" = "{shape}"' for name, (_, shape) in zip(names, side, strict=True)]
        sides.append("{ " + ", ".join(pairs) + " }" if any(shape for _, shape in side) else f'"{names[0]}"')
    return "optional " * optional + "otherwise " * line.otherwise + " -> ".join(sides)


def _is_needed(line: Line) -> bool:
    """False for a tensor that a variant may lack: a head, a bias, a part that the configuration switches."""
    wide = line.left[0][0][-1] == REST or bool(line.left[0][1])
    return wide and not any(VARIANTS.search(".".join(name)) for name, _ in (*line.left, *line.right))


def generate() -> str:
    """The text of the file."""
    groups: dict[tuple[str, bool], tuple[Recipe, list[str]]] = {}
    for family in families.FAMILIES:
        recipe = recipe_of(family)
        if recipe.lines:
            groups.setdefault((block_of(recipe, ()), recipe.is_counted), (recipe, []))[1].append(family)
    blocks = {models[0].replace("-", "_"): block_of(recipe, models) for recipe, models in groups.values()}
    source = f'source = "transformers {importlib.metadata.version("transformers")}"'
    return "\n".join([f"{source}\n", *(f"[{name}]\n{blocks[name]}" for name in sorted(blocks))])


def main() -> None:
    FILE.write_text(generate())


if __name__ == "__main__":
    main()
