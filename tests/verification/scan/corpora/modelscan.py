"""modelscan's test data (tests/ at commit 8b8ed4b, two commits after release 0.8.6).

Models of Keras and TensorFlow are what its scanners read of them: a configuration, an attribute, names of operations.
"""

import json
import struct
from typing import Any

import numpy as np
import torch

from tests.serialization.archives import npy, saved, saved_legacy, zipped
from tests.verification.scan.corpora.build import Label, call, encrypted, entries, pickled, raw
from tests.verification.scan.corpora.picklescan import ABC, CALLS, EVAL, FORGED, NAMED_IN_MEMO, PNG
from tests.verification.scan.generator import CODE, Files

# Keras and TensorFlow


def _model(*, with_lambda: bool) -> dict[str, Any]:
    layers: list[dict[str, Any]] = [{"class_name": "InputLayer", "config": {"name": "x"}}]
    code = {
        "class_name": "__lambda__",
        "config": {"code": "4wEA\n", "defaults": None, "closure": None},
        "items": ["4wEA\n"],
    }
    layers += [{"class_name": "Lambda", "config": {"function": code}}] * (2 * with_lambda)
    return {"module": "keras", "class_name": "Functional", "config": {"layers": layers}}


def _keras(*, with_lambda: bool) -> bytes:
    config = json.dumps(_model(with_lambda=with_lambda)).encode()
    return zipped({"metadata.json": b"{}", "config.json": config, "model.weights.h5": hdf5("")})


def _message(kind: int, body: bytes) -> bytes:
    body += b"\0" * (-len(body) % 8)
    return struct.pack("<HHB3x", kind, len(body), 0) + body


def hdf5(model_config: str) -> bytes:
    """A file of HDF5 with nothing but an attribute of its root, a text of fixed length (HDF5 specification)."""
    text = model_config.encode() or b" "
    name = b"model_config\0".ljust(16, b"\0")
    string = struct.pack("<B3BI", 0x13, 0, 0, 0, len(text))
    scalar = struct.pack("<BBB5x", 1, 0, 0)
    attribute = struct.pack("<BxHHH", 1, 13, len(string), len(scalar)) + name + string + scalar + text
    undefined = b"\xff" * 8
    messages = [(0x02, b"\0\0" + undefined * 2), (0x0A, b"\0\0"), (0x0C, attribute)]
    body = b"".join(_message(kind, found) for kind, found in messages)
    header = struct.pack("<BxHII4x", 1, len(messages), 1, len(body)) + body
    start = b"\x89HDF\r\n\x1a\n" + bytes([0, 0, 0, 0, 0, 8, 8, 0]) + struct.pack("<HHI", 4, 16, 0)
    end = struct.pack("<Q", 96 + len(header))
    root = struct.pack("<QQII16x", 0, 96, 0, 0)
    return start + bytes(8) + undefined + end + undefined + root + header


def _field(number: int, *values: bytes) -> bytes:
    """Fields of protobuf that have a length."""
    return b"".join(bytes([number << 3 | 2]) + _varint(len(value)) + value for value in values)


def _varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + _varint(value >> 7) if value > 127 else bytes([value])


def _saved_model(*operations: str, layers: list[dict[str, Any]] | None = None) -> Files:
    """A folder of a SavedModel; ``layers`` are those that Keras notes beside it."""
    nodes = [_field(1, b"x") + _field(2, name.encode()) for name in ("Placeholder", *operations)]
    graph = _field(2, _field(1, *nodes))
    noted = [_field(4, b"_tf_keras_layer") + _field(5, json.dumps(layer).encode()) for layer in layers or []]
    return {
        "saved_model.pb": b"\x08\x01" + _field(2, graph),
        "keras_metadata.pb": _field(1, *noted),
        "fingerprint.pb": b"",
    }


_SAFE, _UNSAFE = _model(with_lambda=False), _model(with_lambda=True)
_WHOLE = call("tf_keras.src.saving.pickle_utils:deserialize_model_from_bytecode", _keras(with_lambda=False))

# Pickles

_ORDERED = call("collections:OrderedDict", state={"_metadata": call("collections:OrderedDict")})
_LOADED = b"\x80\x05cos\nsystem\nVx\n\x85R."

_SHARED = [
    "malicious0.pkl", "malicious1_v0.pkl", "malicious1_v3.pkl", "malicious1_v4.pkl", "malicious2_v0.pkl",
    "malicious2_v3.pkl", "malicious2_v4.pkl", "malicious3.pkl", "malicious4.pickle", "malicious5.pickle",
    "malicious7.pkl", "malicious8.pkl", "malicious9.pkl",
]  # fmt: skip
"""Files that picklescan has too, under the same names."""

MALICIOUS: dict[str, bytes | Files] = {
    **{name: pickled(*CALLS[name]) for name in _SHARED},
    **{f"malicious1_v{n}.dill": pickled(*CALLS[f"malicious1_v{n}.pkl"]) for n in (0, 3, 4)},
    "malicious6.pkl": FORGED["malicious6.pkl"],
    "malicious10.pkl": FORGED["malicious10.pkl"],
    "malicious11.pkl": NAMED_IN_MEMO,
    "malicious12.pkl": b"\x80\x05cpickle\nloads\nB" + struct.pack("<I", len(_LOADED)) + _LOADED + b"\x85R0N.",
    "malicious13.pkl": b"\x80\x05cbuiltins\neval.__call__\nV" + CODE.encode() + b"\n\x85R.",
    "malicious14.pkl": NAMED_IN_MEMO + b"\n\n\t\t",
    "malicious15.pkl": pickled(*CALLS["malicious15b.pkl"]),
    "malicious1.zip": zipped({"data.pkl": pickled(EVAL)}),
    "test.zip": zipped({"data.pkl": pickled(EVAL)}),
    "unsafe_zip_pytorch.pt": zipped(
        {
            "unsafe_zip_pytorch/data.pkl": b"\x80\x02cposix\nsystem\nVx\n\x85R" + pickled(_ORDERED, 2)[2:],
            "unsafe_zip_pytorch/byteorder": b"little",
            "unsafe_zip_pytorch/version": b"3\n",
            "unsafe_zip_pytorch/.data/serialization_id": b"0" * 40,
        }
    ),
    "unsafe_numpy.npy": b"\x80\x04" + raw(call("builtins:exec", CODE), np.array([[1, 2, 3], [4, 5, 6]]), b"."),
    "keras/unsafe": {"unsafe": b"\x80\x04" + raw(call("builtins:exec", CODE), _WHOLE, b".")},
    "keras/unsafe.h5": {"unsafe.h5": hdf5(json.dumps(_UNSAFE))},
    "keras/unsafe.keras": {"unsafe.keras": _keras(with_lambda=True)},
    "keras/saved_model_unsafe": _saved_model(layers=_UNSAFE["config"]["layers"]),
    "tensorflow/saved_model_unsafe": _saved_model("WriteFile", "ReadFile"),
}

_STATE = torch.nn.Linear(3, 2).state_dict()

INNOCUOUS: dict[str, bytes | Files] = {
    **{f"benign0_v{n}.{ending}": pickled(ABC, n) for n in (0, 3, 4) for ending in ("pkl", "dill")},
    "safe_zip_pytorch.pt": saved(_STATE),
    "safe_old_format_pytorch.pt": saved_legacy(_STATE),
    "safe_numpy.npy": npy([[1, 2, 3], [4, 5, 6]]),
    "keras/safe": {"safe": pickled(_WHOLE)},
    "keras/safe.h5": {"safe.h5": hdf5(json.dumps(_SAFE))},
    "keras/safe.keras": {"safe.keras": _keras(with_lambda=False)},
    "keras/saved_model_safe": _saved_model(layers=_SAFE["config"]["layers"]),
    "tensorflow/saved_model_safe": _saved_model("MatMul"),
}

NO_MODEL: dict[str, bytes | Files] = {"bad_pytorch.pt": PNG, "password_protected.zip": encrypted()}

ENTRIES = [
    *entries(Label.MALICIOUS, MALICIOUS),
    *entries(Label.INNOCUOUS, INNOCUOUS),
    *entries(Label.NO_MODEL, NO_MODEL),
]
