"""The corpora of picklescan, fickling and modelscan: what their projects call malicious is a finding.

``docs/scanning.md`` has what the three scanners say of the same files (``corpora/compare.py``).
"""

from __future__ import annotations

import pytest

from tests.verification.scan.corpora import CORPORA, Label
from tests.verification.scan.scanner import is_clean

RUNS_NOTHING = {"fickling": {"lists of GETs": "lists that hold one another four times; reading them makes three lists"}}
"""Clean, although their projects call them malicious."""

_WHOLE = "a model that was pickled whole, which loading takes from the code of its module"
_NAME = "a name that no checkpoint holds"
_KERAS = "a format of Keras or TensorFlow, which is not read"
_REGISTRY = "the loading process decides what the number means"

FALSE_ALARMS = {
    "picklescan": {
        "bad_pytorch.pt": "a part of an image",
        "not_a_pickle.bin": "no pickle, but named as one",
        "benign_password_protected.zip": "encrypted",
    },
    "fickling": {
        "name: Iterable": _NAME,
        "name: __future__.annotations": _NAME,
        "len([])": _NAME,
        "two pickles": "data behind the first pickle",
        "a list in itself": "a value in itself, which no checkpoint holds",
        "a dict in itself": "a value in itself, which no checkpoint holds",
        "Decimal in a state": "no unpickler reads it: a list has no state",
        "the dtype of an array, in pickle.loads": "a call of pickle.loads",
        "a ParameterDict, as diffusers saves it": _WHOLE,
        "INST of int": "an object of an old-style class of Python 2",
        "EXT1": _REGISTRY,
        "EXT2": _REGISTRY,
        "EXT4": _REGISTRY,
        "EXT1 of a function": _REGISTRY,
        "PyTorch v1.3": _WHOLE,
        "PyTorch v0.1.10": _WHOLE,
        "TorchScript v1.4": "a program",
        "torch and TorchScript in one zip": "a program",
        "testtar.anything": "a tar",
        "test7z.anything": "a 7z archive",
        "corrupted": "no pickle, but named as one",
        "a broken pickle in a zip": "no pickle, but named as one",
        "no zip": "no zip, but named as one",
        "a zip with a wrong checksum": "the checksum is wrong",
        "test_random.zip": "data before a zip",
        "model_legacy_tar.pth": "a tar",
    },
    "modelscan": {
        "bad_pytorch.pt": "a part of an image",
        "password_protected.zip": "encrypted",
        "keras/safe": _WHOLE,
        "keras/safe.h5": _KERAS,
        "keras/safe.keras": _KERAS,
        "keras/saved_model_safe": _KERAS,
        "tensorflow/saved_model_safe": _KERAS,
    },
}
"""Findings on what their projects do not call malicious, and why each is one."""


@pytest.mark.parametrize("project", CORPORA)
def test_malicious_entries_are_findings_and_others_clean_or_known_false_alarms(project):
    clean = {entry.name: entry.label for entry in CORPORA[project] if is_clean(entry.files)}
    assert {name for name, label in clean.items() if label is Label.MALICIOUS} == set(RUNS_NOTHING.get(project, {}))
    others = {entry.name for entry in CORPORA[project] if entry.label is not Label.MALICIOUS}
    assert others - {*clean} == set(FALSE_ALARMS[project])
