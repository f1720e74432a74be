"""Hands hostile files to commands, one after the other, and says what happened.

A process of its own, so that an audit hook, which cannot be taken off again, and strace see nothing else. The plan is
JSON on stdin, what is found goes to stdout as JSON.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ckpt_tools
from ckpt_tools.errors import CkptError
from ckpt_tools.serialization.pickle.dcp_metadata import BytesStorageMetadata, MetadataIndex, StorageInfo
from ckpt_tools.serialization.pickle.load import dumps, loads
from tests.serialization.archives import legacy, oldest, torch_zip
from tests.serialization.hostile import sample

FORBIDDEN = (
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.kill",
    "os.putenv", "subprocess.", "pty.", "socket.", "ctypes.", "pickle.", "marshal.", "exec", "compile", "code.__new__",
    "function.__new__", "import", "sys.set", "urllib.", "http.", "ftplib.", "smtplib.", "sqlite3.", "webbrowser.",
    "shutil.", "signal.", "gc.", "tempfile.", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink",
    "os.chmod", "os.chown", "os.truncate", "os.utime", "glob.", "array.", "mmap.", "cpython.", "msvcrt.", "winreg.",
)  # fmt: skip
"""Audit events that no reading of a file causes. Those of writing are looked at by their path."""

WRITING = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.chmod", "os.utime", "shutil.", "tempfile.")


class Watch:
    """What the interpreter did while it was on."""

    def __init__(self, allowed: list[str]) -> None:
        self.allowed = tuple(allowed)
        self.events: list[str] = []
        self.on = False
        sys.addaudithook(self.see)

    def see(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and self._is_wrong(event, args):
            self.events.append(f"{event}{args!r}"[:300])

    def _is_wrong(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "open" or event.startswith(WRITING):
            return isinstance(args[0], str) and not args[0].startswith(self.allowed) and not _is_beside(args)
        return event.startswith(FORBIDDEN)


def _is_beside(args: tuple[Any, ...]) -> bool:
    """A plain name in a folder that was opened, and so seen, before."""
    return "/" not in args[0] and type(args[-1]) is int and args[-1] >= 0


def main() -> None:
    plan = json.load(sys.stdin)
    out = Path(plan["out"])
    carriers = [Carrier(**carrier) for carrier in plan["carriers"]]
    samples = [(name, data) for name, _, data in sample(Path(plan["canary"]))]
    # Once through, so that every module is there that reading, refusing and writing need.
    for carrier in carriers:
        list(outcomes(carrier, out))
        carrier.put(b"garbage")
        list(outcomes(carrier, out))
    print(json.dumps(list(results(carriers, samples, plan["every"], out, Watch(plan["allowed"])))))


@dataclass(frozen=True, slots=True)
class Carrier:
    """A checkpoint of which one file holds the sample, in one of ``FORMS``."""

    kind: str
    folder: str
    file: str
    form: str

    def put(self, sample: bytes) -> None:
        if self.form == "item":
            self._put_item(torch_zip(sample))
        else:
            Path(self.folder, self.file).write_bytes(FORMS[self.form](sample))

    def _put_item(self, item: bytes) -> None:
        """As the first object of a DCP, in a file of its own, to which the metadata is changed."""
        path = Path(self.folder, ".metadata")
        metadata = loads(path.read_bytes(), path=str(path))
        fqn = next(fqn for fqn, kind in metadata.state_dict_metadata.items() if isinstance(kind, BytesStorageMetadata))
        metadata.storage_data[MetadataIndex(fqn)] = StorageInfo(self.file, 0, len(item))
        path.write_bytes(dumps(metadata))
        Path(self.folder, self.file).write_bytes(item)


FORMS: dict[str, Callable[[bytes], bytes]] = {"raw": bytes, "zip": torch_zip, "legacy": legacy, "tar": oldest}


def results(
    carriers: list[Carrier], samples: list[tuple[str, bytes]], every: int, out: Path, watch: Watch
) -> Iterator[Any]:
    """Each carrier with one of ``every`` samples, the next with those that follow them."""
    for number, carrier in enumerate(carriers):
        for name, data in samples[number % every :: every]:
            carrier.put(data)
            watch.on = True
            found = list(outcomes(carrier, out))
            watch.on = False
            shutil.rmtree(out, ignore_errors=True)
            yield [carrier.kind, name, found, watch.events]
            watch.events = []


def outcomes(carrier: Carrier, out: Path) -> Iterator[Any]:
    """What ``scan`` names, and how ``inspect`` and ``convert`` end."""
    for verb in (scanned, inspected, converted):
        try:
            yield verb(carrier.folder, out)
        except CkptError as error:
            yield type(error).__name__


def scanned(folder: str, out: Path) -> list[str]:
    return [finding.what for finding in ckpt_tools.scan(folder).findings]


def inspected(folder: str, out: Path) -> str:
    return ckpt_tools.inspect(folder).format


def converted(folder: str, out: Path) -> str:
    ckpt_tools.convert(folder, out, to="torch", workers=1, overwrite=True)
    return "written"


if __name__ == "__main__":
    main()
