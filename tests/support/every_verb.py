"""Every verb that reads a checkpoint, to be asked the same question."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ckpt_tools
from ckpt_tools.errors import CkptError

Verb = Callable[[Path, Path, dict[str, Any]], object]

READING: dict[str, Verb] = {
    "inspect": lambda src, _, more: ckpt_tools.inspect(src, **more),
    "open": lambda src, _, more: ckpt_tools.open(src, **more),
}
"""Those that only show what is there."""

USING: dict[str, Verb] = {
    "plan": lambda src, out, more: ckpt_tools.plan(src, out, to="dcp", **more),
    "plan, strict": lambda src, out, more: ckpt_tools.plan(src, out, to="safetensors", strict=True, **more),
    "convert to dcp": lambda src, out, more: ckpt_tools.convert(src, out, to="dcp", **more),
    "convert to torch": lambda src, out, more: ckpt_tools.convert(src, out, to="torch", state="all", **more),
    "convert to zero2": lambda src, out, more: ckpt_tools.convert(src, out, to="zero2", **more),
    "reshard": lambda src, out, more: ckpt_tools.reshard(src, out, world_size=2, **more),
    "consolidate": lambda src, out, more: ckpt_tools.consolidate(src, out, **more),
    "verify": lambda src, _, more: ckpt_tools.verify(src, **more),
    "verify with": lambda src, _, more: ckpt_tools.verify(src, src, **more),
    "diff": lambda src, _, more: ckpt_tools.diff(src, src, **more),
    "checksum": lambda src, _, more: ckpt_tools.checksum(src, output="-", **more),
    "load_into": lambda src, _, more: ckpt_tools.load_into(torch.nn.Linear(2, 2), None, src, **more),
}
"""Those that do something with the tensors."""


def refusal(src: Path, out: Path, verbs: dict[str, Verb] | None = None, **more: Any) -> tuple[int, str]:
    """The one way in which all verbs refuse ``src``: exit code and sentence; (0, "") if none does. ``out`` must not be
    written."""
    found: dict[str, tuple[int, str]] = {}
    for name, verb in (READING | USING if verbs is None else verbs).items():
        found[name] = (0, "")
        try:
            verb(src, out, more)
        except CkptError as error:
            found[name] = (error.exit_code, str(error))
            assert not out.exists(), name
    assert len(set(found.values())) == 1, found
    return next(iter(found.values()))
