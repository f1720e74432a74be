"""Which part of a conversion a process writes."""

import pytest

from ckpt_tools.core.part_number import PartNumber
from ckpt_tools.errors import UsageError


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("1/1", {}, (1, 1)),
        ("3/64", {"RANK": "9", "WORLD_SIZE": "10"}, (3, 64)),
        ("auto", {"RANK": "0", "WORLD_SIZE": "4"}, (1, 4)),
        ("auto", {"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, (4, 4)),
        ("auto", {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_COUNT": "8"}, (3, 8)),
        ("auto", {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (2, 2)),
    ],
)
def test_it_is_named_or_found(text, environment, expected):
    part = PartNumber.parse(text, environment)
    assert (part.number, part.count) == expected
    assert str(part) == f"{expected[0]}/{expected[1]}"


@pytest.mark.parametrize(
    ("text", "environment", "words"),
    [
        *((text, {}, "is not a part") for text in ("0/4", "5/4", "4", "1/0", "a/b", "-1/4", "1/4/2", "")),
        ("auto", {}, r"\$\(\(JOB_COMPLETION_INDEX \+ 1\)\)/N"),
        ("auto", {"RANK": "1"}, "no number of this process"),
        ("auto", {"RANK": "x", "WORLD_SIZE": "2"}, "are not numbers"),
        ("auto", {"RANK": "2", "WORLD_SIZE": "2"}, "is not a part"),
    ],
)
def test_what_is_no_part_is_refused(text, environment, words):
    with pytest.raises(UsageError, match=words):
        PartNumber.parse(text, environment)
