"""The notes of a conversion, judged by its output: whatever they say of an item is so, and no two speak of one item."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import ckpt_tools
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, StateKey
from ckpt_tools.core.notes import ABSENT_REASON, Note, Outcome
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import CkptError
from ckpt_tools.formats.builtin import FORMATS
from ckpt_tools.formats.deepspeed.common.pickled_objects import is_active_scaler
from ckpt_tools.runs.opening import open_checkpoint
from ckpt_tools.state_tree.from_deepspeed import collect_user_entries
from fixtures.corpus import layouts, make
from tests.support.sweep import tiered

pytestmark = pytest.mark.extended

OPENED = [name for name, layout in layouts().items() if layout.opens_as is not None]
SAMPLE = ["hf-trainer-zero3", "lightning-ckpt-npz", "verl-sharded", "verl-dcp",
          "deepspeed-zero3-bf16-zero1", "deepspeed-zero3-bf16-torch",
          "deepspeed-pipeline-tp-bf16-universal", "deepspeed-pipeline-tp-bf16-safetensors",
          "megatron-megatron", "megatron-zero2", "megatron-gguf", "hf-trainer-peft", "lightning-ckpt-meta"]  # fmt: skip
"""Each source of a kind and each writer."""
WRITERS = [
    *("safetensors", "torch", "dcp", "zero1", "zero2", "zero3", "universal", "gguf", "npz", "megatron", "sharded"),
    *("meta", "peft"),
]
OPTIONS: Mapping[str, dict[str, Any]] = {
    "as it is": {},
    "weights": {"state": "model"},
    "all": {"state": "all"},
    "cast": {"dtype": "float16"},
}


@dataclass(frozen=True)
class Checkpoint:
    """What is read of a source or of an output, by the names that notes use. Each answer is None for what it does not
    know."""

    manifest: Manifest
    files: frozenset[str]

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        opened = open_checkpoint(path, ReadOptions())
        source, manifest = opened.source, opened.manifest
        return cls(manifest, frozenset(source.files))

    @cached_property
    def entries(self) -> dict[str, Any]:
        return collect_user_entries(self.manifest)[0]

    def has(self, what: str, known: frozenset[str]) -> bool | None:
        """Whether ``what`` is here; ``known`` are the names of all files, tensors and entries of both sides."""
        for pattern, answer in _ANSWERS.items():
            if found := re.fullmatch(pattern, what):
                return answer(self, *found.groups())
        return what in self.names if what in known else None

    @cached_property
    def names(self) -> frozenset[str]:
        tensors = [str(key) for key, entry in self.manifest.tensors.items() if entry.kind is not Kind.EXTRA]
        present = [name for name, value in self.entries.items() if value is not None and _is_scaler(name, value)]
        return frozenset([*tensors, *self.manifest.aliases, *present, *self.files])

    def slots(self, slot: str) -> int:
        return sum(key.slot == slot for key in self.manifest.tensors)

    def has_options(self, number: str, names: set[str]) -> bool | None:
        """None for a group that is not here: DeepSpeed has none without elements, so that others get its number."""
        groups = self.manifest.groups
        return names <= groups[int(number)].options.keys() if int(number) < len(groups) else None

    def state(self, number: str) -> bool:
        params = {name for group in self.manifest.groups[int(number) :][:1] for name in group.params}
        return any(key.fqn in params and key.slot not in (WEIGHT, MASTER, "step") for key in self.manifest.tensors)


def _is_scaler(name: str, value: Any) -> bool:
    """Whether it is no scaler that DeepSpeed keeps in every file and that does not scale."""
    return name != "loss_scaler" or is_active_scaler(value)


_ANSWERS: Mapping[str, Callable[..., bool | None]] = {
    r"parameter groups": lambda side: bool(side.manifest.groups),
    r"global_step": lambda side: side.manifest.step is not None,
    r"optimizer state of parameter group (\d+)": Checkpoint.state,
    r"fp32 masters of \S+ parameters?": lambda side: bool(side.slots(MASTER)),
    r"(\w+) of [\d,]+ tensors?": lambda side, slot: bool(side.slots(slot)),
    r"(\w+) = \w+ in parameter group (\d+)": lambda side, name, number: side.has_options(number, {name}),
    r"([\w, ]+) of parameter group (\d+)": lambda side, names, number: (
        None if names in ("step", "hyperparameters") else side.has_options(number, set(names.split(", ")))
    ),
    r"(?:[\d,]+) buffers?": lambda side: None,
}
"""Of items that are no file, tensor or entry."""


def wrong(before: Checkpoint, after: Checkpoint, notes: tuple[Note, ...], target: str) -> list[str]:
    """What the notes say that is not so."""
    twice = [what for what, times in Counter(note.what for note in notes).items() if times > 1]
    found = [f"several notes on {what}" for what in twice]
    known = before.names | after.names
    for note in notes:
        renamed = re.match(r"it is called (\S+) now", note.why)
        was, is_there = before.has(note.what, known), after.has(renamed[1] if renamed else note.what, known)
        if target == "megatron" and (
            note.why.startswith("Megatron needs them") or note.what.startswith("fp32 masters")
        ):
            is_there = None  # What was added for Megatron is left out when it is read.
        said = {
            Outcome.DOUBTFUL: was is not False,
            Outcome.KEPT: is_there is not False,
            Outcome.NOT_LOADED: is_there is not False,
            Outcome.DROPPED: is_there is not True,
            Outcome.DEFAULTED: is_there is not False and (was is not True or _is_left_out(note)),
            Outcome.MISSING: is_there is not True and (was is not True or _is_left_out(note)),
            Outcome.CAST: _is_cast(before.manifest, after.manifest, note),
        }
        if not said[note.outcome]:
            found.append(f"{note.outcome.value}: {note.what} ({note.why}); there before: {was}, after: {is_there}")
    return found


def _is_left_out(note: Note) -> bool:
    """Whether it says that the source has it."""
    return ABSENT_REASON in note.why or "the source's" in note.why or "from the source" in note.why


def _is_cast(before: Manifest, after: Manifest, note: Note) -> bool:
    if (match := re.fullmatch(r"(\w+) to (\w+)", note.why)) is None:
        return True
    slot = re.match(r"(\w+) of [\d,]+ tensor", note.what)
    both = [key for key in before.tensors.keys() & after.tensors.keys() if key.slot == (slot[1] if slot else WEIGHT)]
    if not both:
        return True  # The names are others in the output.
    read = [before.tensors.get(StateKey(key.fqn, MASTER), before.tensors[key]) for key in both]
    pairs = [
        Counter((a.dtype.value, after.tensors[key].dtype.value) for key, a in zip(both, entries, strict=True))
        for entries in (read, [before.tensors[key] for key in both])
    ]
    return note.count in [found[match[1], match[2]] for found in pairs]


def test_every_writer_is_judged():
    assert set(WRITERS) == {each.name for each in FORMATS.values() if each.writes}


@pytest.mark.parametrize(("name", "target"), tiered(product(OPENED, WRITERS), test=(), extended=SAMPLE))
def test_notes_are_true(name, target, tmp_path):
    made = make(name)
    before = Checkpoint.read(made.source)
    one = sorted(key.fqn for key in before.manifest.select_kinds(Kind.PARAMETER))[0]
    problems: list[str] = []
    for number, (label, options) in enumerate([*OPTIONS.items(), ("without one", {"exclude": [re.escape(one)]})]):
        out = tmp_path / str(number)
        try:
            report = ckpt_tools.convert(made.source, out, to=target, world_size=_ranks(target), **options)
        except CkptError:
            assert not out.exists()
            continue
        problems += [f"{label}: {each}" for each in wrong(before, Checkpoint.read(out), report.plan.notes, target)]
    assert problems == []


def _ranks(target: str) -> int | None:
    return 2 if target in ("dcp", "zero1", "zero2", "zero3", "megatron", "sharded") else None
