"""Every layout of the corpus through every writer is whole, or refused, or a note names what is not the source's; and
``scan`` proves it, but for what it truly holds.

``verify`` judges: it gives no false alarm on what is whole, and it finds what a note says is missing.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

import ckpt_tools
from ckpt_tools.core.notes import Outcome
from ckpt_tools.core.option_names import WrittenFormat
from ckpt_tools.errors import CkptError
from ckpt_tools.formats.index import get_writable_format
from ckpt_tools.verification.report import Aspect
from fixtures.corpus import make
from tests.layouts.sample import KINDS, OPENED, TEST, opened
from tests.support.sweep import tiered

pytestmark = pytest.mark.extended

TARGETS: tuple[WrittenFormat, ...] = tuple(each for each in get_args(WrittenFormat) if each != "peft")
"""A folder of PEFT holds an adapter alone."""

ALWAYS = {
    ("accelerate-ddp-safetensors", "dcp"), ("accelerate-ddp-safetensors", "torch"), ("megatron", "dcp"),
    ("megatron", "zero3"), ("megatron-fsdp-weights", "megatron"), ("composer", "megatron"), ("composer", "sharded"),
    ("deepspeed-muon-zero2-bf16", "zero3"), ("deepspeed-muon-zero2-bf16", "universal"), ("hf-trainer", "zero2"),
}  # fmt: skip
"""Each has a reason of its own to look different from its source, or to be refused."""

REFUSALS = (
    r"say which they are with param_order=.*state='model'",
    r"keeps an optimizer by the names of its parameters; .*or convert with state='model'",
    r"in one of float32, bfloat16 and float16.*choose one with dtype=",
    r"in one of float32, bfloat16 and float16.*dequantize the weights with dequantize=True",
    r"(GGUF does not support|numpy has no) \w+; .*exclude it",
    r"GGUF holds at most 4 dimensions",
    r"it is none of Llama's, so it is not known how ranks cut it",
)
"""The sentences by which a writer refuses a checkpoint that can be read. Each says what to do."""

NOTED = {Aspect.MISSING: Outcome.DROPPED, Aspect.UNEXPECTED: Outcome.DEFAULTED, Aspect.DTYPE: Outcome.CAST}
"""A difference that is no error, and the outcome that the report of the conversion must name for it."""


SAMPLE = [name for name in OPENED if name in {*TEST, *KINDS}]
CELLS = {f"{name} {target}": (name, target) for name in OPENED for target in TARGETS}
IN_TURN = {f"{name} {TARGETS[number % len(TARGETS)]}" for number, name in enumerate(SAMPLE)}
"""Each layout of the sample in one format."""


@pytest.mark.parametrize("cell", tiered(CELLS, test=(), extended=IN_TURN | {f"{a} {b}" for a, b in ALWAYS}))
def test_what_was_converted_verifies(cell, tmp_path):
    name, target = CELLS[cell]
    whole: Any = {"state": "all"} if "max_shard_size" in get_writable_format(target).writing_options else {}
    source, out = make(name).source, tmp_path / "out"
    try:
        report = ckpt_tools.convert(source, out, to=target, **whole)
    except CkptError as error:
        check_refusal(error, tmp_path, lambda: ckpt_tools.plan(source, out, to=target, **whole))
        return
    compared: Any = {"state": "model"} if get_writable_format(target).is_weights_alone else whole
    found = ckpt_tools.verify(source, out, **compared)
    outcomes = {note.outcome for note in report.plan.notes}
    for difference in found.differences:
        assert NOTED.get(difference.aspect) in outcomes, str(difference)


def check_refusal(error: CkptError, folder: Path, plan: Callable[[], object]) -> None:
    """The sentence says what to do, ``plan`` says the same, and nothing was written."""
    assert any(re.search(each, error.message) for each in REFUSALS), error.message
    assert error.exit_code == 4
    assert not list(folder.iterdir())
    with pytest.raises(type(error), match=re.escape(error.message)):
        plan()


@pytest.mark.parametrize("name", opened())
def test_it_verifies_by_itself(name):
    """No archive is looked for where a file holds several, or none."""
    report = ckpt_tools.verify(make(name).source)
    assert report.equal, [str(each) for each in report.differences[:4]]


# What a scan says of genuine checkpoints

OCDBT, ZSTD = ("data of Orbax (OCDBT)",), ("compressed with zstd",)

FINDINGS = {
    "orbax": OCDBT, "orbax-manager": OCDBT, "orbax-pytree": OCDBT, "orbax-sharded": OCDBT, "orbax-train-state": OCDBT,
    "orbax-items": OCDBT + ZSTD, "orbax-v1": OCDBT, "orbax-v1-items": OCDBT, "orbax-zarr": ZSTD, "orbax-zarr3": OCDBT,
}  # fmt: skip
"""Layouts that are opened and that a scan does not prove, with parts of the reasons; all else is clean."""

TRANSFORMER_ENGINE = {
    "megatron", "megatron-experts", "megatron-chained", "megatron-weights", "megatron-buckets", "megatron-flattened",
    "megatron-common-item",
}  # fmt: skip
"""Layouts that hold a state of fp8, which TransformerEngine unpickles."""

CONFIGURATION = {"automodel", "nanotron", "nanotron-replicated", "nemo-2", *FINDINGS, *TRANSFORMER_ENGINE}
"""Layouts with settings in YAML or in JSON of unknown keys, as all of Orbax have, or with pickled bytes."""


@pytest.mark.parametrize("name", tiered(OPENED, test=(), extended={*CONFIGURATION, *SAMPLE}))
def test_a_scan_of_a_genuine_one_is_clean(name):
    report = ckpt_tools.scan(make(name).source)
    texts = {finding.what for finding in report.findings if finding.danger == "configuration"}
    told = sorted({finding.what for finding in report.findings} - texts)
    assert all(any(part in each for part in FINDINGS.get(name, ())) for each in told), told
    assert bool(told) == (name in FINDINGS)
    assert bool(texts) == (name in CONFIGURATION)
    assert not report.names
    assert report.num_files > 0
