"""A file more, or a file less, in the folder of a layout: read whole, or refused by every verb in the same words.

What is read with a file less may be less where a note says so, or where the layout lists the file as optional. What is
read with a file more is all that was read without it.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.core.notes import Outcome
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import FormatError, LossError, UsageError
from ckpt_tools.runs.opening import read_checkpoint
from fixtures.corpus import layouts, make
from tests.layouts.test_damage import CODES, UNPROVABLE
from tests.support.every_verb import READING, USING, Verb, refusals

pytestmark = pytest.mark.extended

CHOICES = {
    "accelerate-models-fsdp2": ("pytorch_model_fsdp_0", "pytorch_model_fsdp_1"),
    "accelerate-models-fsdp2-full": ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"),
    "accelerate-models-ddp-safetensors": ("model.safetensors", "model_1.safetensors"),
}
SOURCES = [
    *((name, layout.source) for name, layout in layouts().items() if layout.opens_as is not None),
    *((name, choice) for name, choices in CHOICES.items() for choice in choices),
]

SEEING: dict[str, Verb] = READING | {name: USING[name] for name in ("verify", "diff", "checksum")}
"""Verbs that read all of a source, whatever its format."""

MORE: Mapping[str, Callable[[Path], object]] = {
    "README.md": lambda path: path.write_text("Read me."),
    "notes.bin": lambda path: path.write_bytes(b"\x00\x01"),
    "second.pt": lambda path: torch.save({"other.weight": torch.ones(3, 2)}, path),
    "optimizer_7.bin": lambda path: torch.save({"state": {}, "param_groups": []}, path),
    "training_args.bin": lambda path: torch.save({"lr": 0.1}, path),
    "model_1.safetensors": lambda path: save_file({"other.weight": torch.ones(3, 2)}, path),
    "events.out.tfevents.1": lambda path: path.write_bytes(b"events"),
}
"""Files of users, of other trainers and of other models."""

TARGETS = ("dcp", "zero2")

EVERY = 3
"""Of so many sources one is changed, in one way; the soak changes all of them in all ways."""


@dataclass(frozen=True, slots=True)
class Change:
    """A file that is added or taken away, by its path in the folder of the layout."""

    path: str
    make: Callable[[Path], object] | None = None

    def do(self, folder: Path) -> None:
        if self.make is None:
            (folder / self.path).unlink()
        else:
            self.make(folder / self.path)

    @property
    def name(self) -> str:
        return Path(self.path).name


def changes(folder: Path, source: str, seed: str, *, soak: bool) -> Iterator[Change]:
    root = folder / source
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    inside = source if root.is_dir() else Path(source).parent.as_posix()
    more = [Change(f"{inside}/{name}", each) for name, each in MORE.items() if not (folder / inside / name).exists()]
    every = [*map(Change, files), *more]
    yield from every if soak else random.Random(seed).sample(every, 1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "source" not in metafunc.fixturenames:
        return
    is_soak = metafunc.config.getoption("--soak")
    if "to" not in metafunc.fixturenames:
        metafunc.parametrize(("name", "source"), SOURCES if is_soak else SOURCES[::EVERY])
        return
    cases = [(*source, to) for source in SOURCES for to in TARGETS]
    # In steps of three: two of three sources, with the targets in turn.
    metafunc.parametrize(("name", "source", "to"), cases if is_soak else cases[:: len(TARGETS) + 1])


def digests(source: Path) -> Mapping[Any, Any]:
    return ckpt_tools.checksum(source, output="-").digests


def problem(
    layout: str, change: Change, source: Path, before: Mapping[Any, Any], out: Path, verbs: dict[str, Verb]
) -> str | None:
    """What is wrong with what the ``verbs`` say of a changed folder; None if nothing is."""
    told = refusals(source, out, verbs)
    if len(set(told.values())) > 1:
        return f"the verbs do not agree: {told}"
    code, _ = next(iter(told.values()))
    if code:
        return None if code in CODES else f"exit code {code}"
    after = digests(source)
    if after.items() >= before.items():
        return None
    notes = read_checkpoint(source, ReadOptions())[1].notes
    is_extra = all(key.slot == "extra" for key in before.keys() - after.keys()) and after.items() < before.items()
    is_optional = any(fnmatchcase(change.path, pattern) for pattern in layouts()[layout].optional)
    is_told = any(change.name in note.what or note.what in change.path for note in notes)
    is_unprovable = any(UNPROVABLE.get(layout, ("", "?"))[1] in note.why for note in notes)
    is_beside = any(note.outcome is Outcome.DROPPED and (source / note.what).exists() for note in notes)
    if is_beside if change.make else is_extra or is_optional or is_told or is_unprovable:
        return None
    return f"{len(before.items() - after.items())} tensors of {len(before)} are lost"


@pytest.mark.timeout(3600)
def test_a_file_more_or_less(name, source, tmp_path, pytestconfig):
    made = make(name)
    before = digests(made.folder / source)
    whole = refusals(made.folder / source, tmp_path / "out", SEEING)
    verbs = {verb: SEEING[verb] for verb, (code, _) in whole.items() if not code}
    found: list[str] = []
    soak = bool(pytestconfig.getoption("--soak"))
    for number, change in enumerate(changes(made.folder, source, f"{name}/{source}", soak=soak)):
        folder = shutil.copytree(made.folder, tmp_path / str(number))
        change.do(folder)
        said = problem(name, change, folder / source, before, tmp_path / "out", verbs)
        found += [] if said is None else [f"{change.path}: {said}"]
        shutil.rmtree(folder)
    assert not found, "\n".join(found)


def test_the_counts_are_those_of_what_is_written(name, source, to, tmp_path):
    """Strict: whole, or refused; and a plan never counts more than its source has, nor than its output holds."""
    made = make(name)
    has = ckpt_tools.inspect(made.folder / source)
    try:
        report = ckpt_tools.plan(made.folder / source, tmp_path / "out", to=to, strict=True)
    except LossError:
        report = ckpt_tools.plan(made.folder / source, tmp_path / "out", to=to)
    except (FormatError, UsageError):
        return
    assert 0 < report.num_tensors <= has.num_tensors
    assert report.num_bytes <= 2 * report.file_bytes
    assert not (tmp_path / "out").exists()


def test_tensors_that_the_target_has_no_place_for_do_not_count(tmp_path):
    """The Trainer's optimizer is numbered, so that DeepSpeed's format has no place for it."""
    report = ckpt_tools.convert(make("hf-trainer").source, tmp_path / "out", to="zero1", state="model").plan
    weights = ckpt_tools.inspect(make("hf-trainer").source / "model.safetensors")
    assert (report.num_tensors, report.num_bytes) == (weights.num_tensors, weights.num_bytes)


def test_a_selection_of_nothing_is_an_error_of_usage(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "in.safetensors")
    with pytest.raises(UsageError):
        ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "out.pt", include=["a"], exclude=["a"])
    assert not (tmp_path / "out.pt").exists()
