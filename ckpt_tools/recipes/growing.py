"""Tensors that grow along a dim, with their optimizer state: a vocabulary with more tokens than in the source. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.casts import CASTABLE, cast_into
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import (
    MASTER,
    MAX_PIECE,
    MOMENTS,
    WEIGHT,
    ComputedTensor,
    Kind,
    Manifest,
    OperandReader,
    StateKey,
    TensorEntry,
    make_computed_file_name,
)
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.quantized import map_companions
from ckpt_tools.core.transforms import TransformResult
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.messages.wording import format_count
from ckpt_tools.recipes.manifest_builder import MAX_ITEM_BYTES, ZEROS_FILE
from ckpt_tools.recipes.moves import FillBox
from ckpt_tools.recipes.recipe import MEAN, ZEROS, GrowRule
from ckpt_tools.recipes.sizes import SizeBinding, SizeExpression, evaluate_bindings
from ckpt_tools.recipes.tables import join_boxes, move_box

_VOCABULARY_SIZE = SizeBinding("vocab_size", (SizeExpression("config.vocab_size"),))


@dataclass(frozen=True, slots=True, eq=False)
class MeanSlice(ComputedTensor):
    """The mean of the slices of the only operand along ``dim``, where its own extent is 1: added up in float64, block
    by block, and rounded to float32 before ``dtype`` if that is not float64, so that a weight is its rounded master."""

    dim: int

    @classmethod
    def of(cls, entry: TensorEntry, dtype: DType, dim: int) -> MeanSlice:
        """The mean of the slices of ``entry``, as ``dtype``."""
        return cls(_replace_at(entry.shape, dim, 1), dtype, (entry.cast_to(DType.FLOAT64),), dim)

    @property
    def is_kept(self) -> bool:
        return True

    @property
    def max_piece_numel(self) -> int:
        """So few that the blocks of the operand are whole slices, where they fit, which are read without gaps."""
        inner_numel, num_slices = max(1, prod(self.shape[self.dim + 1 :])), self.operands[0].shape[self.dim]
        return min(MAX_PIECE, inner_numel * max(1, MAX_PIECE // (inner_numel * num_slices)))

    def compute_piece(self, box: Box, read_operand: OperandReader, out: NDArray[Any]) -> None:
        total, num_slices, dim = np.zeros(box.shape, np.float64), self.operands[0].shape[self.dim], self.dim
        step = max(1, MAX_PIECE // box.numel)
        with np.errstate(over="ignore", invalid="ignore"):
            for first in range(0, num_slices, step):
                last = min(first + step, num_slices)
                start, stop = _replace_at(box.start, dim, first), _replace_at(box.stop, dim, last)
                total += read_operand(0, Box(start, stop)).sum(axis=dim, keepdims=True)
            total /= num_slices
            if self.dtype is DType.FLOAT64:
                out[...] = total
            else:
                mean = total.astype(np.float32).reshape(-1)
                cast_into(mean, DType.FLOAT32, out.reshape(-1).view(np.uint8).data, self.dtype)


def grow_tensors(
    manifest: Manifest, rules: Sequence[GrowRule], bindings: Sequence[SizeBinding], config: Mapping[str, Any] | None
) -> TransformResult:
    """The manifest with the slices that ``rules`` add; the first rule that a name matches counts. Sizes come from
    ``bindings`` and ``config``, the content of ``config.json``.

    Raises:
        UsageError: a rule has no tensor or no size, or a tensor has more slices than that.
        UnsupportedError: a tensor is quantized or computed, or its optimizer state cannot follow.
    """
    weights, rule_by_name = manifest.weights, _assign_rules(manifest, rules)
    sizes = {name: _find_size(name, weights[name].shape, rule, bindings, config) for name, rule in rule_by_name.items()}
    grown_names = {name for name, size in sizes.items() if size > weights[name].shape[rule_by_name[name].dim]}
    companions = map_companions(manifest)
    tensors, computed = dict(manifest.tensors), dict(manifest.computed)
    for key, entry in manifest.tensors.items():
        if key.fqn not in grown_names or entry.kind is Kind.EXTRA:
            continue
        rule, weight, new_slice = rule_by_name[key.fqn], weights[key.fqn], None
        if key.slot in (WEIGHT, MASTER):
            is_of_scale = key.fqn in companions or key.fqn in companions.values()
            if is_of_scale or entry.shards.dtype not in CASTABLE or entry.plus or entry.shape != weight.shape:
                why = "it is quantized, computed by the recipe, or not of floating point"
                raise UnsupportedError(f"a [[grow]] cannot add to {key}: {why}")
            if rule.new == MEAN:
                master = None if manifest.masters_are_outdated else manifest.tensors.get(StateKey(key.fqn, MASTER))
                mean = MeanSlice.of(master or entry, entry.shards.dtype, rule.dim)
                file = make_computed_file_name(f"mean of {key}")
                computed[file] = mean
                new_slice = TensorEntry(mean.shape, mean.dtype, entry.kind, mean.make_table(file)), 0
            elif rule.new != ZEROS:
                new_slice = entry, int(rule.new)
        elif entry.shape != weight.shape and entry.numel <= 1:
            continue  # a number, such as the step
        elif entry.shape != weight.shape or key.slot not in MOMENTS:
            raise UnsupportedError(
                f"{key.slot} of {key.fqn} is not known to begin as a zero for each element, and cannot follow a "
                f"[[grow]]; convert the weights alone with {format_option('state', 'model')}"
            )
        tensors[key] = grow_entry(entry, rule.dim, sizes[key.fqn], new_slice)
    literals = {**manifest.literals, ZEROS_FILE: bytes(MAX_ITEM_BYTES)}
    grown = replace(manifest, tensors=tensors, computed=computed, literals=literals)
    known_size = evaluate_bindings((_VOCABULARY_SIZE,), config).get(_VOCABULARY_SIZE.name)
    return grown, tuple(
        _make_note(name, weights[name].shape, rule_by_name[name], sizes[name], known_size)
        for name in weights
        if name in grown_names
    )


def grow_entry(
    entry: TensorEntry, dim: int, size: int, new_slice: tuple[TensorEntry, int] | None = None
) -> TensorEntry:
    """``entry`` with ``size`` slices along ``dim``. Each new one is that of ``new_slice``, a tensor and a position in
    it; if there is none, zeros of the literal ``ZEROS_FILE``.

    Raises:
        UnsupportedError: a recipe has split the axes of the tensor.
    """
    origin, shape, num_before = (0,) * len(entry.shape), _replace_at(entry.shape, dim, size), entry.shape[dim]
    start = _replace_at(origin, dim, num_before)
    parts, fills = move_box(entry, origin, origin, entry.shape), list[FillBox]()
    if new_slice is not None:
        source, position = new_slice
        for boxes in move_box(source, _replace_at(origin, dim, position), start, _replace_at(shape, dim, 1)):
            boxes.stops[:, dim], boxes.strides[:, dim] = size, 0
            parts.append(boxes)
    else:
        fills = [each for each in [FillBox(start, _replace_at(shape, dim, size - num_before))] if each.numel]
    return replace(entry, shape=shape, shards=join_boxes(parts, fills, shape, entry.shards.dtype, ZEROS_FILE))


def _replace_at(shape: Shape, dim: int, extent: int) -> Shape:
    return (*shape[:dim], extent, *shape[dim + 1 :])


def _assign_rules(manifest: Manifest, rules: Sequence[GrowRule]) -> dict[str, GrowRule]:
    """The rule of each weight that grows, by its name. The rule of a tied name is that of its weight. Raises UsageError
    for a rule that no name matches, and for tied names with two different rules."""
    rule_by_name: dict[str, GrowRule] = {}
    matched_rules = set[GrowRule]()
    for name in (*manifest.weights, *manifest.aliases):
        matching_rules = [rule for rule in rules if rule.name.match_name(name) is not None]
        matched_rules.update(matching_rules)
        owner = manifest.aliases.get(name, name)
        for rule in matching_rules[:1]:
            first = rule_by_name.setdefault(owner, rule)
            if replace(rule, name=first.name) != first:
                raise UsageError(f"{name} is tied to {owner}, and each has a [[grow]] that differs from the other's")
    unmatched = next((rule for rule in rules if rule not in matched_rules), None)
    if unmatched is not None:
        raise UsageError(f"the [[grow]] of {unmatched.name.text} matches no tensor")
    return rule_by_name


def _find_size(
    name: str, shape: Shape, rule: GrowRule, bindings: Sequence[SizeBinding], config: Mapping[str, Any] | None
) -> int:
    """Raises UsageError if the size is not known, or the tensor cannot grow to it as the rule says."""
    size = evaluate_bindings((*bindings, rule.size), config).get(rule.size.name)
    text = " | ".join(choice.text.strip() for choice in rule.size.choices)
    if size is None:
        raise UsageError(
            f"the [[grow]] of {name}: the size {text} is not known; name a folder with config.json with "
            f"{format_option('config')}"
        )
    if rule.dim >= len(shape):
        raise UsageError(f"the [[grow]] of {name}: it has no dim {rule.dim}, but {format_count(len(shape), 'dim')}")
    before = shape[rule.dim]
    if size < before:
        raise UsageError(f"the [[grow]] of {name}: it has {before:,} slices along dim {rule.dim}, more than {size:,}")
    if (rule.new == MEAN and not before) or (isinstance(rule.new, int) and rule.new >= before):
        raise UsageError(
            f"the [[grow]] of {name}: of its {before:,} slices along dim {rule.dim}, none is new = {rule.new}"
        )
    return size


def _make_note(name: str, shape: Shape, rule: GrowRule, size: int, known_size: int | None) -> Note:
    before = shape[rule.dim]
    where = "rows" if rule.dim == 0 else f"slices along dim {rule.dim}"
    new = {ZEROS: "zeros", MEAN: "the mean of the old ones"}.get(str(rule.new), f"copies of {rule.new}")
    config = "" if known_size in (size, None) else f"; config.json is not changed for them: vocab_size {known_size:,}"
    why = f"grown by the recipe: {new}, and zeros in optimizer state{config}"
    return Note(Outcome.DEFAULTED, f"{name}, {where} {before:,} to {size - 1:,}", why, size - before)
