"""One thread for numpy's linear algebra, which the converter does not use.

Else it starts a thread a core that waits by turning in circles. It reads the variable when numpy is imported, so this
module comes before.
"""

from __future__ import annotations

import os

VARIABLE = "OPENBLAS_NUM_THREADS"

_is_ours = VARIABLE not in os.environ
os.environ.setdefault(VARIABLE, "1")


def give_back() -> None:
    """Leave the number to the user again, for a command that computes."""
    if _is_ours:
        os.environ.pop(VARIABLE, None)
