"""The command line in this process: what a command prints, and its exit code."""

import contextlib
import io

from ckpt_tools.cli.main import main


def command(*words: object) -> tuple[int, str, str]:
    """The exit code, what goes to stdout, and what goes to stderr."""
    out, error = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            main([str(word) for word in words])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), error.getvalue()
