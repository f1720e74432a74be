"""Hostile files, composed: a payload, by a trick, in an encoding, in a carrier. Each follows from its number.

Every payload ends in ``os.system('x')``, by one road or another, so that who replaces it sees it run.
"""

import bz2
import gzip
import lzma
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from tests.serialization.archives import dcp_of, legacy, npy, oldest, saved, saved_legacy, tarred, torch_zip, zipped
from tests.serialization.hostile import TECHNIQUES, text

Files = dict[str, bytes]

CODE = "__import__('os').system('x')"

PAYLOADS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "os.system": ("os", "system", ("x",)),
    "posix.system": ("posix", "system", ("x",)),
    "eval": ("builtins", "eval", (CODE,)),
    "exec": ("builtins", "exec", (CODE,)),
    "py2 eval": ("__builtin__", "eval", (CODE,)),
    "cProfile": ("cProfile", "run", (CODE,)),
    "pickle.loads": ("pickle", "loads", (b"cos\nsystem\n(S'x'\ntR.",)),
    "runpy": ("runpy", "_run_code", ("import os; os.system('x')", {})),
}

OWN = b"cos\nsystem\n(S'x'\ntR."
"""The plainest of all: what is hidden inside of something else."""


def _call(name: bytes, args: bytes) -> bytes:
    return b"c" + name + b"\n(" + args + b"tR"


def _bytes8(data: bytes) -> bytes:
    return b"\x96" + struct.pack("<Q", len(data)) + data


def _list(data: bytes) -> bytes:
    return b"(" + b"".join(b"K%c" % byte for byte in data) + b"l"


INNER = legacy(OWN)

INDIRECT: dict[str, bytes] = {
    "storage of a bytearray": b"\x80\x05" + _call(b"torch.storage\n_load_from_bytes", _bytes8(INNER)) + b".",
    "storage of a list": b"\x80\x03"
    + _call(b"torch.storage\n_load_from_bytes", _call(b"builtins\nbytes", _list(INNER)))
    + b".",
    "storage of an encoding": b"\x80\x02"
    + _call(
        b"torch.storage\n_load_from_bytes", _call(b"_codecs\nencode", text(INNER.decode("latin-1")) + text("latin1"))
    )
    + b".",
    "storage by the base of _reconstructor": b"\x80\x05"
    + _call(b"copyreg\n_reconstructor", b"cbuiltins\nobject\nctorch.storage\n_load_from_bytes\n" + _bytes8(INNER))
    + b".",
    "storage as a random state": b"\x80\x05"
    + _call(b"numpy.random._pickle\n__randomstate_ctor", _bytes8(INNER) + b"ctorch.storage\n_load_from_bytes\n")
    + b".",
    "storage as a bit generator": b"\x80\x05"
    + _call(b"numpy.random._pickle\n__bit_generator_ctor", b"cos\nsystem\n")
    + b".",
    "storage by a hook": b"\x80\x05ccollections\nOrderedDict\n)R}Vappend\nctorch.storage\n_load_from_bytes\nsb"
    + _bytes8(INNER)
    + b"a.",
    "hook by a state in slots": b"\x80\x05cargparse\nNamespace\n)\x81N}V__setstate__\n"
    b"ctorch.storage\n_load_from_bytes\ns\x86b" + _bytes8(INNER) + b"b.",
    "hook by a dict of another kind": b"\x80\x05cargparse\nNamespace\n)\x81ccollections\nOrderedDict\n)RV__setstate__\n"
    b"ctorch.storage\n_load_from_bytes\nsb" + _bytes8(INNER) + b"b.",
    "items that are judged by the first": b"\x80\x05cargparse\nNamespace\n)\x81}Vadd\n"
    b"ctorch.storage\n_load_from_bytes\nsb(N" + _bytes8(INNER) + b"\x90.",
    "state of a function": b"\x80\x04ctorch._utils\n_rebuild_tensor_v2\n}V__defaults__\ncos\nsystem\n\x85sb.",
    "handed back": b"\x80\x04"
    + _call(b"torch.jit._pickle\nrestore_type_tag", b"cos\nsystem\n" + text("int"))
    + b"S'x'\n\x85R.",
    "handed back by numpy": b"\x80\x04"
    + _call(b"numpy._core.multiarray\nscalar", _call(b"numpy\ndtype", b"S'O8'\nI00\nI01\n") + b"cos\nsystem\n")
    + b"S'x'\n\x85R.",
    "__newobj__": b"\x80\x04ccopyreg\n__newobj__\n(ctypes\nFunctionType\nNtR.",
    "Counter of an object": b"\x80\x05" + _call(b"collections\nCounter", _call(b"os\nsystem", b"S'x'\n")) + b".",
    "in the hooks of a tensor": b"\x80\x05ctorch._utils\n_rebuild_parameter\n(NI00\n" + OWN[:-1] + b"tR.",
    "popped": b"\x80\x05" + OWN[:-1] + b"0N.",
    "overwritten": b"\x80\x05}(S'k'\n" + OWN[:-1] + b"S'k'\nNu.",
    "octal": b"(I010\nI0x10\nL0777L\n" + OWN[:-1] + b"l.",
    "gap of the memo": b"\x80\x02Nr\xff\x0f\x00\x000" + OWN,
}
"""What was found once, and is not made of a payload and a technique."""


def _framed(data: bytes) -> bytes:
    body = data[2:] if data[:1] == b"\x80" else data
    return b"\x80\x04\x95" + struct.pack("<Q", len(body)) + body


def _cut_frame(data: bytes) -> bytes:
    """A frame that ends within a string: CPython's C unpickler goes on, the Python one refuses or reads others."""
    body = data[2:] if data[:1] == b"\x80" else data
    hidden = b"X" + struct.pack("<I", len(body)) + body + b"0"
    return b"\x80\x04\x95" + struct.pack("<Q", 7) + hidden + body


def _frame_in_frame(data: bytes) -> bytes:
    body = data[2:] if data[:1] == b"\x80" else data
    inner = b"\x95" + struct.pack("<Q", len(body)) + body
    return b"\x80\x04\x95" + struct.pack("<Q", len(inner)) + inner


def _head(data: bytes) -> bytes:
    return data[:2] if data[:1] == b"\x80" else b""


ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "as it is": lambda data: data,
    "framed": _framed,
    "a frame that is cut": _cut_frame,
    "a frame in a frame": _frame_in_frame,
    "after a pickle": lambda data: b"\x80\x04N." + data,
    "before a pickle": lambda data: data + b"\x80\x04N.",
    "after a value": lambda data: data[:2] + b"N0" + data[2:] if data[:1] == b"\x80" else b"N0" + data,
    "in a list": lambda data: _head(data) + b"]" + data[len(_head(data)) :].removesuffix(b".") + b"a.",
    "before zeros": lambda data: data + b"\0" * 64,
    "protocol stated twice": lambda data: b"\x80\x05" + data,
}  # fmt: skip

# Carriers


def _npy_of(descr: str, sample: bytes) -> bytes:
    """An array of objects, whose elements are the pickle."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': (1,), }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + sample


def npy_of_objects(sample: bytes) -> bytes:
    return _npy_of("'|O'", sample)


PLAIN_NPY = npy(np.arange(3.0))


def _v7(sample: bytes) -> bytes:
    """Without the magic of ustar: only its checksum says that it is a tar."""
    data = bytearray(oldest(sample))
    at = 0
    while data[at : at + 1] != b"\0" and at + 512 <= len(data):
        size = int(data[at + 124 : at + 135], 8)
        data[at + 257 : at + 265] = bytes(8)
        data[at + 148 : at + 156] = b" " * 8
        data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
        at += 512 + -(-size // 512) * 512
    return bytes(data)


def _like_safetensors(sample: bytes) -> bytes:
    """Its first bytes are those of safetensors; a loader of pickles reads them as a line of text."""
    header = b"{" + b" " * 6 + b"}"
    head = struct.pack("<Q", 8)
    return head[:1].replace(b"\x08", b"V") + head[1:] + header + b"\n0" + sample


def _strict_safetensors(sample: bytes) -> bytes:
    """A whole and strict file of safetensors, whose length begins with an opcode that takes a line."""
    body = b"\n0" + sample.removeprefix(sample[:2] if sample[:1] == b"\x80" else b"")
    header = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (len(body), len(body))
    wanted = next(n for n in range(len(header), len(header) + 512) if n % 256 == ord("V"))
    return struct.pack("<Q", wanted) + header + b" " * (wanted - len(header)) + body


def _dcp(item: bytes, **place: Any) -> Files:
    return dcp_of(item, torch_zip(b"\x80\x02N."), **place)


CARRIERS: dict[str, Callable[[bytes], Files]] = {
    "pickle": lambda data: {"state.pkl": data},
    "pickle named pt": lambda data: {"model.pt": data},
    "pickle of another ending": lambda data: {"model.weights": data},
    "pickle without an ending": lambda data: {"checkpoint": data},
    "pickle named json": lambda data: {"config.json": data},
    "pickle named text": lambda data: {"vocab.txt": data},
    "pickle named safetensors": lambda data: {"model.safetensors": data},
    "torch": lambda data: {"model.pt": torch_zip(data)},
    "torch, deflated": lambda data: {"model.pt": torch_zip(data, compress=True)},
    "torch, behind a prefix": lambda data: {"model.pt": b"\0" * 16 + torch_zip(data)},
    "torch, followed": lambda data: {"model.pt": saved({"x": 1}) + data},
    "torch, twice": lambda data: {"model.pt": torch_zip(b"N.") + torch_zip(data)},
    "torch, named npz": lambda data: {"model.npz": torch_zip(data)},
    "legacy": lambda data: {"model.pt": legacy(data)},
    "legacy, twice": lambda data: {"model.pt": saved_legacy({"x": 1}) + legacy(data)},
    "tar": lambda data: {"model.tar": oldest(data)},
    "tar, pax": lambda data: {"model.pt": oldest(data, tarfile.PAX_FORMAT)},
    "tar, v7": lambda data: {"model.pt": _v7(data)},
    "tar of a pickle": lambda data: {"model.pt": tarred({data[:99].decode("latin-1"): b""}, form=tarfile.GNU_FORMAT)},
    "array of objects": lambda data: {"array.npy": npy_of_objects(data)},
    "array of objects, said otherwise": lambda data: {"array.npy": _npy_of("'O8'", data)},
    "array of objects, as a class": lambda data: {"array.npy": _npy_of("'object'", data)},
    "array of fields": lambda data: {"array.npy": _npy_of("[('a', 'O')]", data)},
    "second array": lambda data: {"array.npy": PLAIN_NPY + npy_of_objects(data)},
    "npz": lambda data: {"arrays.npz": zipped({"first.npy": PLAIN_NPY, "second.npy": npy_of_objects(data)})},
    "DCP metadata": lambda data: {".metadata": data},
    "DCP item": lambda data: _dcp(torch_zip(data)),
    "DCP item of no bytes": lambda data: _dcp(torch_zip(data), length=0),
    "DCP item elsewhere": lambda data: _dcp(torch_zip(data), offset=-10),
    "lone distcp": lambda data: {"__0_0.distcp": torch_zip(data)},
    "gzip": lambda data: {"state.pkl.gz": gzip.compress(data, mtime=0)},
    "gzip named pkl": lambda data: {"state.pkl": gzip.compress(data, mtime=0)},
    "bz2": lambda data: {"state.pkl": bz2.compress(data)},
    "xz": lambda data: {"state.pkl": lzma.compress(data)},
    "like safetensors": lambda data: {"model.bin": _like_safetensors(data)},
    "safetensors to the last byte": lambda data: {"model.safetensors": _strict_safetensors(data)},
    "strict safetensors named bin": lambda data: {"model.bin": _strict_safetensors(data)},
}


def _seven_zip(data: bytes) -> bytes:
    """Its head; that of nothing else could be told from data that is packed."""
    return b"7z\xbc\xaf\x27\x1c\x00\x04" + struct.pack("<IQQI", 0, 0, len(data), 0) + data


def _encrypted(data: bytes) -> bytes:
    """What says in both headers of the record that it is encrypted."""
    archive = bytearray(torch_zip(data))
    for magic, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        found = archive.find(magic)
        while found >= 0:
            archive[found + at] |= 1
            found = archive.find(magic, found + 4)
    return bytes(archive)


def _nemo(data: bytes, mode: str) -> bytes:
    return tarred({"./model_config.yaml": b"name: x\n", "./model_weights.ckpt": torch_zip(data)}, mode=mode)


PACKAGED = ("os", "posix", "builtins", "pickle", "cProfile", "runpy", "torch", "copyreg", "types", "numpy",
            "collections")  # fmt: skip


def package(data: bytes) -> bytes:
    """An archive of torch.package, whose pickles may name the modules that it declares."""
    records = {"model/data.pkl": data, ".data/extern_modules": "\n".join(PACKAGED).encode(), ".data/version": b"6\n"}
    return zipped({f"archive/{name}": record for name, record in {**records, "byteorder": b"little"}.items()})


TINY = b"""{"model_type": "gpt2", "architectures": ["GPT2Model"], "vocab_size": 4, "n_positions": 4, "n_embd": 2,
"n_layer": 1, "n_head": 1, "bos_token_id": 0, "eos_token_id": 0}"""
"""What transformers asks for beside weights."""

CARRIERS |= {
    "joblib": lambda data: {"model.joblib": data},
    "joblib, zlib": lambda data: {"model.joblib": zlib.compress(data)},
    "gzip named joblib": lambda data: {"model.joblib": gzip.compress(data, mtime=0)},
    "lzma": lambda data: {"model.joblib": lzma.compress(data, format=lzma.FORMAT_ALONE)},
    "zstd": lambda data: {"state.pkl": zstandard.compress(data)},
    "7z": lambda data: {"model.pt": _seven_zip(data)},
    "encrypted zip": lambda data: {"model.pt": _encrypted(data)},
    "nemo": lambda data: {"model.nemo": _nemo(data, "w")},
    "nemo, gzip": lambda data: {"model.nemo": _nemo(data, "w:gz")},
    "torch.package": lambda data: {"model.pt": package(data)},
    "pickle named gguf": lambda data: {"model.gguf": data},
    "transformers": lambda data: {"config.json": TINY, "pytorch_model.bin": torch_zip(data)},
    "transformers, legacy": lambda data: {"config.json": TINY, "pytorch_model.bin": legacy(data)},
    "transformers, a bare pickle": lambda data: {"config.json": TINY, "pytorch_model.bin": data},
}


@dataclass(frozen=True, slots=True)
class Sample:
    label: str
    files: Files


def _tricks() -> Iterator[tuple[str, bytes]]:
    yield from INDIRECT.items()
    for technique, make in TECHNIQUES.items():
        for payload, (module, attribute, args) in PAYLOADS.items():
            yield f"{technique}: {payload}", make(module, attribute, args)
    for payload, (module, attribute, args) in PAYLOADS.items():
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            yield f"a reduce in protocol {protocol}: {payload}", _reduced(module, attribute, args, protocol)


class _Reduced:
    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, self.args


def _reduced(module: str, attribute: str, args: tuple[Any, ...], protocol: int) -> bytes:
    data = pickle.dumps({"state": _Reduced(args)}, protocol)
    data = data[:2] + data[11:] if data[2:3] == b"\x95" else data
    data = data.replace(b"c__builtin__\neval\n", f"c{module}\n{attribute}\n".encode())
    data = data.replace(b"cbuiltins\neval\n", f"c{module}\n{attribute}\n".encode())
    for before, after in (("builtins", module), ("eval", attribute)):
        old, new = (b"\x8c" + bytes([len(each)]) + each.encode() for each in (before, after))
        data = data.replace(old, new, 1)
    return data


BENIGN = [pickle.dumps({"epoch": 3, "lr": [0.1, 1e-5], "name": "x"}, protocol) for protocol in range(6)]

TRICKS = list(_tricks())
NUM_SAMPLES = len(TRICKS) * len(ENCODINGS) * len(CARRIERS)


def sample(number: int) -> Sample:
    """One of ``NUM_SAMPLES``."""
    number, carrier = divmod(number, len(CARRIERS))
    number, encoding = divmod(number, len(ENCODINGS))
    trick, data = TRICKS[number % len(TRICKS)]
    named, put = list(CARRIERS.items())[carrier]
    encoded, encode = list(ENCODINGS.items())[encoding]
    return Sample(f"{named} / {encoded} / {trick}", put(encode(data)))


def write(files: Files, folder: Path) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
