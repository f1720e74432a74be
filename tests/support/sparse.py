"""A large checkpoint that takes no room: a safetensors file of holes."""

import json
import os
import struct
from pathlib import Path

COLUMNS = 1000


def make_sparse(path: Path, *, num_tensors: int, num_rows: int) -> Path:
    """Tensors of zeros, and in each some bytes that are not: ``num_tensors * num_rows`` times 4,000 bytes."""
    size = 4 * COLUMNS * num_rows
    entries = {
        f"layer.{n}": {"dtype": "F32", "shape": [num_rows, COLUMNS], "data_offsets": [n * size, (n + 1) * size]}
        for n in range(num_tensors)
    }
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        start = file.tell()
        file.truncate(start + num_tensors * size)
        for n in range(num_tensors):
            os.pwrite(file.fileno(), struct.pack("<f", n + 1), start + n * size + size // 2 // 4 * 4)
    return path
