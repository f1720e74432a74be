"""Names and patterns of settings, judged by PEFT's own look-up of a pattern, and by Python's own ends of texts."""

from __future__ import annotations

import itertools
import random

import pytest
from peft.utils.other import get_pattern_key

from ckpt_tools.lora.patterns import Ends, Patterns

PARTS = ("a", "b1", "b2", "layers", "0", "10", "q_proj", "ab", "x-y")
PATTERNS = ("a.b", "b1|a", r"layers\.\d+", ".*", "a", "q.proj", "1.q_proj", "", ".", "..", "^a", "a$", "[ab].0", "a+b1")


def modules(seed: int, many: int) -> list[str]:
    chance = random.Random(seed)
    return [".".join(chance.choices(PARTS, k=chance.randint(1, 5))) for _ in range(many)]


@pytest.mark.parametrize("seed", range(30))
def test_the_first_pattern_counts_as_in_peft(seed):
    chance = random.Random(seed)
    names = [*modules(seed, 12), *chance.sample(PATTERNS, 3)]
    chance.shuffle(names)
    values = {name: number for number, name in enumerate(dict.fromkeys(names))}
    patterns = Patterns(values)
    for key in [*modules(seed + 1000, 200), *values, "aXb", "a.q_proj", "q1proj", "11xq_proj"]:
        assert patterns.value(key, -1) == values.get(get_pattern_key([*values], key), -1), key


@pytest.mark.parametrize("seed", range(10))
def test_ends_are_those_of_texts(seed):
    names = [*modules(seed, 5), "", "proj", "0"][seed % 3 :]
    ends = Ends.of(names)
    for module in [*modules(seed + 1000, 100), *names]:
        stops = list(itertools.accumulate(module.split("."), lambda before, part: f"{before}.{part}"))
        assert ends.ends(module) == any(module == name or module.endswith(f".{name}") for name in names)
        assert ends.holds(module) == any(f".{name}." in f".{module}." for name in names)
        assert ends.holds(module, after_dot=False) == any(stop.endswith(tuple(names)) for stop in stops)
