"""Kinds of files, by name and by first bytes. Only a file that both recognise can be proved."""

from __future__ import annotations

import re

PICKLED = re.compile(
    r"(^|/)\.metadata$|\.(pt|pth|bin|ckpt|pkl|pickle|pk|p|mdl|th|pyt|dill|joblib|metadata|distcp|pth?\.tar)$", re.I
)
"""Names of files that loaders unpickle."""

_TEXT_NAME = re.compile(
    r"(^|/)(latest|latest_universal|README|LICENSE|LICENCE|NOTICE|COPYING|VERSION|AUTHORS|\.gitattributes|\.gitignore)$"
    r"|\.(txt|md|rst|yaml|yml|csv|tsv|log|cfg|ini|toml|jinja|jinja2|license)$",
    re.I,
)
_JSON_NAME = re.compile(
    r"\.json$|(^|/)(_METADATA|_CHECKPOINT_METADATA|_sharding|array_metadatas/process_\d+|metadata|\.zarray|\.zgroup|"
    r"\.zattrs|\.zmetadata)$",
    re.I,
)
"""Names without a suffix are those of Orbax and zarr."""
_JSON_LINES_NAME = re.compile(r"\.jsonl$", re.I)

PROGRAM = re.compile(
    r"\.(py|pyc|pyo|pyd|pyw|pyz|ipynb|so|so\.[\d.]+|dylib|dll|exe|com|sh|bash|bat|cmd|ps1|js|mjs|html?|svg|jar|class|whl|egg|"
    r"pl|rb|lua|c|cc|cpp|cu|cuh|h|hpp|ptx|cubin|hsaco|wasm|app|pth\.py)$",
    re.I,
)
"""Endings of programs: what runs them is not asked."""

KNOWN_PROGRAMS = {
    "bbeb8b1fe7d79563af43902ec91f2db0be8d145466043aae200ff05168a4d6ba": "zero_to_fp32.py of DeepSpeed 0.19",
    "b1f54984e60ece6da9343a70233ef4e04653e8ce4c2739faa4363cd124a99561": "zero_to_torch.py",
}
"""Programs that DeepSpeed writes into every checkpoint, by the SHA-256 of their bytes."""

MAX_KNOWN_PROGRAM_BYTES = 1 << 17

_MAGIC = {
    b"\x1f\x8b": "compressed with gzip",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ\0": "compressed with xz",
    b"]\0\0": "compressed with lzma",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\x04\x22\x4d\x18": "compressed with lz4",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"\x89HDF": "an HDF5 file",
    b"GGUF": "a GGUF file, and its name does not end in .gguf",
    b"\x0c\xdb": "data of Orbax (OCDBT), which is not a pickle, and of which not every byte can be accounted for",
    b"%PDF": "a PDF file",
    b"\x7fELF": "a program",
    b"ZF": "compressed with joblib",
}


def is_text(path: str) -> bool:
    return _TEXT_NAME.search(path) is not None


def is_json(path: str) -> bool:
    return _JSON_NAME.search(path) is not None


def is_json_lines(path: str) -> bool:
    return _JSON_LINES_NAME.search(path) is not None


def unknown_kind(head: bytes) -> str:
    """Finding on a file of an unknown type."""
    for magic, what in _MAGIC.items():
        if head.startswith(magic):
            return f"it is {what}"
    if head[257:262] == b"ustar":
        return "it is a tar archive; torch before 0.1.10 wrote such, and no loader of today needs them"
    return "unknown file type, not scanned"
