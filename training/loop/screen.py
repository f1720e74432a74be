"""Progress display: a live status on a terminal, lines elsewhere.

Ranks have no terminal. With ``SCREEN_VARIABLE`` the command has them send their status in a form that it draws.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

SCREEN_VARIABLE = "TRAINING_SCREEN"  # environment variable of ranks whose output the command draws
RECORD = "\x1e"  # ASCII's record separator, which begins a line with a status
END_SECONDS = 5.0  # time to wait for the last lines
PLAIN_SECONDS = 5.0  # time between two status lines in a log


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Status of a run. ``accuracy`` is from the last evaluation, ``rss`` and ``cuda`` (0 without a GPU) are the peak
    bytes of any rank, ``checkpoint`` is the last one, for which training stopped ``stall_seconds``."""

    step: int
    last_step: int
    loss: float
    accuracy: float | None
    learning_rate: float
    samples_per_second: float
    rss: int
    cuda: int
    seconds_left: float
    checkpoint: str | None
    stall_seconds: float | None

    def to_line(self) -> str:
        return RECORD + json.dumps(asdict(self))

    @classmethod
    def of_line(cls, line: str) -> Status:
        return cls(**json.loads(line.removeprefix(RECORD)))

    @property
    def place(self) -> str:
        return f"step {self.step}/{self.last_step}"

    @property
    def left(self) -> str:
        return f"{timedelta(seconds=round(self.seconds_left))} left"

    @property
    def learning(self) -> str:
        accuracy = "" if self.accuracy is None else f"  accuracy {self.accuracy:.4f}"
        return f"loss {self.loss:.4f}{accuracy}  lr {self.learning_rate:.2e}"

    @property
    def speed(self) -> str:
        return f"{self.samples_per_second:,.0f} samples/s"

    @property
    def memory(self) -> str:
        return f"memory {_size(self.rss)}" + (f", on the GPU {_size(self.cuda)}" if self.cuda else "")

    @property
    def saved(self) -> str:
        if self.checkpoint is None:
            return "no checkpoint yet"
        return f"last checkpoint {self.checkpoint}, stall {self.stall_seconds:.2f} s"

    @property
    def line(self) -> str:
        """Line for a log."""
        return "  ".join((self.place, self.learning, self.speed, self.memory, self.left))


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


class Screen:
    """Prints lines, and a status every few seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def say(self, line: str) -> None:
        print(line, flush=True)

    def show(self, status: Status) -> None:
        if time.monotonic() - self._last >= PLAIN_SECONDS:
            self._last = time.monotonic()
            self.say(status.line)


class SentScreen(Screen):
    """Prints lines and statuses for the command to draw."""

    def show(self, status: Status) -> None:
        self.say(status.to_line())


class LiveScreen(Screen):
    """Scrolls lines above a live status."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console, self._live = console, live

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, status: Status) -> None:
        self._live.update(_drawn(status), refresh=True)


def rank_screen() -> Screen:
    return SentScreen() if SCREEN_VARIABLE in os.environ else Screen()


def is_on_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def command_screen() -> Iterator[Screen]:
    """Screen of the command. rich is imported only for a terminal."""
    if not is_on_terminal():
        yield Screen()
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LiveScreen(console, live)


@contextmanager
def drawn() -> Iterator[tuple[int | None, dict[str, str]]]:
    """Standard output and environment for processes whose lines are drawn on this terminal, if it is one."""
    if not is_on_terminal():
        yield None, {}
        return
    ours, theirs = os.pipe()
    with command_screen() as screen:
        reader = threading.Thread(target=_show_lines, args=(ours, screen), daemon=True)
        reader.start()
        try:
            yield theirs, {SCREEN_VARIABLE: "1"}
        finally:
            # A process that has not ended yet may keep the pipe open.
            os.close(theirs)
            reader.join(END_SECONDS)


def _show_lines(descriptor: int, screen: Screen) -> None:
    with open(descriptor, encoding="utf-8", errors="replace") as lines:
        _show_each(lines, screen)


def _show_each(lines: Iterable[str], screen: Screen) -> None:
    for line in lines:
        if line.startswith(RECORD):
            screen.show(Status.of_line(line))
        else:
            screen.say(line.rstrip("\n"))


def _drawn(status: Status) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    first = Table.grid(padding=(0, 1))
    first.add_row(status.place, ProgressBar(status.last_step, status.step, width=30), status.left)
    return Group(
        first,
        Text(f"{status.learning}  {status.speed}"),
        Text(f"{status.memory} a rank  {status.saved}", style="dim"),
    )
