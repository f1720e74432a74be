"""Files made of others by changes: of bits, lengths, places, records and names. Each follows from its number."""

import struct
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from random import Random

from tests.end_to_end.fuzzing.mutations import mutated_data
from tests.serialization.archives import records_of, zipped
from tests.verification.scan import generator, polyglots
from tests.verification.scan.generator import BENIGN, CARRIERS, NUM_SAMPLES, Files
from tests.verification.scan.genuine import PUSHES, PUT_IN, VALUES, genuine, joined, opcodes_of, repacked
from tests.verification.scan.polyglots import DOCUMENTS, ENDS, FILE_CONFIGS, PICKLES

MAX_SEED_BYTES = 12_000
NUM_GENERATED = 300
"""Seeds from the generator of hostile files."""

NAMES = (
    "model.safetensors", "model.SAFETENSORS", "model.gguf", "array.npy", "arrays.npz", "model.pt", "model.Bin",
    "model.pth", "state.pkl", "model", "last.ckpt", "config.json", "log.jsonl", "notes.txt", "run.cfg", "latest",
    "hparams.yaml", "model.joblib", ".metadata", "README",
)  # fmt: skip

_OPCODES = b"(.0INSTVUXBCcioRbtlde})]Kqr\x80\x8c\x8a\x93\x94\x95\x81\x85\x86\n\"'\0PZ!%[{"


@cache
def seeds() -> list[Files]:
    """Files that run nothing and hostile ones, about as many of both."""
    benign = [*polyglots.controls().values(), *(put(data) for put in CARRIERS.values() for data in BENIGN[2:5:2])]
    benign += [files for rule in VALUES for _, files in genuine(rule)]
    made = [polyglots.sample(number).files for number in range(0, polyglots.num_samples(), 2)]
    made += [generator.sample(number).files for number in range(0, NUM_SAMPLES, NUM_SAMPLES // NUM_GENERATED)]
    hostile, small = (
        [files for files in each if sum(map(len, files.values())) < MAX_SEED_BYTES] for each in (made, benign)
    )
    return [*small * (len(hostile) // len(small)), *hostile]


@cache
def tokens() -> list[bytes]:
    """Pieces that mean something to a loader."""
    archives = [zipped(records) for records in polyglots.hidden().values()]
    return [
        *PUT_IN.values(), *PICKLES.values(), *(b"\x80\x04" + data for data in PICKLES.values()), *archives,
        *(generator.npy_of_objects(data) for data in PICKLES.values()), polyglots.tar(generator.OWN),
        *(text.encode() for text in (*DOCUMENTS.values(), *FILE_CONFIGS.values())),
        b"\x80\x02", b"\x80\x04\x95", b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06" + bytes(18), b"\x93NUMPY\x01\x00",
        b"\nimport os; os.system('x')\n", b"\n", b"\r", b'"', b"}}", b"\0" * 8, b"V", b'S"', b"q\0.", b"cos\nsystem\n",
        b"\x93", b"R", b"(S'x'\ntR.", b'{"()":"os.system"}', b'{"auto_map":{"a":"b.c"}}',
    ]  # fmt: skip


def mutated(number: int) -> Files:
    """The files of one number."""
    random = Random(number)
    files = dict(random.choice(seeds()))
    for _ in range(random.choice((1, 1, 2, 3))):
        name = random.choice(list(files))
        change = random.choice(CHANGES)
        with suppress(Exception):  # a change that only a zip can take
            files[name] = change(files[name], random)
    if random.random() < 0.1:
        name = random.choice(list(files))
        files[random.choice((*NAMES, name.swapcase(), f"sub/{name}"))] = files.pop(name)
    return files


def _place(data: bytes, random: Random) -> int:
    """A place in ``data``, rather at one where something begins."""
    found = [0, 8, 10, len(data), max(0, len(data) - 22)]
    for mark in (b"\n", b"PK", b"\x80", b'"', b"}"):
        at = data.find(mark, random.randrange(len(data) + 1))
        found += [at, at + len(mark)] if at >= 0 else []
    return random.choice((*found, random.randrange(len(data) + 1)))


def _opcode(data: bytes, random: Random) -> bytes:
    at = _place(data, random)
    return data[:at] + bytes([random.choice(_OPCODES)]) + data[at + 1 :]


def _insert(data: bytes, random: Random) -> bytes:
    at = _place(data, random)
    return data[:at] + random.choice(tokens()) + data[at:]


def _overwrite(data: bytes, random: Random) -> bytes:
    at, token = _place(data, random), random.choice(tokens())
    return data[:at] + token + data[at + len(token) :]


def _cut(data: bytes, random: Random) -> bytes:
    start, stop = sorted((_place(data, random), _place(data, random)))
    return data[:start] + data[stop:]


def _splice(data: bytes, random: Random) -> bytes:
    other = random.choice(list(random.choice(seeds()).values()))
    return data[: _place(data, random)] + other[_place(other, random) :]


def _value(data: bytes, random: Random) -> bytes:
    """One value of a pickle is another; also in an archive, or behind the header of an array."""
    if data.startswith(b"PK"):
        records = records_of(data)
        name = random.choice([name for name in records if name.endswith(("data.pkl", ".npy"))])
        return repacked(data, name, _value(records[name], random))
    start = 10 + int.from_bytes(data[8:10], "little") if data.startswith(b"\x93NUMPY") else 0
    opcodes, rest = opcodes_of(data[start:])
    at = random.choice([number for number, (name, _) in enumerate(opcodes) if name in PUSHES])
    parts = [part for _, part in opcodes]
    parts[at] = random.choice(list(PUT_IN.values()))
    return data[:start] + joined(parts, rest)


def _records(data: bytes, random: Random) -> bytes:
    """A whole zip with a record that is another, added, named otherwise or at another place."""
    records = list(records_of(data).items())
    at = random.randrange(len(records))
    name, record = records[at]
    match random.randrange(4):
        case 0:
            records[at] = name, random.choice((random.choice(tokens()), _insert(record, random)))
        case 1:
            records.insert(at, (random.choice((f"{name}x", "__main__.py", "archive/x")), random.choice(tokens())))
        case 2:
            records[at] = random.choice((name.upper(), f"x/{name}", name.replace("/", "//"), f"{name} ")), record
        case _:
            random.shuffle(records)
    return zipped(dict(records))


def _carried(_: bytes, random: Random) -> bytes:
    """A whole file of another kind with pieces in it."""
    payload = b"".join(random.choice(tokens()) for _ in range(random.randrange(1, 4)))
    return random.choice(list(ENDS.values()))[1](payload)


def _lengthened(data: bytes, random: Random) -> bytes:
    """A safetensors file whose length begins with an opcode, padded before the end of its header."""
    length = int.from_bytes(data[:8], "little")
    header, payload = data[8 : 8 + length], data[8 + length :]
    wanted = random.choice(_OPCODES) | random.choice((*_OPCODES, 0x20)) << 8
    at = random.choice([n for n in range(len(header)) if header[n : n + 1] in (b",", b"}")])
    padding = random.choice((b" ", b"\n", b"\t")) * max(0, wanted - length)
    return struct.pack("<Q", length + len(padding)) + header[:at] + padding + header[at:] + payload


CHANGES: tuple[Callable[[bytes, Random], bytes], ...] = (
    *[mutated_data, _value] * 8, *[_opcode, _insert, _overwrite, _cut, _splice] * 2, _records, _records, _carried,
    _lengthened,
)  # fmt: skip
