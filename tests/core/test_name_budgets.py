"""A megabyte of names of quantized weights costs seconds: what belongs to each is looked up, and not searched for."""

import json
import struct
from collections.abc import Callable

import pytest

from tests.support.sweep import tiered
from tests.verification.scan.test_budgets import cost, slowness

MANY = 5000

Names = Callable[[int], tuple[str, str]]

NAMES: dict[str, Names] = {
    "scales": lambda n: (f"x{n}", f"x{n}_scale"),
    "scales of names that begin alike": lambda n: (f"x{'1' * (n % 90)}{n}", f"x{'1' * (n % 90)}{n}_scale"),
    "two scales": lambda n: (f"x{n // 2}", f"x{n // 2}_scale{n % 2}"),
    "blocks": lambda n: (f"x{n}_blocks", f"x{n}_scales"),
    "blocks in modules": lambda n: (f"a.{n}.x_blocks", f"a.{n}.x_scales"),
    "packed": lambda n: (f"x{n}.qweight", f"x{n}.scales"),
    "weights": lambda n: (f"x{n}.weight", f"x{n}.weight_scale"),
    "weights of a name": lambda n: (f"weight{n}", f"weight{n}_scale_inv"),
    "below": lambda n: (f"x{n}.weight", f"x{n}.weight.absmax"),
    "states below": lambda n: (f"x{n}.weight", f"x{n}.weight.quant_state.nf4"),
}


CASES = [f"{command}: {name}" for command in ("convert", "inspect") for name in NAMES]


@pytest.mark.parametrize(
    "case",
    tiered(
        CASES,
        test=("convert: weights of a name",),
        extended=("convert: scales of names that begin alike", "convert: states below", "inspect: packed"),
    ),
)
def test_names_are_looked_up(case, tmp_path):
    command, _, name = case.partition(": ")
    pairs = [NAMES[name](number) for number in range(MANY)]
    dtypes = {weight: "I8" for weight, _ in pairs} | {scale: "F32" for _, scale in pairs}
    header, at = {}, 0
    for fqn, dtype in dtypes.items():
        end = at + (1 if dtype == "I8" else 4)
        header[fqn], at = {"dtype": dtype, "shape": [1], "data_offsets": [at, end]}, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file = tmp_path / "a.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    size = file.stat().st_size / 1e6
    more = (tmp_path / "b.safetensors", "--include", "*") if command == "convert" else ()
    seconds, megabytes, code = cost(command, file, *more, "--quiet")
    most = 4 + 2 * size
    assert (code, seconds <= most or seconds <= most * slowness()) == (0, True), seconds
    assert megabytes < 160 + 200 * size
