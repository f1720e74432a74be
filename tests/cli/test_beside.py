"""What the commands of the packages beside the converter leave as it was."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.quick

PROGRAM = """
import os
from ckpt_tools.cli import process
before = os.environ.get(process.VARIABLE)
process.give_back()
print(before, os.environ.get(process.VARIABLE))
"""


@pytest.mark.parametrize(("users", "printed"), [(None, "1 None"), ("3", "3 3"), ("1", "1 1")])
def test_a_command_that_computes_has_the_threads_that_the_user_gave(users, printed):
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    given = environment | ({"OPENBLAS_NUM_THREADS": users} if users else {})
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == printed
