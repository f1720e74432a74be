"""Verdicts of picklescan, fickling, modelscan and ModelAudit on a folder of entries, each a folder. Run with the Python
that has them, as a file: ``python -P scanners.py FOLDER``. JSON goes to stdout. Nothing of ckpt-tools is imported.

A verdict is "flagged", "clean", or "unread" if the scanner reports an error or reads none of the files.
"""

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path


def picklescan(folder: Path, *, strict: bool = False) -> str:
    """The file by its path if there is one, because picklescan reads all endings then."""
    from picklescan.scanner import scan_directory_path, scan_file_path

    alone = files(folder) if len(files(folder)) == 1 else []
    found = scan_file_path(str(*alone), strict=strict) if alone else scan_directory_path(str(folder), strict=strict)
    return verdict(flagged=found.issues_count > 0, read=found.scanned_files > 0 and not found.scan_err)


def modelscan(folder: Path) -> str:
    from modelscan.modelscan import ModelScan

    scan = ModelScan()
    scan.scan(folder)
    return verdict(flagged=bool(scan.issues.all_issues), read=bool(scan.scanned) and not scan.errors)


def fickling(folder: Path) -> str:
    """As its scan of a repository of Hugging Face does: members of zips by their ending, other files as pickles."""
    from fickling.loader import scan_file, scan_zip_archive

    results = []
    for path in files(folder):
        if zipfile.is_zipfile(path):
            results += scan_zip_archive(str(path), graceful=True).values()
        elif path.suffix not in (".json", ".safetensors"):
            results.append(scan_file(str(path), graceful=True))
    read = [each for each in results if not each.errors]
    return verdict(flagged=any(not each.is_safe for each in read), read=bool(read) and len(read) == len(results))


def modelaudit(folder: Path) -> str:
    from modelaudit.core import determine_exit_code, scan_model_directory_or_file

    found = scan_model_directory_or_file(str(folder), cache_enabled=False)
    code = determine_exit_code(found)
    return verdict(flagged=code == 1, read=code == 0 and found.files_scanned > 0)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def verdict(*, flagged: bool, read: bool) -> str:
    return "flagged" if flagged else "clean" if read else "unread"


SCANNERS: dict[str, Callable[[Path], str]] = {
    "picklescan": picklescan,
    "picklescan --strict": partial(picklescan, strict=True),
    "fickling": fickling,
    "modelscan": modelscan,
    "modelaudit": modelaudit,
}


def judged(scan: Callable[[Path], str], folder: Path) -> str:
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return scan(folder)
    except ImportError:
        raise
    except Exception:
        return "unread"


def main() -> None:
    logging.disable()
    folders = sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir())
    found = {}
    for name, scan in SCANNERS.items():
        package, *options = name.split()
        if importlib.util.find_spec(package):
            named = " ".join([package, importlib.metadata.version(package), *options])
            found[named] = {folder.name: judged(scan, folder) for folder in folders}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
