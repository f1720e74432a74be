"""Files of a checkpoint as bytes by name."""

from collections.abc import Mapping
from pathlib import Path


def files_below(path: Path) -> dict[str, bytes]:
    """Every file below a folder; a file alone has the name ``.``."""
    found = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return {each.relative_to(path).as_posix(): each.read_bytes() for each in found}


def write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder
