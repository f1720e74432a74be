"""Files that are valid of one kind, and that another loader takes for something that runs ``os.system('x')``.

Each follows from its number. A loader finds the second meaning in an archive at the end, in the first block of a tar,
in a pickle that starts at the first byte, in the records of a zip, or in text.
"""

import io
import json
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from tests.serialization.archives import (
    dcp_of,
    npy,
    records_of,
    safetensors,
    saved,
    saved_legacy,
    tarred,
    torch_zip,
    zipped,
)
from tests.verification.scan.generator import CODE, OWN, TINY, Files, npy_of_objects, package

SOURCE = f"{CODE}\n".encode()
MODULE = "marker_module"
"""A module that the judge makes importable."""


@dataclass(frozen=True, slots=True)
class Sample:
    """``kind`` is that of its own loader; ``modules`` are importable on the machine that loads it."""

    label: str
    kind: str
    family: str
    files: Files
    modules: tuple[str, ...] = ()


TWO_KINDS, NAMES, TAGS, CODE_NAMES = "two kinds", "module names", "tags of YAML", "names of code"
FAMILIES = (TWO_KINDS, NAMES, TAGS, CODE_NAMES)


def sample(number: int) -> Sample:
    """One of ``num_samples()``."""
    return _samples()[number]


def num_samples() -> int:
    return len(_samples())


@cache
def _samples() -> list[Sample]:
    return [*_at_the_end(), *_tars(), *_records(), *_headers(), *_texts(), *_yaml(), *_configurations()]


# Pickles as text

STACK_GLOBAL = "Vos\nVsystem\nqÓ(Vx\ntR.".encode()
"""UTF-8: the second byte of the letter is the opcode, the first is the argument of the one before."""

PICKLES = {
    "REDUCE": OWN,
    "INST": b"(S'x'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'x'\no.",
    "STACK_GLOBAL": STACK_GLOBAL,
    "BUILD": b"ccollections\nOrderedDict\n)R}V__setstate__\ncos\nsystem\nsbS'x'\nb.",
    "behind a value": b"I1\n0" + OWN,
    "from the memo": b"cos\nsystem\np0\n0g0\n(S'x'\ntR.",
    "eval": f"cbuiltins\neval\n(V{CODE}\ntR.".encode(),
}
"""None has a byte that is not UTF-8."""

# Archives at the end of a file


def zipped_at(base: int, records: Files, *, comment: bytes = b"") -> bytes:
    """An archive whose places count from ``base`` bytes before it."""
    stream = io.BytesIO(bytes(base))
    with zipfile.ZipFile(stream, "a") as archive:
        for name, data in records.items():
            archive.writestr(zipfile.ZipInfo(name), data)
        archive.comment = comment
    return stream.getvalue()[base:]


class _Scripted(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _scripted() -> Files:
    stream = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(torch.jit.script(_Scripted()), stream)
    return records_of(stream.getvalue())


def _compiled() -> bytes:
    from importlib._bootstrap_external import _code_to_timestamp_pyc

    return bytes(_code_to_timestamp_pyc(compile(SOURCE, "x", "exec")))


@cache
def hidden() -> dict[str, Files]:
    """Records of archives that a loader runs."""
    return {
        "a program": {"__main__.py": SOURCE},
        "a compiled program": {"__main__.pyc": _compiled()},
        "a package": records_of(package(OWN)),
        "TorchScript": _scripted(),
        "one member": {"model.pth": OWN},
    }


def elements(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def array(payload: bytes) -> bytes:
    return npy(np.frombuffer(payload, np.uint8))


def _words(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def gguf(payload: bytes, *, text: bytes = b"x", tensors: int = 1) -> bytes:
    """Tensors of a byte each, and one of ``payload`` behind them."""
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, 1)
    head += _words(b"general.name") + struct.pack("<I", 8) + _words(text)
    for number in range(tensors):
        size, at = (len(payload), 32 * (tensors - 1)) if number == tensors - 1 else (1, 32 * number)
        head += _words(b"%x" % number) + struct.pack("<IQIQ", 1, size, 24, at)
    body = b"".join(b"\1".ljust(32, b"\0") for _ in range(tensors - 1)) + payload
    return head + bytes(-len(head) % 32) + body


def elements_of_legacy(payload: bytes) -> bytes:
    return saved_legacy({"w": elements(payload)})


def pickled(payload: bytes) -> bytes:
    return b"\x80\x03B" + struct.pack("<I", len(payload)) + payload + b"q\0."


ENDS: dict[str, tuple[tuple[str, ...], Callable[[bytes], bytes], bytes]] = {
    "safetensors": (("model.safetensors", "model.SAFETENSORS"), safetensors, b""),
    "npy": (("array.npy", "array.NPY"), array, b""),
    "GGUF": (("model.gguf", "model.GGUF"), gguf, b""),
    "torch legacy": (("model.pt", "model.Bin", "model.ckpt"), elements_of_legacy, b""),
    "pickle": (("state.pkl", "state.Bin"), pickled, b"q\0."),
}
"""Names, the file with bytes at its end, and the bytes behind these, which become the comment of an archive."""


def ending(kind: str, records: Files, *, is_absolute: bool) -> bytes:
    _, put, behind = ENDS[kind]
    size = len(zipped_at(0, records, comment=behind)) - len(behind)
    base = len(put(bytes(size))) - size - len(behind) if is_absolute else 0
    archive = zipped_at(base, records, comment=behind)
    return put(archive.removesuffix(behind))


def _at_the_end() -> Iterator[Sample]:
    for kind, (names, _, _) in ENDS.items():
        for what, records in hidden().items():
            for is_absolute in (False, True):
                if is_absolute or what not in ("a package", "TorchScript"):  # torch counts from the first byte
                    data = ending(kind, records, is_absolute=is_absolute)
                    for name in names:
                        label = f"{kind} that ends in {what}, {'absolute' if is_absolute else 'relative'}: {name}"
                        yield Sample(label, kind, TWO_KINDS, {name: data})


# Tar


def tar(data: bytes) -> bytes:
    return tarred({"model_weights.ckpt": data})


_BLOCK = 512
_PAYLOAD_BYTES = 1 << 14


def as_tar(put: Callable[[bytes, bytes], bytes], text_at: int, data: bytes, *, is_valid: bool = True) -> bytes:
    """``put(text, payload)`` whose first block is the header of a member up to a real tar in the payload. The text is
    at ``text_at``; ``data`` is what the real tar holds."""
    mark = b"<here the tar starts>"
    at = put(_fields(text_at, 0, 0), mark.ljust(_PAYLOAD_BYTES)).index(mark)
    shift = -at % _BLOCK
    payload = (bytes(shift) + tar(data)).ljust(_PAYLOAD_BYTES, b"\0")
    size = at + shift - _BLOCK
    block = put(_fields(text_at, size, None), payload)[:_BLOCK]
    checksum = sum(block) if is_valid else sum(block) + 1
    return put(_fields(text_at, size, checksum), payload)


def _fields(text_at: int, size: int, checksum: int | None) -> bytes:
    block = bytearray(b" " * _BLOCK)
    block[100:124] = b"0000644 0000000 0000000 "
    block[124:136] = b"%011o " % size
    block[136:148] = b"%011o " % 0
    block[148:156] = b" " * 8 if checksum is None else b"%07o " % checksum
    block[156:157] = b"0"
    return bytes(block[text_at:])


def torch_at(root: str, payload: bytes, extra: Files | None = None) -> bytes:
    """A file of ``torch.save`` whose root folder has this name, with records beside those of the root."""
    found = records_of(saved({"w": elements(payload)}))
    own = {f"{root}/{name.partition('/')[2]}": data for name, data in found.items()}
    return zipped({**own, **(extra or {})})


TARS: dict[str, tuple[str, int, Callable[[bytes, bytes], bytes]]] = {
    "safetensors": ("model.safetensors", 30, lambda text, data: safetensors(data, k=text.decode())),
    "torch": ("model.pt", 30, lambda text, data: torch_at(text.decode(), data)),
    "npz": ("arrays.npz", 30, lambda text, data: zipped({f"{text.decode()}.npy": array(data)})),
    "npy": ("array.npy", 128, lambda text, data: array(text + data)),
    "GGUF": ("model.gguf", 56, lambda text, data: gguf(data, text=text)),
    "pickle": ("state.pkl", 7, lambda text, data: _pair(text, data)),
    "DCP": ("__0_0.distcp", 30, lambda text, data: torch_at(text.decode(), data)),
}
"""Name, the place of a text in the first block, and the file with that text and a payload."""


def _pair(text: bytes, payload: bytes) -> bytes:
    pushed = b"X" + struct.pack("<I", len(text)) + text + b"q\0" + b"B" + struct.pack("<I", len(payload)) + payload
    return b"\x80\x03" + pushed + b"q\1\x86q\2."


def _tars() -> Iterator[Sample]:
    for kind, (name, text_at, put) in TARS.items():
        for what, data in {**PICKLES, "torch.save": torch_zip(OWN)}.items():
            made = as_tar(put, text_at, data)
            files = dcp_of(made) if kind == "DCP" else {name: made}
            yield Sample(f"{kind} that is a tar of {what}", kind, TWO_KINDS, files)


# Records


def _records() -> Iterator[Sample]:
    """Zips that are whole for torch or numpy, with records for another loader."""
    for what, data in PICKLES.items():
        declared = records_of(package(data))
        for name in ("model.pt", "model.PTH", "model"):
            file = torch_at("archive", b"abc", declared)
            yield Sample(f"torch with a package of {what}: {name}", "torch", TWO_KINDS, {name: file})
            file = torch_at("archive", npy_of_objects(data))
            yield Sample(f"torch with a tensor that is an array of {what}: {name}", "torch", TWO_KINDS, {name: file})
        yield Sample(f"DCP with a package of {what}", "DCP", TWO_KINDS, dcp_of(torch_at("archive", b"abc", declared)))
        yield Sample(f"DCP with a tensor that is an array of {what}", "DCP", TWO_KINDS, dcp_of(file))
    for what, records in hidden().items():
        root = {"a package": "archive/", "TorchScript": next(iter(_scripted())).partition("/")[0] + "/"}.get(what, "")
        plain = {f"{root}a.npy": array(b"abc")}
        for members in ({**records, **plain}, {**plain, **records}) if what != "one member" else ():
            for name in ("arrays.npz", "arrays.NPZ", "arrays"):
                label = f"npz with {what}, {next(iter(members))} first: {name}"
                yield Sample(label, "npz", TWO_KINDS, {name: zipped(members)})


# Pickles that start at the first byte


def _safetensors_line(first: bytes, payload: bytes, *, name: str = "k", newline: bytes = b"\n") -> bytes:
    """A file whose length begins with ``first``: its header is padded by letters that are opcodes of a line."""
    size = len(payload)
    length = int.from_bytes(first, "little")
    tail = b'","w":{"data_offsets":[0,%d],"shape":[%d],"dtype":"U8"%b}}' % (size, size, newline)
    if name == "k":
        head, tail = b'{"__metadata__":{"k":"', tail.replace(b'","w"', b'"},"w"', 1)
    else:
        head, tail = b'{"', tail.replace(b'","w":', b'":', 1).removesuffix(b"}}") + b"}}"
    padding = b"V" * (length - len(head) - len(tail))
    assert len(head) + len(padding) + len(tail) == length
    return struct.pack("<Q", length) + head + padding + tail + payload


LINES: dict[str, tuple[bytes, str]] = {
    **{f"{chr(code)} and a quote": (bytes([code, 0x22]), "k") for code in b"SV"},
    **{f"{opcode}{digit}": (f"{opcode}{digit}".encode(), "k") for opcode in "ILF" for digit in "159"},
    **{
        f"a counted string {code:#x} of {count}": (bytes([code, count]), "k")
        for code in (*b"UCTXB", 0x8A, 0x8B, 0x8C)
        for count in (40, 100)
    },
    **{f"{code:#x} and a float": (bytes([code, ord("G")]), "w") for code in (*b"N])}(", 0x88, 0x8F)},
}
"""The first two bytes of the length, and whose name holds the letters."""

BENIGN_BYTES = b"nothing that runs " * 3

SAFETENSORS_NAMES = ("model.safetensors", "model.SAFETENSORS", "model-00001-of-00002.safetensors")


def _headers() -> Iterator[Sample]:
    for number, (what, (first, name)) in enumerate(LINES.items()):
        payload = list(PICKLES.values())[number % len(PICKLES)]
        file = {SAFETENSORS_NAMES[number % 3]: _safetensors_line(first, payload, name=name)}
        yield Sample(f"safetensors that starts with {what}", "safetensors", TWO_KINDS, file)
    for what, first, before in (("S and an apostrophe", b"S'", b"'\n"), ("V", b"V ", b"\n"), ("I1", b"I1", b"\n0")):
        data = _safetensors_line(first, before + OWN, newline=b"")
        yield Sample(
            f"safetensors that starts with {what}, up to its tensor", "safetensors", TWO_KINDS, {"m.safetensors": data}
        )
    many = gguf(b"abc", text=b"\n" + OWN, tensors=ord("V") << 8)
    yield Sample("GGUF of 22,016 tensors, the letter V", "GGUF", TWO_KINDS, {"model.gguf": many})


# Text

ODD_NAMES = (
    "my-module", "my module", "a/b", "модуль", "1st", "a..b", ".hidden", "os ", " os", "a\tb", "$x", "x:y", "(c) me",
    "a,b", "[x]", "a=b", "模型", "x'y", 'x"y', "#", "%", "a;b", "copyright 2024, me",
)  # fmt: skip


def _texts() -> Iterator[Sample]:
    for what, data in PICKLES.items():
        for name in ("vocab.txt", "README.md", "merges.csv", "train.log", "LICENSE"):
            yield Sample(f"text that is a pickle by {what}: {name}", "text", TWO_KINDS, {name: data})
    for odd in ODD_NAMES:
        for what, form in {
            "REDUCE": "c{}\nrun\n(Vx\ntR.", "INST": "(Vx\ni{}\nrun\n.", "OBJ": "(c{}\nrun\nVx\no.",
            "STACK_GLOBAL": "V{}\nVrun\nqÓ(Vx\ntR.",
        }.items():  # fmt: skip
            files = {"notes.txt": form.format(odd).encode()}
            if odd.isascii() or what not in ("INST", "STACK_GLOBAL"):
                yield Sample(f"text that imports {odd!r} by {what}", "text", NAMES, files, (odd, odd.partition(".")[0]))
    for what, text in FILE_CONFIGS.items():
        for name in ("logging.ini", "setup.cfg", "notes.txt"):
            yield Sample(f"logging.config, {what}: {name}", "text", CODE_NAMES, {name: text.encode()})
    for group in ("console_scripts", "deepspeed.plugins", "pytest11"):
        files = {"x-1.dist-info/entry_points.txt": f"[{group}]\nx = {MODULE}:run\n".encode()}
        yield Sample(f"entry points of {group}", "text", CODE_NAMES, files, (MODULE,))
        files = {"x.egg-info/entry_points.txt": f"[{group}]\nx = {MODULE}:run\n".encode()}
        yield Sample(f"entry points of {group}, of an egg", "text", CODE_NAMES, files, (MODULE,))


_INI = "[loggers]\nkeys=root\n[handlers]\nkeys=h\n[formatters]\nkeys=\n[logger_root]\nhandlers=h\n[handler_h]\n"
FILE_CONFIGS = {
    "class": f"{_INI}class={CODE}\n",
    "args": f"{_INI}class=NullHandler\nargs=({CODE},)\n",
    "kwargs": f"{_INI}class=NullHandler\nkwargs={{'x': {CODE}}}\n",
    "CLASS": f"{_INI}CLASS={CODE}\n",
    "a colon": f"{_INI}Class : {CODE}\n",
    "default section": f"[DEFAULT]\nclass={CODE}\n{_INI}",
    "interpolated": f"{_INI}x={CODE}\nclass=%(x)s\n",
    "carriage returns": f"{_INI}class={CODE}\n".replace("\n", "\r"),
    "a comment before": f"# a comment\n; another\n\n{_INI}class={CODE}\n",
    "a line that goes on": f"{_INI}class=\n  {CODE}\n",
}

# YAML

_APPLY = "tag:yaml.org,2002:python/object/apply:"


def _percent(text: str, every: int = 1) -> str:
    return "".join(f"%{ord(letter):02X}" if at % every == 0 else letter for at, letter in enumerate(text))


DOCUMENTS = {
    "short tag": "!!python/object/apply:os.system ['x']\n",
    "verbatim tag": f"!<{_APPLY}os.system> ['x']\n",
    "verbatim tag, encoded": f"!<{_percent(_APPLY)}os.system> ['x']\n",
    "verbatim tag, colons encoded": f"!<{_APPLY.replace(':', '%3A')}os.system> ['x']\n",
    "short tag, encoded": f"!!{_percent('python')}/object/apply:os.system ['x']\n",
    "short tag, half encoded": f"!!{_percent('python', 2)}/object/apply:os.system ['x']\n",
    "directive": f"%TAG !e! {_APPLY}\n---\n!e!os.system ['x']\n",
    "directive of the primary": f"%TAG ! {_APPLY}\n---\n!os.system ['x']\n",
    "directive of the secondary": f"%TAG !! {_APPLY}\n---\n!!os.system ['x']\n",
    "directive, cut in a word": "%TAG !e! tag:yaml.org,2002:pyt\n---\n!e!hon/object/apply:os.system ['x']\n",
    "directive, encoded": f"%TAG !e! {_percent(_APPLY, 3)}\n---\n!e!os.system ['x']\n",
    "directive behind a mark": f"\ufeff%TAG !e! {_APPLY}\n---\n!e!os.system ['x']\n",
    "directive behind a return": f"# x\r%TAG !e! {_APPLY}\r---\r!e!os.system ['x']\r",
    "directive behind NEL": f"# x\u0085%TAG !e! {_APPLY}\u0085---\u0085!e!os.system ['x']\n",
    "directive behind a separator": f"# x\u2028%TAG !e! {_APPLY}\u2028---\u2028!e!os.system ['x']\n",
    "object/new": "!!python/object/new:os.system ['x']\n",
    "with a state": "!!python/object/apply:os.system {args: ['x'], state: {}}\n",
    "in a mapping": "a:\n  b: !!python/object/apply:os.system ['x']\n",
    "as a key": "? !!python/object/apply:os.system ['x']\n: 1\n",
    "in a flow": "{a: [1, !!python/object/apply:os.system ['x']]}\n",
    "in another document": "a: 1\n---\nb: !!python/object/apply:os.system ['x']\n",
    "with an anchor": "a: &x !!python/object/apply:os.system ['x']\nb: *x\n",
    "anchor before": "a: &x\n  !!python/object/apply:os.system ['x']\n",
    "eval": f'!!python/object/apply:eval ["{CODE}"]\n',
    "subclass": "!!python/object/new:type [x, !!python/tuple [], {__init__: !!python/name:os.system }]\n"
    "--- !!python/object/apply:os.system ['x']\n",
    "after JSON": '{"a": 1}\n--- !!python/object/apply:os.system ["x"]\n',
}


def _yaml() -> Iterator[Sample]:
    for what, text in DOCUMENTS.items():
        for kind, name in (
            ("YAML", "hparams.yaml"),
            ("YAML", "config.YML"),
            ("text", "notes.txt"),
            ("text", "run.cfg"),
        ):
            yield Sample(f"YAML, {what}: {name}", kind, TAGS, {name: text.encode()})


# Names of code


def _with(entry: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "disable_existing_loggers": False, **entry}


LOGGING: dict[str, dict[str, Any]] = {
    "() of a handler": _with({"handlers": {"h": {"()": "os.system", "command": "x"}}}),
    "() of a formatter": _with({"formatters": {"f": {"()": "os.system", "command": "x"}}}),
    "() of a filter": _with({"filters": {"f": {"()": "os.system", "command": "x"}}}),
    "class of a handler": _with({"handlers": {"h": {"class": f"{MODULE}.Handler"}}}),
    "class of a formatter": _with({"formatters": {"f": {"class": f"{MODULE}.Formatter"}}}),
    "ext": _with({"handlers": {"h": {"class": "logging.StreamHandler", "stream": f"ext://{MODULE}.stream"}}}),
    "() with ext": _with({"filters": {"f": {"()": f"ext://{MODULE}.run"}}}),
    "() from elsewhere": _with({"x": {"y": "os.system"}, "filters": {"f": {"()": "cfg://x.y", "command": "x"}}}),
}
RAY: dict[str, Any] = {
    "a value": {"_type": "CLOUDPICKLE_FALLBACK", "value": OWN.hex()},
    "nested": {"config": {"a": [{"_type": "CLOUDPICKLE_FALLBACK", "value": OWN.hex()}]}},
    "with more keys": {"stats": {"_type": "CLOUDPICKLE_FALLBACK", "value": STACK_GLOBAL.hex(), "x": 1}},
}


def _configurations() -> Iterator[Sample]:
    for what, document in LOGGING.items():
        data = json.dumps(document).encode()
        for kind, name in (("JSON", "logging.json"), ("JSON lines", "logging.jsonl"), ("YAML", "logging.yaml")):
            yield Sample(f"logging, {what}: {name}", kind, CODE_NAMES, {name: data}, (MODULE,))
        lines = b'{"a": 1}\n' + data + b"\n{}\n"
        yield Sample(f"logging, {what}, in a line", "JSON lines", CODE_NAMES, {"log.jsonl": lines}, (MODULE,))
    for what, document in RAY.items():
        data = json.dumps(document).encode()
        for name in ("metadata.json", "params.json", "trial.JSON", "experiment_state-1.json"):
            yield Sample(f"Ray, {what}: {name}", "JSON", CODE_NAMES, {name: data})
        for name in ("result.jsonl", "progress.jsonl"):
            yield Sample(f"Ray, {what}: {name}", "JSON lines", CODE_NAMES, {name: data})


# Controls


def controls() -> dict[str, Files]:
    """Files of the same forms that run nothing: they must be clean, or the samples prove nothing."""
    found: dict[str, Files] = {}
    for kind, (names, put, _) in ENDS.items():
        found[f"{kind} of bytes"] = {names[0]: put(BENIGN_BYTES)}
        found[f"{kind} with a signature of a zip"] = {names[0]: put(b"PK\x05\x06" + b"\xff" * 60)}
    for kind, (name, text_at, put) in TARS.items():
        made = as_tar(put, text_at, OWN, is_valid=False)
        found[f"{kind} with another checksum"] = dcp_of(made) if kind == "DCP" else {name: made}
    for what, (first, name) in LINES.items():
        made = _safetensors_line(first, BENIGN_BYTES, name=name)
        found[f"safetensors that starts with {what}"] = {"model.safetensors": made}
    found |= {
        "torch": {"model.pt": torch_at("archive", BENIGN_BYTES)},
        "npz": {"arrays.npz": zipped({"a.npy": array(b"abc"), "b.npy": array(b"")})},
        "torch legacy named pth": {"weights.pth": elements_of_legacy(BENIGN_BYTES)},
        "pickle of a text": {"state.pkl": pickle.dumps({"a": "import os"}, 1)},
        "license": {"LICENSE": b"copyright (c) 2024 the authors\nAll rights reserved.\n\nPermission is granted.\n"},
        "text in brackets": {"NOTICE": b"(c) the authors\nof this model\n"},
        "words": {"vocab.txt": b"V\nI\nthe\nc\nos\n.\n(\n!\n"},
        "readme": {"README.md": b"---\nlicense: mit\ntags:\n- x\n---\n# Model\n\n![image](x.png)\n"},
        "settings": {"tool.cfg": b"[metadata]\nname = x\n[loggers_of_ours]\nkeys = a\n"},
        "yaml": {"hparams.yaml": b"a: 1\nb: !!str 2\nc: [1, 2.5, null]\nd: !!set {x, y}\n"},
        "json": {"config.json": TINY, "generation_config.json": b'{"a": [1, 2], "b": null}'},
        "json lines": {"log.jsonl": b'{"a": 1}\n{"a": 2}\n'},
        "DCP": dcp_of(torch_at("archive", BENIGN_BYTES)),
    }
    return found
