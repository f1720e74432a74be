"""Sizes of axes as expressions of variables, and their values from ``config.json`` and from shapes. Pure."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from ckpt_tools.errors import UsageError
from ckpt_tools.messages.wording import join_names

SizeValues = Mapping[str, int]
"""Values of variables. The variable ``expert`` counts the index ``{expert}``."""

MAX_SIZE = 1 << 62
"""The largest size: numbers of elements are 64-bit integers."""

_CONFIG = "config"

_CONFIG_KEY = re.compile(rf"{_CONFIG}(\.\w+)+")

_CONFIG_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config", "vision_config")
"""Parts of a ``config.json`` in which a key is looked up if the top has none: the model of text first."""


@dataclass(frozen=True)
class SizeExpression:
    """An expression of variables and integers with ``+ - * / ( )``, such as ``A * D``.

    Raises:
        UsageError: it is no such expression.
    """

    text: str

    def __post_init__(self) -> None:
        _ = self.variables

    @cached_property
    def _tree(self) -> ast.expr:
        try:
            # The parser takes letters that look alike for the same, and the recipe does not.
            return ast.parse(self.text.strip().encode("ascii"), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UsageError(f"{self.text!r} is not a size; write for example 2, H or A*D") from error

    @cached_property
    def variables(self) -> frozenset[str]:
        names = set[str]()
        for operand in _iter_operands(self._tree):
            match operand:
                case ast.Name(id) if id != _CONFIG:
                    names.add(id)
                case ast.Constant(int() as value) if type(value) is int:
                    pass
                case ast.Attribute() if _CONFIG_KEY.fullmatch(ast.unparse(operand)):
                    pass
                case ast.Name() | ast.Attribute():
                    raise UsageError(
                        f"{self.text!r} is not a size: config, and no other, has keys, as in config.hidden_size"
                    )
                case _:
                    raise UsageError(
                        f"{self.text!r} is not a size: only variables, integers, + - * / and ( ) are allowed"
                    )
        return frozenset(names)

    def evaluate(self, env: Mapping[str, int | Fraction], config: Mapping[str, Any] | None = None) -> Fraction | None:
        """The value; None if a variable or a key is not known.

        Raises:
            UsageError: it divides by zero, or a key of ``config`` is text, a truth value or a fraction.
        """
        try:
            return _evaluate_node(self._tree, env, config or {})
        except KeyError:
            return None
        except ZeroDivisionError as error:
            raise UsageError(f"the size {self.text} divides by zero{_format_values(env, self.variables)}") from error


_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _iter_operands(node: ast.expr) -> Iterator[ast.expr]:
    """The operands in ``node``, an expression of ``_OPERATORS``; ``node`` itself if it is not one."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield from _iter_operands(node.left)
        yield from _iter_operands(node.right)
    else:
        yield node


def _evaluate_node(node: ast.expr, env: Mapping[str, int | Fraction], config: Mapping[str, Any]) -> Fraction:
    match node:
        case ast.BinOp(left, op, right):
            return _OPERATORS[type(op)](_evaluate_node(left, env, config), _evaluate_node(right, env, config))
        case ast.Name(id):
            return Fraction(env[id])
        case ast.Constant(int() as value):
            return Fraction(value)
        case _:
            return Fraction(_look_up_config(config, ast.unparse(node).removeprefix(f"{_CONFIG}.")))


def _look_up_config(config: Mapping[str, Any], key: str) -> int:
    """The whole number under a key of ``config.json``. Raises KeyError if it has none, also where a list or null says
    that there is no one number. Raises UsageError for any other value."""
    for section in (config, *(config.get(name) for name in _CONFIG_SECTIONS)):
        value: Any = section
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if type(value) is int:
            return value
        if isinstance(value, str | bool | float):
            raise UsageError(f"{key} of config.json is {value!r}, and the recipe needs a whole number")
    raise KeyError(key)


@dataclass(frozen=True)
class SizeBinding:
    """A variable and the expressions that may give its value: the first that is known counts."""

    name: str
    choices: tuple[SizeExpression, ...]


def evaluate_bindings(bindings: Iterable[SizeBinding], config: Mapping[str, Any] | None) -> dict[str, int]:
    """Values of the variables that ``config.json`` tells. Raises UsageError for one that is not a whole number."""
    env: dict[str, int] = {}
    pending = list(bindings)
    while pending:
        known = [(each, value) for each in pending if (value := _choose_value(each, env, config)) is not None]
        if not known:
            break
        for binding, value in known:
            used = frozenset[str]().union(*(choice.variables for choice in binding.choices))
            env[binding.name] = _check_whole_number(value, f"{binding.name} = {binding.choices[0].text}", env, used)
            pending.remove(binding)
    return env


def _choose_value(binding: SizeBinding, env: SizeValues, config: Mapping[str, Any] | None) -> Fraction | None:
    """The first choice, in order, that is known; none before one that may still become known."""
    for choice in binding.choices:
        value = choice.evaluate(env, config)
        if value is not None or choice.variables - env.keys():
            return value
    return None


def _check_whole_number(value: Fraction, description: str, env: SizeValues, variables: Collection[str]) -> int:
    if value > MAX_SIZE:
        raise UsageError(f"a size is too large, beyond 2^62: {description}{_format_values(env, variables)}")
    if value.denominator != 1 or value < 0:
        raise UsageError(
            f"the size {description} is {value}{_format_values(env, variables)}, which is not a whole number"
        )
    return int(value)


def _format_values(env: Mapping[str, int | Fraction], names: Collection[str]) -> str:
    """Values of variables as a message ends with them: `` with A = 4, G = 3``."""
    shown = ", ".join(f"{name} = {env[name]}" for name in sorted(names) if name in env)
    return f" with {shown}" if shown else ""


def evaluate_size(size: SizeExpression, env: SizeValues, context: str) -> int:
    """The value as a whole number.

    Raises:
        UsageError: a variable is not known, or the value is not a whole number, as where a size does not divide.
    """
    value = size.evaluate(env)
    if value is None:
        missing = sorted(size.variables - env.keys())
        raise UsageError(
            f"{context}: the size {join_names(missing)} is known neither from shapes nor from config.json; bind it "
            "under [sizes], or name a folder with config.json"
        )
    return _check_whole_number(value, f"{size.text} of {context}", env, size.variables)


class SizeEquation(NamedTuple):
    """An axis of the tensor ``tensor_name`` has ``extent`` positions, and the recipe gives it ``size``."""

    size: SizeExpression
    extent: int
    tensor_name: str


def solve_equations(equations: Iterable[SizeEquation], env: SizeValues) -> dict[str, int]:
    """``env`` with the variables that the equations give, each linear in one that is not known.

    Raises:
        UsageError: no whole number solves one of them, as where rows do not divide.
    """
    values = dict(env)
    pending_equations = list(equations)
    while True:
        solution = next(_iter_solutions(pending_equations, values), None)
        if solution is None:
            return values
        name, value = solution
        values[name] = value


def _iter_solutions(equations: Iterable[SizeEquation], env: SizeValues) -> Iterator[tuple[str, int]]:
    for size, extent, tensor_name in equations:
        unknown = size.variables - env.keys()
        if len(unknown) != 1:
            continue
        (name,) = unknown
        # A size is linear in the unknown if its values at 1, 2 and 3 are equally far apart, and only then it is solved.
        # Each solution may make another equation solvable, so that `solve_equations` starts over with it.
        values = [size.evaluate({**env, name: number}) for number in (1, 2, 3)]
        first, second, third = (value or Fraction(0) for value in values)
        if second == first or third - second != second - first:
            continue
        value = 1 + (extent - first) / (second - first)
        if value.denominator != 1 or value < 0:
            raise UsageError(
                f"{tensor_name}: an axis has {extent:,} positions, and no whole number {name} makes it {size.text}"
                f"{_format_values(env, size.variables)}"
            )
        yield name, int(value)
