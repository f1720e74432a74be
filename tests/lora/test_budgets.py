"""A small adapter costs ``merge-lora`` little, whatever its settings and its names ask for.

Each is at most a megabyte with its base model, and runs in a process of its own, whose processor time and peak memory
the kernel counts.
"""

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.verification.scan.test_budgets import cost, slowness

pytestmark = pytest.mark.extended

MEGABYTE = 1_000_000
NO_MORE = 3.0
"""Seconds to start, and to merge hundreds of tensors."""

USUAL = 160
"""Megabytes of a process that merges one tensor."""

Settings = Callable[[], dict[str, Any]]


def layers(many: int, name: str = "self_attn.q_proj") -> list[str]:
    return [f"model.layers.{number}.{name}" for number in range(many)]


def words(many: int) -> list[str]:
    return [f"x{number:05d}" for number in range(many)]


def write(file: Path, names: Iterable[str]) -> None:
    """A file of safetensors with matrices [1, 1] of fp32."""
    header = {name: [4 * at, 4 * at + 4] for at, name in enumerate(names)}
    described = {name: {"dtype": "F32", "shape": [1, 1], "data_offsets": at} for name, at in header.items()}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + struct.pack("<f", 1) * len(header))


def adapted(modules: Iterable[str]) -> list[str]:
    return [f"base_model.model.{module}.lora_{part}.weight" for module in modules for part in "AB"]


def weights(modules: Iterable[str]) -> list[str]:
    return [f"{module}.weight" for module in modules]


FEW, MANY = layers(300), layers(1500)
SOME = {"target_modules": ["q_proj"]}
LENGTHS = ["y" * length for length in range(1, 900)]
SLOW = "(.*)(.*)(.*)(.*)(.*)(.*)z"

SETTINGS: dict[str, tuple[list[str], Settings]] = {
    "ranks and alphas of all modules": (MANY, lambda: SOME | {"rank_pattern": dict.fromkeys(MANY, 1),
        "alpha_pattern": dict.fromkeys(MANY, 8)}),
    "ranks of names of all lengths": (FEW, lambda: SOME
        | {"rank_pattern": {f"{'y' * length}.{'y' * (900 - length)}": 1 for length in range(500)}}),
    "ranks of alternatives": (FEW, lambda: SOME | {"rank_pattern": {"|".join(words(60_000)): 1}}),
    "target_modules": (FEW, lambda: {"target_modules": [*words(60_000), "q_proj"]}),
    "target_modules by nested repetitions": (MANY, lambda: {"target_modules": "([a-z.0-9]+)+q_proj"}),
    "exclude_modules by a pattern": (MANY, lambda: SOME | {"exclude_modules": SLOW}),
    "modules_to_save of all lengths": (FEW, lambda: SOME | {"modules_to_save": LENGTHS}),
    "target_parameters of modules": (FEW, lambda: SOME
        | {"target_parameters": [f"a.{each}" for each in words(50_000)]}),
    "lists that nest deep": (FEW, lambda: SOME | {"loftq_config": json.loads("[" * 900 + "]" * 900)}),
}  # fmt: skip

OTHERS: dict[str, tuple[list[str], list[str], dict[str, Any]]] = {
    "modules in one another": (weights(["a." * 2000 + "q_proj", *layers(1)]), adapted(["a." * 2000 + "q_proj"]),
        SOME | {"modules_to_save": LENGTHS}),
    "several pairs of a module": (weights(layers(2000)), adapted(f"{name}.base_layer" for name in layers(2000)),
        {"target_parameters": weights(layers(2000))}),
}  # fmt: skip


def case(name: str) -> tuple[list[str], list[str], Mapping[str, Any]]:
    if name in OTHERS:
        return OTHERS[name]
    modules, settings = SETTINGS[name]
    return weights(modules), adapted(modules), settings()


@pytest.mark.parametrize("name", [*SETTINGS, *OTHERS])
def test_a_megabyte_costs_two_seconds(name, tmp_path):
    of_base, of_adapter, settings = case(name)
    base, adapter, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "out.safetensors"
    base.mkdir()
    adapter.mkdir()
    write(base / "model.safetensors", of_base)
    (base / "config.json").write_text('{"model_type": "llama"}')
    write(adapter / "adapter_model.safetensors", of_adapter)
    stated = {"peft_type": "LORA", "r": 1, "lora_alpha": 8, **settings}
    (adapter / "adapter_config.json").write_text(json.dumps(stated, separators=(",", ":")))
    size = sum(file.stat().st_size for folder in (base, adapter) for file in folder.iterdir()) / MEGABYTE
    assert size < 1.3
    seconds, megabytes, code = cost("merge-lora", base, adapter, out, "--quiet")
    assert code in (0, 1, 2, 4), code
    assert seconds <= NO_MORE + 2 * size or seconds <= (NO_MORE + 2 * size) * slowness(), seconds
    assert megabytes <= USUAL + 200 * size
