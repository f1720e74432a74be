"""What the tool writes never holds a credential: neither the output, nor what lies beside it while a run is under way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fixtures.store import Fixture
from tests.support.s3_server import SECRET_KEY

Checkpoint = Callable[[str, str, int], Fixture]

TOKEN = "token-4711-of-nobody"
QUERY = "X-Amz-Signature=5167e-of-nobody"
SECRETS = (SECRET_KEY, TOKEN, QUERY.partition("=")[2])

STORAGE: Mapping[str, Any] = {"secret": SECRET_KEY}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bytes]]]:
    """Every file as it is before it is renamed or removed, by its name: a journal and a lock do not outlive a run."""
    seen: list[tuple[str, bytes]] = []

    def read(path: Any) -> None:
        each = Path(os.fsdecode(path)) if not isinstance(path, int) else None
        for file in [each] if each is not None and each.is_file() else [*(each.rglob("*") if each else ())]:
            if file.is_file():
                seen.append((str(file), file.read_bytes()))

    for name in ("rename", "replace", "unlink", "remove"):
        real = getattr(os, name)

        def watched(path: Any, *rest: Any, _real: Any = real, **more: Any) -> Any:
            read(path)
            return _real(path, *rest, **more)

        monkeypatch.setattr(os, name, watched)
    yield seen
