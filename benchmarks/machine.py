"""The machine, and the code of ckpt-tools that is measured."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

from fixtures.cache import code_of

ROOT = Path(__file__).parent.parent
CKPT_TOOLS = [sys.executable, "-m", "ckpt_tools"]
FRAMEWORKS = ("torch", "deepspeed", "safetensors", "accelerate")


def described(folder: Path) -> dict[str, str]:
    """Processor, memory, the file system that `folder` is on, kernel, Python and the peers' versions."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    # Family and number too, since a virtual machine may hide the model.
    numbers = f"family {fields.get('cpu family', '?')}, model {fields.get('model', '?')}"
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    folder = folder.resolve()
    return {
        "processor": f"{fields.get('model name', platform.machine())} ({numbers}), {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "file system": max((point, kind) for point, kind in mounts if folder.is_relative_to(point))[1],
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in FRAMEWORKS},
    }


def load() -> str:
    """Load average of the last minute, and the number of processors."""
    return f"{os.getloadavg()[0]:.1f} of {os.cpu_count()}"


@cache
def code() -> str:
    """A digest of the converter's sources without docstrings and comments: figures of different code are never put side
    by side."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "ckpt_tools").rglob("*.py")):
        digest.update(code_of(path))
    return digest.hexdigest()[:12]
