"""Files that torch saved, changed in place: damage, or another version's way to write them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Change = Callable[[Any], object]


def change_file(path: Path, change: Change) -> None:
    """Save again at ``path`` what lies there, after ``change``."""
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)
