"""``python -m tests.pictures.drawing`` draws docs/concepts/pictures from the shard tables of checkpoints that the
frameworks wrote.

Nothing in a picture is typed in: boxes, intervals, padding and counts are those of the checkpoint's manifest.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import ckpt_tools
from ckpt_tools.core.manifest import Manifest, StateKey, TensorEntry
from ckpt_tools.core.shards import ShardTable
from fixtures import store
from fixtures.corpus import make
from tests.support.svg import COLOURS, LINE, MARGIN, WIDTH, Picture

FOLDER = Path(__file__).parent.parent.parent / "docs" / "concepts" / "pictures"
INNER = WIDTH - 2 * MARGIN


def pictures() -> dict[str, str]:
    """Every picture by its file's name. Makes every checkpoint that is not in the cache."""
    return {f"{name}.svg": str(draw()) for name, draw in _DRAWN.items()}


def manifest_of(path: Path) -> Manifest:
    with ckpt_tools.open(path) as checkpoint:
        return checkpoint.manifest


def _run(kind: str, case: str, world_size: int) -> Manifest:
    return manifest_of(store.checkpoint(kind, case, world_size).checkpoint)


def rank_of(file: str) -> int:
    """The rank that wrote a file, by its name."""
    found = re.search(r"__(\d+)_\d+\.distcp|pp_rank_(\d+)_", file)
    assert found, file
    return int(found[1] or found[2])


def ranks_of(table: ShardTable) -> list[int]:
    """The rank of each shard."""
    return [rank_of(table.get_byte_range(row).file) for row in range(len(table))]


def _shape(entry: TensorEntry) -> str:
    return " × ".join(map(str, entry.shape))


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(filter(None, [", ".join(map(str, numbers[:-1])), *map(str, numbers[-1:])]))


class Cells(NamedTuple):
    """A region of a matrix, and the rank that has it."""

    rank: int
    rows: range
    columns: range


def cells_of(table: ShardTable, layer: int = 0) -> list[Cells]:
    """The shards of a matrix, or of one matrix in a stack."""
    found = []
    for rank, shard in zip(ranks_of(table), table, strict=True):
        *stack, rows, columns = map(range, shard.box.start, shard.box.stop)
        if all(layer in each for each in stack):
            found.append(Cells(rank, rows, columns))
    return found


def _grid(picture: Picture, entry: TensorEntry, cell: float) -> None:
    """A matrix in its shape, or the first of a stack: each shard in the colour of its rank, with the rank's number."""
    for each in cells_of(entry.shards):
        x, y = MARGIN + each.columns.start * cell, picture.y + each.rows.start * cell
        labels = (f"rank {each.rank}", str(each.rank))
        picture.box(x, y, len(each.columns) * cell, len(each.rows) * cell, COLOURS[each.rank], labels)
    picture.y += entry.shape[-2] * cell


def _rows(picture: Picture, name: str, entry: TensorEntry, world_size: int, cell: float) -> None:
    """A matrix that is cut by rows, with the rows of each rank beside it, and the ranks that have none."""
    picture.words(f"{name}: {_shape(entry)}", strong=True)
    top = picture.y
    _grid(picture, entry, cell)
    cut = cells_of(entry.shards)
    for each in cut:
        said = f"row {each.rows[0]}" if len(each.rows) == 1 else f"rows {each.rows[0]} to {each.rows[-1]}"
        middle = top + (each.rows.start + each.rows.stop) * cell / 2
        picture.text(f"rank {each.rank}: {said}", 2 * MARGIN + entry.shape[-1] * cell, middle)
    if absent := sorted({*range(world_size)} - {each.rank for each in cut}):
        picture.words(f"ranks {_listed(absent)}: no rows")
    picture.y += MARGIN


def checkpoint() -> Picture:
    """One tensor of a DCP, and the files that have its parts."""
    manifest = _run("fsdp2", "awkward", 4)
    name, cell, left = "blocks.0.up.weight", 14, 220
    entry = manifest.tensors[StateKey(name)]
    picture = Picture("The rows of one tensor are in the files of four ranks")
    picture.words(f"{name}: {_shape(entry)}", strong=True)
    top = picture.y
    _grid(picture, entry, cell)
    pieces = [shard.at.file for each in manifest.tensors.values() for shard in each.shards]
    for number, (cut, shard) in enumerate(zip(cells_of(entry.shards), entry.shards, strict=True)):
        y, file = top + number * 3.4 * LINE, shard.at.file
        middle = top + (cut.rows.start + cut.rows.stop) * cell / 2
        picture.line((MARGIN + entry.shape[1] * cell, middle), (left, y + LINE))
        picture.box(left, y, WIDTH - MARGIN - left, 2 * LINE, COLOURS[cut.rank], (file,))
        picture.text(f"{pieces.count(file)} pieces of tensors", left, y + 2.5 * LINE)
    picture.y = top + 13.4 * LINE
    return picture


def fsdp2() -> Picture:
    """Uneven rows, and ranks without any."""
    manifest = _run("fsdp2", "awkward", 4)
    picture = Picture("Rows of tensors on the four ranks of an FSDP2 run")
    for name in ("embed.weight", "oddities.two"):
        _rows(picture, name, manifest.tensors[StateKey(name)], 4, 16)
    return picture


def mesh() -> Picture:
    """Rows cut by FSDP2, columns by tensor parallelism."""
    entry = _run("fsdp2-tp", "plain", 4).tensors[StateKey("blocks.0.down.weight")]
    picture = Picture("A matrix that FSDP2 cuts by rows and tensor parallelism by columns")
    picture.words(f"blocks.0.down.weight: {_shape(entry)}", strong=True)
    _grid(picture, entry, INNER / entry.shape[1])
    return picture


class Piece(NamedTuple):
    """Elements of a parameter in a rank's vector, from ``start`` on."""

    name: str
    rank: int
    start: int
    numel: int


def pieces_of(manifest: Manifest, group: int, slot: str) -> list[Piece]:
    """A param group as the ranks' vectors hold it. Places are those of the bytes, so that gaps are padding."""
    found = [
        Piece(name, rank, shard.at.start // 4, shard.box.numel)
        for name in manifest.groups[group].params
        for table in [manifest.tensors[StateKey(name, slot)].shards]
        for rank, shard in zip(ranks_of(table), table, strict=True)
    ]
    first = {rank: min(each.start for each in found if each.rank == rank) for rank in {each.rank for each in found}}
    return [each._replace(start=each.start - first[each.rank]) for each in found]


def _vectors(about: str, manifest: Manifest, world_size: int, group: int = 0) -> Picture:
    """The moments of a param group: a vector for each rank, parameters in colours, padding dashed; then a key."""
    picture, pieces = Picture(about), pieces_of(manifest, group, "exp_avg")
    names = list(dict.fromkeys(each.name for each in pieces))
    length = max(each.start + each.numel for each in pieces)
    scale = INNER / length
    for rank in range(world_size):
        own = [each for each in pieces if each.rank == rank]
        padding = length - sum(each.numel for each in own)
        picture.words(f"rank {rank}: {length} elements" + (f", {padding} of them padding" if padding else ""))
        picture.box(MARGIN, picture.y, INNER, 1.5 * LINE)
        for each in own:
            number = names.index(each.name)
            x, width = MARGIN + each.start * scale, each.numel * scale
            picture.box(x, picture.y, width, 1.5 * LINE, COLOURS[number], (str(number + 1),))
        picture.y += 2 * LINE
    for number, name in enumerate(names):
        parts = " + ".join(str(each.numel) for each in pieces if each.name == name)
        picture.box(MARGIN, picture.y + 1, LINE - 2, LINE - 2, COLOURS[number], (str(number + 1),))
        picture.words(f"{name}: {parts}", 2 * MARGIN + LINE)
    return picture


def zero2() -> Picture:
    """A group end to end, cut evenly."""
    return _vectors("Parameters of one group in the vectors of three ZeRO-2 ranks", _run("zero2-fp32", "awkward", 3), 3)


def zero3() -> Picture:
    """Each parameter cut by itself."""
    return _vectors("Parameters of one group in the vectors of three ZeRO-3 ranks", _run("zero3-fp32", "awkward", 3), 3)


def universal() -> Picture:
    """A folder for each parameter."""
    manifest = _run("universal-zero1-fp32", "awkward", 2)
    picture = Picture("Folders of parameters in a universal checkpoint, and their files")
    for name in ("embed.weight", "blocks.0.up.weight", "blocks.0.up.bias"):
        entries = [entry for key, entry in manifest.tensors.items() if key.fqn == name]
        files = {file: entry for entry in entries for file in entry.shards.files if "/zero/" in file}
        folder = {file.rpartition("/")[0] for file in files}
        picture.words(f"{folder.pop()}/", strong=True)
        x: float = MARGIN
        for number, (file, entry) in enumerate(sorted(files.items())):
            label = file.rpartition("/")[2]
            width = len(label) * 8.6 + 4
            picture.box(x, picture.y, width, 1.5 * LINE, COLOURS[number], (label,))
            picture.text(_shape(entry) or "one number", x + 2, picture.y + 2 * LINE)
            x += width + 4
        picture.y += 3 * LINE
    return picture


def torch_dist() -> Picture:
    """Tensor parallel boxes of a weight, and intervals of its moments."""
    manifest = manifest_of(make("megatron-flattened").source)
    name = "decoder.layers.mlp.linear_fc2.weight"
    picture = Picture("One layer of a stacked Megatron-Core weight: tensor parallel boxes, and flattened ranges")
    picture.words(name, strong=True)
    for slot in ("weight", "exp_avg"):
        entry = manifest.tensors[StateKey(name, slot)]
        num_layers, *shape = entry.shape
        picture.words(f"{slot} of the first of {num_layers} layers: {shape[0]} × {shape[1]}")
        _grid(picture, entry, INNER / entry.shape[-1])
        picture.y += MARGIN
    return picture


def conversion() -> Picture:
    """Intervals of a ZeRO-3 checkpoint that fill the boxes of a DCP for two ranks."""
    source, key = store.checkpoint("zero3-fp32", "awkward", 3).checkpoint, StateKey("blocks.0.up.weight", "exp_avg")
    with TemporaryDirectory() as folder:
        ckpt_tools.convert(source, Path(folder) / "out", to="dcp", world_size=2)
        before, after = manifest_of(source).tensors[key], manifest_of(Path(folder) / "out").tensors[key]
    picture, scale = Picture("Intervals of a ZeRO-3 checkpoint that fill the boxes of a DCP"), INNER / before.numel
    picture.words(f"{key.fqn}, {key.slot}: {_shape(before)}", strong=True)
    picture.words("ZeRO-3, 3 ranks")
    top, bottom = picture.y + 2 * LINE, picture.y + 5 * LINE
    for rank, start, stop in intervals(before.shards):
        x, width = MARGIN + start * scale, (stop - start) * scale
        picture.box(x, top - 2 * LINE, width, 2 * LINE, COLOURS[rank], (f"rank {rank}: {start}–{stop - 1}",))
        for _, left, right in intervals(after.shards):
            low, high = max(start, left), min(stop, right)
            if low < high:
                at, to = MARGIN + low * scale, MARGIN + high * scale
                picture.shape([(at, top), (to, top), (to, bottom), (at, bottom)], COLOURS[rank])
                picture.text(str(high - low), (at + to) / 2, (top + bottom) / 2, anchor="middle")
    for rank, start, stop in intervals(after.shards):
        x, width = MARGIN + start * scale, (stop - start) * scale
        rows = f"rows {start // before.shape[1]} to {stop // before.shape[1] - 1}"
        picture.box(x, bottom, width, 2 * LINE, COLOURS[-1 - rank], (f"rank {rank}: {rows}", rows))
    picture.y = bottom + 2 * LINE
    picture.words("DCP, 2 ranks")
    return picture


def intervals(table: ShardTable) -> Iterator[tuple[int, int, int]]:
    """Rank, first element and end of each shard, in row-major order."""
    flat, ranks = table.flat_index, ranks_of(table)
    assert flat is not None
    for row, start, stop in zip(flat.rows.tolist(), flat.starts.tolist(), flat.stops.tolist(), strict=True):
        yield ranks[row], start, stop


def state() -> Picture:
    """Bytes of each slot of one parameter."""
    manifest, name = _run("zero2-bf16", "awkward", 2), "blocks.0.up.weight"
    slots = {key.slot: entry for key, entry in manifest.tensors.items() if key.fqn == name}
    picture = Picture("Bytes of one parameter of a bf16 run, with its optimizer state")
    picture.words(f"{name}: {_shape(slots['weight'])}", strong=True)
    scale = INNER / max(entry.num_bytes for entry in slots.values())
    for number, (slot, entry) in enumerate(slots.items()):
        picture.words(f"{slot}: {entry.dtype.value}, {entry.num_bytes} bytes")
        picture.box(MARGIN, picture.y, entry.num_bytes * scale, LINE, COLOURS[number])
        picture.y += 1.5 * LINE
    return picture


_DRAWN: dict[str, Callable[[], Picture]] = {
    "checkpoint": checkpoint,
    "fsdp2": fsdp2,
    "mesh": mesh,
    "zero2": zero2,
    "zero3": zero3,
    "universal": universal,
    "torch-dist": torch_dist,
    "conversion": conversion,
    "state": state,
}

if __name__ == "__main__":
    for name, text in pictures().items():
        (FOLDER / name).write_text(text)
