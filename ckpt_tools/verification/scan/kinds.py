"""Kinds of files, by name and by first bytes. Only a file that both recognise can be proved."""

from __future__ import annotations

import re
from enum import StrEnum

from ckpt_tools.errors import MalformedError
from ckpt_tools.verification.scan.findings import NotLookedIntoError
from ckpt_tools.verification.scan.pictures import MAGICS as PICTURE_MAGICS

PICKLE_NAME = re.compile(
    r"^(?!(.*/)?\.cache/huggingface/download/).*\.metadata$|\.(pt|pth|bin|ckpt|pkl|pickle|pk|p|mdl|th|pyt|dill|joblib|distcp|pth?\.tar)$",
    re.I,
)
"""Names of files that loaders unpickle. The metadata of ``hf download`` are texts."""

_TEXT_NAME = re.compile(
    r"(^|/)(latest|latest_universal|README|LICENSE|LICENCE|NOTICE|COPYING|VERSION|AUTHORS|"
    r"CACHEDIR\.TAG|\.gitattributes|\.gitignore|(md5|sha\d+|b[23])sums?)$|(^|/)\.cache/huggingface/download/.+\.metadata$"
    r"|\.(md5|sha1|sha224|sha256|sha384|sha512|txt|md|rst|csv|tsv|log|jinja|jinja2|license)$",
    re.I,
)
_CONFIGURATION_NAME = re.compile(r"\.(ya?ml|toml|ini|cfg|conf|gin|properties)$|(^|/)\.editorconfig$", re.I)
_JSON_NAME = re.compile(
    r"\.json$|(^|/)(_METADATA|_CHECKPOINT_METADATA|_sharding|array_metadatas/process_\d+|metadata|\.zarray|\.zgroup|"
    r"\.zattrs|\.zmetadata)$",
    re.I,
)
"""Names without a suffix are those of Orbax and zarr."""

LATEST_NAME = re.compile(r"(^|/)latest(_universal)?$", re.I)
"""Names of files that hold the name of a folder."""

PROGRAM_NAME = re.compile(
    r"\.(py|pyc|pyo|pyd|pyw|pyz|ipynb|so|so\.[\d.]+|dylib|dll|exe|com|sh|bash|bat|cmd|ps1|js|mjs|html?|svg|jar|class|whl|egg|"
    r"pl|rb|lua|c|cc|cpp|cu|cuh|h|hpp|ptx|cubin|hsaco|wasm|app|pth\.py)$"
    r"|\.(dist-info|egg-info|egg)/|\.egg-link$|(^|/)pyvenv\.cfg$",
    re.I,
)
"""Names of programs, and of files of an installed package."""

PACKAGE_NAME = re.compile(r"\.(dist-info|egg-info|egg)$", re.I)
"""Names of folders of an installed package: a Python that is started beside one runs its entry points."""

KNOWN_PROGRAM_HASHES = {
    "bbeb8b1fe7d79563af43902ec91f2db0be8d145466043aae200ff05168a4d6ba": "zero_to_fp32.py of DeepSpeed 0.19",
    "b1f54984e60ece6da9343a70233ef4e04653e8ce4c2739faa4363cd124a99561": "zero_to_torch.py",
}
"""Programs that DeepSpeed writes into every checkpoint, by the SHA-256 of their bytes."""

MAX_KNOWN_PROGRAM_BYTES = 1 << 17

_UNSUPPORTED_MAGICS = {
    b"\x1f\x8b": "compressed with gzip",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ\0": "compressed with xz",
    b"]\0\0": "compressed with lzma",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\x04\x22\x4d\x18": "compressed with lz4",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"\x89HDF": "an HDF5 file",
    b"GGUF": "a GGUF file",
    b"\x0c\xdb": "data of Orbax (OCDBT), which is not a pickle, and of which not every byte can be accounted for",
    b"\x7fELF": "a program",
    b"ZF": "compressed with joblib",
}


class FileKind(StrEnum):
    """Kinds of files that can be proved, and programs."""

    PROGRAM = "a program"
    SAFETENSORS = "safetensors"
    GGUF = "GGUF"
    NPY = "an array of numpy"
    NPZ = "an archive of arrays"
    ZIP = "a zip archive"
    """Of a name that says nothing: a file of torch.save, or an archive of arrays."""
    JSON = "JSON"
    JSON_LINES = "lines of JSON"
    CONFIGURATION = "settings in YAML, TOML or the form of INI"
    TEXT = "text"
    PICTURE = "a picture or a PDF"
    PICKLED = "a pickle or a file of torch.save"
    """The first bytes decide which: a zip, torch's format before 1.6, a pickle."""


IN_MEMORY_KINDS = frozenset(
    {FileKind.JSON, FileKind.JSON_LINES, FileKind.CONFIGURATION, FileKind.TEXT, FileKind.PICTURE}
)

_NAME_PATTERNS = {
    FileKind.PROGRAM: PROGRAM_NAME,
    FileKind.SAFETENSORS: re.compile(r"\.safetensors$", re.I),
    FileKind.GGUF: re.compile(r"\.gguf$", re.I),
    FileKind.NPY: re.compile(r"\.npy$", re.I),
    FileKind.NPZ: re.compile(r"\.npz$", re.I),
    FileKind.PICTURE: re.compile(r"\.(png|jpe?g|gif|webp|pdf)$", re.I),
    FileKind.PICKLED: PICKLE_NAME,
    FileKind.CONFIGURATION: _CONFIGURATION_NAME,
    FileKind.JSON_LINES: re.compile(r"\.jsonl$", re.I),
    FileKind.JSON: _JSON_NAME,
    FileKind.TEXT: _TEXT_NAME,
}

_UNSUPPORTED_NAME = re.compile(
    r"\.(h5|hdf5?|keras|onnx|pb|tflite|nemo|tar|tgz|gz|bz2|xz|lzma|zst|lz4|z|7z|rar|mar|pt2|ptl|mlmodel|msgpack|arrow|"
    r"parquet|feather|db|sqlite)$",
    re.I,
)
"""Endings of formats that are not proved, whatever the bytes are."""

_KINDS_BY_MAGIC: dict[bytes, tuple[FileKind, ...]] = {
    b"PK\x03\x04": (FileKind.ZIP, FileKind.PICKLED, FileKind.NPZ),
    b"\x93NUMPY": (FileKind.NPY,),
    b"GGUF": (FileKind.GGUF,),
    **dict.fromkeys(PICTURE_MAGICS, (FileKind.PICTURE,)),
}

PICKLE_START = re.compile(rb"\x80[\x02-\x05]")
"""Start of a pickle of protocol 2 or later."""


def detect_kind(path: str, head: bytes) -> FileKind:
    """The kind that the name says, and that the first bytes do not contradict; of a name that says nothing, the kind
    that the first bytes say.

    Raises:
        NotLookedIntoError: it is of no kind that is proved. MalformedError: name and first bytes say two kinds.
    """
    kinds_by_magic = next((found for magic, found in _KINDS_BY_MAGIC.items() if head.startswith(magic)), ())
    kind_by_name = next((kind for kind, names in _NAME_PATTERNS.items() if names.search(path)), None)
    if kind_by_name is FileKind.PROGRAM:
        return FileKind.PROGRAM
    if kinds_by_magic == (FileKind.PICTURE,) and kind_by_name in (None, FileKind.PICKLED):
        return FileKind.PICTURE
    if kind_by_name is None and not _UNSUPPORTED_NAME.search(path) and (kinds_by_magic or PICKLE_START.match(head)):
        return kinds_by_magic[0] if kinds_by_magic else FileKind.PICKLED
    if kind_by_name is None or (
        kind_by_name is FileKind.PICKLED and not kinds_by_magic and describe_unknown_kind(head) != _UNKNOWN_TYPE
    ):
        raise NotLookedIntoError(describe_unknown_kind(head))
    if kind_by_name is FileKind.PICTURE and not kinds_by_magic:
        raise MalformedError("its name is that of a picture or a PDF, and its first bytes are not")
    if kinds_by_magic and kind_by_name not in kinds_by_magic:
        raise MalformedError(
            f"its name is that of {kind_by_name}, its first bytes are those of {' or '.join(kinds_by_magic)}"
        )
    return kind_by_name


_UNKNOWN_TYPE = "unknown file type, not scanned"


def describe_unknown_kind(head: bytes) -> str:
    """Finding on a file of an unknown type."""
    for magic, description in _UNSUPPORTED_MAGICS.items():
        if head.startswith(magic):
            return f"it is {description}"
    if head[257:262] == b"ustar":
        return "it is a tar archive; torch before 0.1.10 wrote such, and no loader of today needs them"
    return _UNKNOWN_TYPE
