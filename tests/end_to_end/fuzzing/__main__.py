"""``python -m tests.end_to_end.fuzzing``: what ``make fuzz`` runs."""

import sys

from ckpt_tools.process.signals import get_exit_code, raise_on_signals
from tests.end_to_end.fuzzing.runner import main

if __name__ == "__main__":
    try:
        with raise_on_signals():
            sys.exit(main())
    except KeyboardInterrupt as error:
        sys.exit(get_exit_code(error))
