"""Orbax: what of a tree is the model, what is incomplete or hostile, and how its arrays are read."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore

import ckpt_tools
from ckpt_tools.core.boxes import Box
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import CkptError, MemoryBudgetError, UnsupportedError, UsageError
from ckpt_tools.formats.builtin import OrbaxFormat
from ckpt_tools.formats.orbax.arrays import CHUNKS_AT_ONCE, LIBRARY_BYTES, MIN_CACHE_BYTES
from ckpt_tools.formats.orbax.roles import find_roles
from ckpt_tools.runs.opening import open_checkpoint
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source
from ckpt_tools.transfer.tensor_reader import TensorReader
from fixtures.corpus import make
from tests.support.damage import Harm, unlink

pytestmark = pytest.mark.judges

TREE = {("params", "w"): (3, 2), ("params", "b"): (2,)}
MOMENTS = {("opt_state", 0, name, *path[1:]): shape for name in ("mu", "nu") for path, shape in TREE.items()}


@pytest.mark.parametrize(
    "changed",
    [
        {("opt_state", 0, "mu", "w"): (2, 3)},
        {("opt_state", 0, "mu", "more"): (1,)},
        {("other", "mu", *path[3:]): shape for path, shape in MOMENTS.items() if path[2] == "mu"}
        | {("other", "nu", *path[3:]): shape for path, shape in MOMENTS.items() if path[2] == "nu"},
    ],
    ids=["another shape", "another name", "two pairs"],
)
def test_moments_that_are_not_proved_are_none(changed):
    assert not find_roles({**TREE, **MOMENTS, **changed}, (), None).moments


def test_what_might_be_no_model_is_refused():
    with pytest.raises(UnsupportedError, match=r"optimizer state by its name.*model_key="):
        find_roles({("model", "w"): (2,), ("opt_state", "mu", "w"): (2,)}, (), None)
    with pytest.raises(UnsupportedError, match=r"several models \(a\.params, b\.params\)"):
        find_roles({("a", "params", "w"): (2,), ("b", "params", "w"): (2,)}, (), None)
    with pytest.raises(UnsupportedError, match="one name"):
        find_roles({("a", "b"): (2,), ("a.b",): (2,)}, (), None)


def test_the_model_can_be_named():
    shapes = {("a", "params", "w"): (2,), ("b", "params", "w"): (2,), ("opt_state", "mu", "w"): (2,)}
    assert find_roles(shapes, (), "b.params").weights == {("b", "params", "w"): "w"}
    with pytest.raises(UsageError, match="does not exist"):
        find_roles(shapes, (), "c")


def test_the_whole_state_goes_to_dcp(tmp_path):
    source = make("orbax-train-state").source
    ckpt_tools.convert(source, tmp_path / "dcp", to="dcp", world_size=3)
    found = ckpt_tools.inspect(tmp_path / "dcp")
    assert found.optimizer_slots == ("exp_avg", "exp_avg_sq")
    assert (found.step, found.extras["lr"]) == (7, 0.1)
    assert [group.num_tensors for group in found.groups] == [6]
    report = ckpt_tools.diff(source, tmp_path / "dcp")
    assert not report.differences, "the user's own tensors are the same ones below app"


def test_any_range_of_an_array_is_read():
    """Each interval of the row-major order, over the boundaries of chunks, and bytes that split an element."""
    made = make("orbax-sharded")
    opened = open_checkpoint(made.source, ReadOptions())
    source, manifest = opened.source, opened.manifest
    entry = manifest.tensors[StateKey("both")]
    truth = made.state.weights["both"].numpy().reshape(-1)
    reader = TensorReader(source.store, scratch_bytes=1 << 16)
    for start in range(0, 48, 5):
        for stop in range(start + 1, 49, 7):
            out = bytearray(4 * (stop - start))
            reader.read(entry, Box.whole(entry.shape), entry.shape, start, stop, memoryview(out))
            assert np.frombuffer(out, "<f4").tolist() == truth[start:stop].tolist()
    part = bytearray(7)
    source.store.read_into("array:both", 3, memoryview(part))
    assert bytes(part) == truth.tobytes()[3:10]
    with pytest.raises(CkptError, match="it ends at byte 192"):
        source.store.read_into("array:both", 190, memoryview(part))


def test_memory_counts_the_chunks(tmp_path):
    """Nothing smaller than a chunk can be decoded, so that the largest one is part of the peak."""
    source, chunk = tmp_path / "run", 32 << 20
    shutil.copytree(make("orbax-pytree").source, source)
    _write(source, "w", np.arange(chunk // 4, dtype=np.float32))
    plan = ckpt_tools.plan(source, tmp_path / "out.safetensors")
    assert plan.peak_memory_bytes > MIN_CACHE_BYTES + LIBRARY_BYTES + 2 * CHUNKS_AT_ONCE * chunk
    with pytest.raises(MemoryBudgetError):
        ckpt_tools.plan(source, tmp_path / "out.safetensors", memory="128MiB")
    ckpt_tools.convert(source, tmp_path / "out.safetensors")
    assert ckpt_tools.open(tmp_path / "out.safetensors")["w"][-2:].tolist() == [chunk // 4 - 2, chunk // 4 - 1]


def _write(root: Path, name: str, array: np.ndarray[Any, Any]) -> None:
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{root}/"}, "path": f"{name}/"}
    fields = {"shape": array.shape, "chunks": array.shape, "dtype": array.dtype.str, "compressor": None}
    spec = {"driver": "zarr", "kvstore": store, "metadata": {**fields, "fill_value": None, "order": "C"}}
    tensorstore.open(spec, create=True, delete_existing=True).result().write(array).result()


def test_a_store_that_is_not_local_is_refused():
    root = make("orbax").source
    files = {str(path.relative_to(root)): bytearray(path.read_bytes()) for path in root.rglob("*") if path.is_file()}
    source = Source.open(MemoryStore(files))
    assert OrbaxFormat().detect(source)
    with pytest.raises(UnsupportedError, match="download it first"):
        OrbaxFormat().read(source, ReadOptions())


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(UsageError, match=r"pip install 'ckpt-tools\[orbax\]'"):
        ckpt_tools.inspect(make("orbax").source)


def changed(name: str, change: Callable[[Any], Any]) -> Harm:
    return lambda root: (root / name).write_text(json.dumps(change(json.loads((root / name).read_text()))))


def in_tree(change: Callable[[Any], Any]) -> Harm:
    return changed("_METADATA", change)


def in_entry(**changes: Any) -> Harm:
    def change(tree: Any) -> Any:
        entry = next(iter(tree["tree_metadata"].values()))
        entry["value_metadata"] |= {name: each for name, each in changes.items() if name in entry["value_metadata"]}
        entry["key_metadata"] = changes.get("key_metadata", entry["key_metadata"])
        return tree

    return in_tree(change)


def of_key(key: str, key_type: int) -> Harm:
    return in_entry(key_metadata=[{"key": key, "key_type": key_type}])


def write(name: str, text: str) -> Harm:
    return lambda root: (root / name).write_text(text)


LISTED = "opt_state/_METADATA: it is missing, and _CHECKPOINT_METADATA lists the item"
HARMS: list[tuple[str, Harm, str]] = [
    ("no tree", unlink("_METADATA"), "has no _METADATA"),
    ("no database", unlink("manifest.ocdbt"), "the database of the arrays, is missing"),
    ("a cut database", write("manifest.ocdbt", "\x0c"), "tensorstore cannot read"),
    ("no data", lambda root: shutil.rmtree(root / "d"), "this data file of the database is missing"),
    ("no end", changed("_CHECKPOINT_METADATA", lambda t: {**t, "commit_timestamp_nsecs": None}), "never finished"),
    ("a tree that is no tree", write("_METADATA", "[]"), "not a JSON object"),
    ("a tree without entries", write("_METADATA", "{}"), "no tree_metadata"),
    ("an entry without a path", in_tree(lambda tree: {**tree, "tree_metadata": {"x": {}}}), "no path or no kind"),
    ("a value of an unknown kind", in_entry(value_type="os.system"), "kind of value"),
    ("an entry that leads out of the folder", of_key("../../secret", 2), "tensorstore cannot read"),
    ("a key of an unknown type", of_key("dense", 3), "neither a name nor a position"),
    ("a position that is no number", of_key("x", 1), "neither a name nor a position"),
    ("a value and a branch", of_key("layers", 2), "a value and a branch"),
    ("a value that is elsewhere", in_entry(skip_deserialize=True), "not among the arrays"),
    ("a list without metadata", write("array_metadatas/process_0", '{"array_metadatas": [7]}'), "does not list arrays"),
    ("a flag that is none", in_tree(lambda tree: {**tree, "use_ocdbt": "yes"}), "neither true nor false"),
    # Zarr's readers fill in zeros.
    ("orbax-zarr", unlink("dense.kernel/0.0"), r"dense\.kernel: its chunk 0\.0 is missing"),
    ("orbax-manager", unlink("commit_success.txt"), "marker of a finished checkpoint is missing"),
    ("orbax-manager", unlink("opt_state/_METADATA"), LISTED),
]


@pytest.mark.parametrize(("name", "harm", "words"), HARMS)
def test_a_damaged_checkpoint_has_a_named_error(name, harm, words, tmp_path):
    layout = name if name.startswith("orbax") else "orbax"
    root = Path(shutil.copytree(make(layout).source, tmp_path / "5"))
    harm(root)
    with pytest.raises(CkptError, match=words) as raised:
        ckpt_tools.verify(root)
    assert raised.value.exit_code == 4


def test_flags_that_are_not_there_are_false(tmp_path):
    """As Orbax wrote before it had them."""
    root = shutil.copytree(make("orbax").source, tmp_path / "5")
    flags = ("use_zarr3", "store_array_data_equal_to_fill_value")
    in_tree(lambda tree: {name: value for name, value in tree.items() if name not in flags})(root)
    assert ckpt_tools.diff(make("orbax").source, root).equal


def test_what_lies_beside_is_read_or_noted(tmp_path):
    root = tmp_path / "5"
    shutil.copytree(make("orbax-manager").source, root)
    (root / "params" / "notes.txt").write_text("mine")
    opened = open_checkpoint(root, ReadOptions())
    source, manifest = opened.source, opened.manifest
    assert manifest.extra["loop"] == {"epoch": 2}
    assert "params/notes.txt" in [note.what for note in manifest.notes]
    reader = OrbaxFormat()
    assert source.files.keys() - reader.own_files(source, manifest) - manifest.files == {"params/notes.txt"}
