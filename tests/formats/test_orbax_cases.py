"""The checkpoints of Orbax's own tests of compatibility, and damaged ones: exactly what Orbax restores, or refused."""

import random
import shutil
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import ckpt_tools
from ckpt_tools.core.manifest import TensorRef
from ckpt_tools.core.notes import Outcome
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import CkptError
from ckpt_tools.runs.opening import open_checkpoint
from fixtures.orbax_cases import CASES, TREE, Made, Restored, make, restored
from tests.layouts.test_damage import ALONE, CODES, Damage
from tests.support.manifests import read_bytes

pytestmark = [pytest.mark.extended, pytest.mark.judges]

UNNAMED, NO_TIME, UNFINISHED = "has no _METADATA", "begun and never finished", "it is unfinished"
NOT_LISTED = "is missing, and _CHECKPOINT_METADATA lists the item"

REFUSED = {
    **{f"{base}-no-commit_timestamp_nsecs": NO_TIME for base in ("direct", "composite", "v1")},
    **{f"{base}-no-manifest.ocdbt": "the database of the arrays, is missing" for base in ("direct", "composite", "v1")},
    **{f"{base}-no-d": "this data file of the database is missing" for base in ("direct", "composite", "v1")},
    "direct-no-tree": UNNAMED,
    "direct-no-metadata-no-tree": UNNAMED,
    "composite-no-tree": f"state/_METADATA: it {NOT_LISTED}",
    "composite-no-metadata-no-tree": UNNAMED,
    "v1-no-tree": f"state/_METADATA: it {NOT_LISTED}",
    "v1-no-metadata": "_CHECKPOINT_METADATA: this file, which is in each checkpoint of version 1, is missing",
    "v1-no-metadata-no-tree": "_CHECKPOINT_METADATA: this file, which is in each checkpoint of version 1, is missing",
    "v1-dummy": "dummy/_METADATA: not valid JSON",
    "v1-no-state": f"state: it {NOT_LISTED}",
    "composite-no-state": f"state: it {NOT_LISTED}",
    "composite-no-json": f"metadata: it {NOT_LISTED}",
    "two-trees-one-gone": f"more: it {NOT_LISTED}",
    "two-trees-v1-one-gone": f"more: it {NOT_LISTED}",
    "v1-pending-deletion": "the deletion of an item was begun and never finished",
    "v1-partial-unfinished": UNFINISHED,
    "zarr-no-tree": UNNAMED,
    "zarr3-folders-no-tree": UNNAMED,
    "fill-values-chunks": "zeros: its chunk c/0/0 is missing; it may be lost, or left out",
    "aggregate": "checkpoint: a: its value is in this msgpack file",
    "one-name": "two leaves of the tree have one name",
    "one-leaf": "its tree is a single value without a name",
    "temporary": UNFINISHED,
    "unfinished-item": UNFINISHED,
}
"""Cases that are refused, with a part of the sentence; all others are read."""

KEYS = {"keys": {"key", "keys"}, "items-of-all-kinds": {"jax_key"}}
"""Cases with typed random keys, and the tensors that have a note for it."""


DAMAGED = ("direct", "composite", "v1", "two-trees-v1", "zarr", "zarr3-folders", "chunks", "leaves", "default-item")
DAMAGED += ("items-of-all-kinds",)

NUM_SAMPLED = 3
"""Damages of a checkpoint in ``make test-all``; ``make soak`` does all of them to each file."""


@pytest.fixture(scope="module")
def cases():
    return make()


def flat(value: Any, path: tuple[str, ...] = ()) -> Restored:
    """An entry as ``fixtures.orbax_runs`` flattens what Orbax restores."""
    if isinstance(value, TensorRef):
        return {}
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        return {".".join(path): {"value": value}}
    return dict(chain.from_iterable(flat(each, (*path, str(key))).items() for key, each in inner))


def ours(path: Path) -> tuple[Restored, set[str], set[str]]:
    """What is read, files that a note says were left out, and tensors that a note is on."""
    opened = open_checkpoint(path, ReadOptions())
    source, manifest = opened.source, opened.manifest
    found: Restored = {
        key.fqn: [entry.dtype.value, list(entry.shape), read_bytes(source.store, entry).hex()]
        for key, entry in manifest.tensors.items()
    }
    # Orbax's loaders do not return it.
    found |= flat({name: each for name, each in manifest.extra.items() if name != "custom_metadata"})
    dropped = {note.what for note in manifest.notes if note.outcome is Outcome.DROPPED}
    return solid(found), dropped, {note.what for note in manifest.notes} - dropped


def solid(found: Restored) -> Restored:
    return {name: each for name, each in found.items() if isinstance(each, list) or each["value"] not in (None, {}, [])}


def named(found: Restored, loader: str) -> Restored:
    """What Orbax restored by our names: without the item's, if there is one tree alone."""
    items = {name.partition(".")[0] for name, each in found.items() if isinstance(each, list)}
    prefix = f"{items.pop()}." if loader != TREE and len(items) == 1 else ""
    return {name.removeprefix(prefix): each for name, each in solid(found).items()}


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_what_orbax_restores_or_is_refused(name, cases):
    made = cases[name]
    if name in REFUSED:
        with pytest.raises(CkptError) as raised:
            ckpt_tools.inspect(made.source)
        assert REFUSED[name] in str(raised.value)
        assert raised.value.exit_code == 4
        return
    # Without its shardings Orbax needs an example of the tree, and without its handlers the user's own.
    truth = made.restored if "error" not in made.restored else cases[made.case.write].restored
    found, dropped, noted = ours(made.source)
    assert found == named(truth, made.case.loader)
    assert not dropped
    assert noted == KEYS.get(name, set())


def damages(folder: Path, *, soak: bool, seed: str) -> list[Damage]:
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    every = [Damage(what, file) for file in files for what in ALONE]
    return every if soak else random.Random(seed).sample(every, NUM_SAMPLED)


def problem(path: Path, whole: Restored, after: Restored, loader: str) -> str | None:
    """What is wrong with what is read of a damaged checkpoint; Orbax restores ``after`` of it. An item of JSON may be
    left out where a note says so."""
    try:
        found, dropped, _ = ours(path)
    except CkptError as error:
        return None if error.exit_code in CODES and str(error) else f"exit code {error.exit_code}: {error}"

    items = {file.partition("/")[0] for file in dropped} - {name.partition(".")[0] for name in found}

    def kept(each: Restored) -> Restored:
        return {name: value for name, value in named(each, loader).items() if name.partition(".")[0] not in items}

    if found != kept(whole):
        return f"it is not what it was, but {sorted(found)}"
    if "error" not in after and found != kept(after):
        return f"Orbax restores {sorted(after)}"
    return None


@pytest.mark.timeout(3600)
def test_no_damage_is_read_otherwise_than_by_orbax(cases, tmp_path, pytestconfig):
    soak = bool(pytestconfig.getoption("--soak"))
    done: dict[str, tuple[Made, Path]] = {}
    for name in DAMAGED:
        made = cases[name]
        for damage in damages(made.source, soak=soak, seed=name):
            path = tmp_path / str(len(done)) / made.source.name
            shutil.copytree(made.source, path)
            damage.do(path)
            done[f"{name}: {damage}"] = made, path
    after = restored(tmp_path / "restored", {name: (made.case.loader, path) for name, (made, path) in done.items()})
    found = {name: problem(path, made.restored, after[name], made.case.loader) for name, (made, path) in done.items()}
    wrong = [f"{name}: {each}" for name, each in found.items() if each is not None]
    assert not wrong, "\n".join(wrong)
