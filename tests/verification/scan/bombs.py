"""Files of any size that take a careless scan more than their size: each follows from its number of bytes."""

import json
import struct
from collections.abc import Callable

from tests.serialization.archives import safetensors, zipped
from tests.verification.scan.generator import Files
from tests.verification.scan.polyglots import array, torch_at

Bomb = Callable[[int], Files]


def _filled(unit: bytes, size: int, first: bytes = b"", last: bytes = b"") -> bytes:
    return first + unit * ((size - len(first) - len(last)) // len(unit)) + last


def _pickle(unit: bytes, first: bytes = b"\x80\x02", last: bytes = b"N.") -> Bomb:
    return lambda size: {"a.pkl": _filled(unit, size, first, last)}


def _nested(depth: int, around: bytes = b"ccollections\nOrderedDict\n%bR.") -> Bomb:
    """Pickles behind one another, each with arguments of this depth."""
    return _pickle(around % (b"(" * depth + b"t" * depth), b"", b"")


def _file(name: str, unit: bytes, first: bytes = b"", last: bytes = b"") -> Bomb:
    return lambda size: {name: _filled(unit, size, first, last)}


def _anchors(size: int) -> Files:
    """Each list of YAML has the one before it ten times."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, size // 90)]
    return {"a.yaml": "\n".join(lines).encode()}


PICKLED: dict[str, Bomb] = {
    **{f"pickles with arguments of depth {depth}": _nested(depth) for depth in (1, 10, 90, 400, 5000)},
    "pickles with nested states": _nested(50, b"ccollections\nOrderedDict\n)R%bb."),
    "pickles with nested keys": _nested(50, b"}%bNs."),
    "values that double": _pickle(b"2\x86", b"\x80\x02N", b"."),
    "keys that double": _pickle(b"2\x86", b"\x80\x02}N", b"Ns."),
    "calls within one another": _pickle(b"\x85h\x00\x86R", b"\x80\x02cos\nsystem\nq\x000N", b"."),
    "lines of digits": _pickle(b"7", b"L", b"L\n."),
    "numbers of many bytes": lambda size: {"a.pkl": b"\x80\x02\x8b" + struct.pack("<I", size) + b"\x7f" * size + b"."},
    "marks": _pickle(b"(", b"\x80\x02", b"."),
    "sets in sets": _pickle(b"(\x91", b"\x80\x04", b"."),
    "other names": lambda size: {"a.pkl": b"".join(b"c%d\nb\n0" % n for n in range(size // 10)) + b"N."},
}
_ORDERED = b"ccollections\nOrderedDict\n"
_REBUILD = b"ctorch._tensor\n_rebuild_from_type_v2\n"
PICKLED |= {
    name: _pickle(again, first)
    for name, (first, again) in {
        "a long tuple as arguments": (b"(" + b"N" * 30_000 + b"tq\x000ca\nb\nq\x01", b"h\x01h\x00R0"),
        "a large dict as a state": (b"(" + b"NN" * 15_000 + b"dq\x000" + _ORDERED + b")Rq\x01", b"h\x00b"),
        "wide arguments to show": (b"(" + b"(NNNNNNNNtq\x01" * 8 + b"tq\x000ca\nb\nq\x02", b"h\x02h\x00R0"),
        "a list that is rebuilt with": (
            b"(" + b"N" * 30_000 + b"lq\x000" + _REBUILD + b"q\x01ca\nb\nh\x00q\x020", b"h\x01(NNh\x02NtR0",
        ),
        "nested bytes": (b"C\x40" + b"N" * 64 + b"q\x000cpickle\nloads\nq\x01", b"h\x01h\x00\x85R0"),
        "pickles in a row": (b"", b"N."),
            "names": (b"", b"ca\nb\n0"),
    }.items()
}  # fmt: skip
"""What comes first, and what is done with it again and again."""

OTHERS: dict[str, Bomb] = {
    "spaces": _file("a.cfg", b" \n"),
    "verbatim tags": _file("a.txt", b"!<"),
    "tags": _file("a.md", b"!!"),
    "percent signs": _file("a.txt", b"%"),
    "sections": _file("a.ini", b"[loggers\n"),
    "one long name": _file("a.txt", b"a", b"c "),
    "lists of JSON that end": lambda size: {"a.json": b"[" * (size // 2) + b"]" * (size // 2)},
    "a text of JSON": _file("a.json", b"\\u0041", b'"', b'"'),
    "keys of JSON": lambda size: {"a.json": json.dumps({str(n): {"()": n} for n in range(size // 20)}).encode()},
    "lines of JSON": _file("a.jsonl", b"{}\n"),
    "keys of YAML": _file("a.yaml", b"? "),
    "lists of YAML": _file("a.yaml", b"- "),
    "documents of YAML": _file("a.yaml", b"---\n"),
    "directives of YAML": lambda size: {"a.yaml": b"".join(b"%%TAG !e%d! tag:x\n" % n for n in range(size // 19))},
    "quotes of YAML": _file("a.yaml", b"''"),
    "aliases of YAML": _anchors,
    "records of a zip": lambda size: {"a.npz": zipped({f"{n}.npy": array(b"") for n in range(size // 240)})},
    "a name of a record": lambda size: {"a.pt": torch_at("a" * min(size // 8, 60_000), b"abc")},
    "a text of safetensors": lambda size: {"a.safetensors": safetensors(b"abc", k="V" * size)},
}
"""Bombs of other kinds than a pickle."""

BOMBS = PICKLED | OTHERS
