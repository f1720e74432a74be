"""A progress bar in terminals and in notebooks."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from importlib import import_module
from threading import Lock
from typing import Any

from ckpt_tools.arguments import api_function
from ckpt_tools.messages.progress import ProgressCallback
from ckpt_tools.messages.wording import format_size

REDRAW_SECONDS = 0.2
"""In a notebook, where each drawing is a message to the browser."""


@api_function
@contextmanager
def progress_bar(verb: str = "working") -> Iterator[ProgressCallback]:
    """Show a bar while inside: on stderr of a terminal, or below the cell of a notebook; elsewhere show nothing.

    Args:
        verb: The word in front of the bar, such as ``"converting"``.

    Returns:
        A context manager that gives a function for the argument ``on_progress``.

    Raises:
        UsageError: ``verb`` is empty.

    Example:
        >>> import ckpt_tools
        >>> with ckpt_tools.progress_bar("converting") as bar:
        ...     report = ckpt_tools.convert("run", "with-a-bar.safetensors", on_progress=bar)
        >>> report.num_tensors
        2
    """
    if _is_notebook():
        notebook_bar = _NotebookBar(verb)
        try:
            yield notebook_bar.update
        finally:
            notebook_bar.draw()
    else:
        with _rich_bar(verb) as update:
            yield update


@contextmanager
def _rich_bar(verb: str) -> Iterator[ProgressCallback]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(verb), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as rich_progress:
        task = rich_progress.add_task(verb, total=None)
        yield lambda done, total: rich_progress.update(task, completed=done, total=total)


def _is_notebook() -> bool:
    """Whether this is the kernel of a notebook; IPython in a terminal has none. rich's bar asks for ipywidgets."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


class _NotebookBar:
    """A bar of HTML below a cell, which stays there."""

    def __init__(self, verb: str) -> None:
        self._verb, self._done, self._total = verb, 0, 0
        self._start_time = self._last_drawn = time.monotonic()
        self._handle: Any = None
        self._lock = Lock()
        self.draw()

    def update(self, done: int, total: int) -> None:
        with self._lock:
            self._done, self._total = done, total
            if time.monotonic() - self._last_drawn < REDRAW_SECONDS:
                return
            self._last_drawn = time.monotonic()
        self.draw()

    def draw(self) -> None:
        notebook: Any = import_module("IPython.display")
        rate = self._done / max(time.monotonic() - self._start_time, 1e-9)
        text = f"{format_size(self._done)} of {format_size(self._total)}, {format_size(rate)}/s" if self._total else ""
        bar = f'<progress value="{self._done}" max="{max(self._total, 1)}"></progress>'
        html = notebook.HTML(f"<div>{escape(self._verb)} {bar} {text}</div>")
        if self._handle is None:
            self._handle = notebook.display(html, display_id=True)
        else:
            self._handle.update(html)
