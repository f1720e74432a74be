"""npz against numpy itself, and what is refused."""

import io
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.errors import IncompleteError, MalformedError, UnsafeError, UnsupportedError

pytestmark = pytest.mark.quick

DTYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1", "c8", "c16")


def contents(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    checkpoint = ckpt_tools.open(path)
    return {name: checkpoint[name].numpy() for name in checkpoint}


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    def facts(arrays: dict[str, Any]) -> object:
        return {name: (str(each.dtype), each.shape, each.tobytes()) for name, each in arrays.items()}

    return facts(found) == facts(expected)


def test_every_dtype_and_order_of_numpy_is_read(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {code: rng.integers(0, 2, (3, 4, 5)).astype(code) for code in DTYPES}
    arrays |= {f"fortran.{code}": np.asfortranarray(array) for code, array in list(arrays.items())}
    arrays |= {"zero": np.array(2.5), "none": np.zeros((0, 2)), "ones": np.asfortranarray(np.ones((1, 4)))}
    np.savez(tmp_path / "a.npz", **arrays)
    assert same(contents(tmp_path / "a.npz"), arrays)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_header_is_read(version, tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    data = io.BytesIO()
    np.lib.format.write_array(data, array, version=version)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("w.npy", data.getvalue())
    assert same(contents(tmp_path / "a.npz"), {"w": array})


def test_numpy_reads_what_is_written(tmp_path):
    tensors = {
        "a.weight": torch.randn(3, 5), "b": torch.randn(2, 3, 4).half(), "n": torch.arange(5),
        "zero": torch.tensor(1.5),
        "empty": torch.zeros(0, 3), "flag": torch.tensor([True, False]), "größe": torch.ones(1, dtype=torch.uint8),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    ckpt_tools.convert(tmp_path / "model.safetensors", tmp_path / "model.npz")
    with np.load(tmp_path / "model.npz", allow_pickle=False) as found:
        assert same(dict(found), {name: tensor.numpy() for name, tensor in tensors.items()})
    with zipfile.ZipFile(tmp_path / "model.npz") as archive:
        assert archive.testzip() is None


def test_mlx_reads_what_is_written(tmp_path):
    import mlx.core as mx

    save_file({"layers.0.weight": torch.arange(6.0).reshape(2, 3)}, tmp_path / "model.safetensors")
    ckpt_tools.convert(tmp_path / "model.safetensors", tmp_path / "model.npz")
    assert np.array(mx.load(str(tmp_path / "model.npz"))["layers.0.weight"]).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_objects_are_refused_and_not_run(tmp_path, capfd):
    """The array's pickle would call ``os.system``."""
    made = tmp_path / "model.npz"
    from fixtures.corpus.other import npz_objects

    npz_objects(tmp_path)
    for name in ("inspect", "open"):
        with pytest.raises(UnsafeError, match="Python objects as a pickle") as raised:
            getattr(ckpt_tools, name)(made)
        assert raised.value.exit_code == 7
    assert not ckpt_tools.scan(made).clean
    assert "a loader has run this" not in capfd.readouterr().out


def _npz(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def _npy(header: bytes, data: bytes = b"\0" * 8, version: bytes = b"\1\0") -> bytes:
    return b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header + data


def _plain(descr: str = "<f4", shape: str = "(2,)") -> bytes:
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()


def _array(array: np.ndarray[Any, Any]) -> bytes:
    data = io.BytesIO()
    np.save(data, array)
    return data.getvalue()


HOSTILE = {
    "records": (_array(np.zeros(2, [("a", "f4"), ("b", "i4")])), UnsupportedError, "array of records"),
    "big-endian": (_array(np.ones(2, ">f4")), UnsupportedError, "big-endian"),
    "dates": (_array(np.zeros(2, "datetime64[s]")), UnsupportedError, "not that of a tensor"),
    "float8": (_array(np.ones(2, ml_dtypes.float8_e5m2)), UnsupportedError, "cannot be told apart"),
    "float8 of another kind": (_array(np.ones(2, ml_dtypes.float8_e4m3fn)), UnsupportedError, "cannot be told apart"),
    "text alone": (_array(np.array(["a"])), UnsupportedError, "no arrays of numbers"),
    "no array": (b"hello", MalformedError, r"not a \.npy"),
    "version 9": (_npy(_plain(), version=b"\x09\0"), UnsupportedError, "version 9"),
    "a call": (_npy(b"{'descr': __import__('os').system('echo'), }"), MalformedError, "does not describe"),
    "an entry twice": (_npy(_plain()[:-3] + b"'shape': (1,), }"), MalformedError, "does not describe"),
    "an entry more": (_npy(_plain()[:-3] + b"'x': (1,), }"), MalformedError, "does not describe"),
    "no shape": (_npy(b"{'descr': '<f4', 'fortran_order': False, }"), MalformedError, "does not describe"),
    "a shape of text": (_npy(_plain(shape="'2'")), MalformedError, "does not describe"),
    "a negative shape": (_npy(_plain(shape="(-2,)")), MalformedError, "does not describe"),
    "a shape beyond 64 bits": (_npy(_plain(shape="(99999999999999999999,)")), MalformedError, "extent"),
    "too large a shape": (_npy(_plain(shape="(4611686018427387904, 4)")), IncompleteError, "instead of"),
    "a header longer than the member": (b"\x93NUMPY\1\0\xff\x0f" + b" " * 9, MalformedError, "does not fit"),
    "too few elements": (_npy(_plain(), b"\0" * 7), IncompleteError, "instead of"),
    "too many elements": (_npy(_plain(), b"\0" * 9), MalformedError, "1 byte too many"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_broken_array_has_a_named_error(name, tmp_path):
    data, kind, words = HOSTILE[name]
    with pytest.raises(kind, match=words) as raised:
        ckpt_tools.inspect(_npz(tmp_path / "a.npz", {"w.npy": data}))
    assert raised.value.exit_code == 4


def test_what_is_no_archive_of_arrays_is_named(tmp_path):
    (tmp_path / "cut.npz").write_bytes(_npz(tmp_path / "a.npz", {"w.npy": _array(np.ones(2))}).read_bytes()[:-30])
    with pytest.raises(MalformedError, match="or it is cut"):
        ckpt_tools.inspect(tmp_path / "cut.npz")
    with pytest.raises(UnsupportedError, match=r"'notes\.txt' is not a \.npy"):
        ckpt_tools.inspect(_npz(tmp_path / "b.npz", {"notes.txt": b"x", "w.npy": _array(np.ones(2))}))


def test_headers_of_other_writers_are_read(tmp_path):
    """Other spaces, another order, no comma at the end, Python 2's long numbers."""
    header = b"{'fortran_order':True,'shape': (2L,3L) ,'descr':'<f4'}\n"
    array = np.arange(6, dtype=np.float32)
    found = contents(_npz(tmp_path / "a.npz", {"w.npy": _npy(header, array.tobytes())}))
    assert found["w"].tolist() == array.reshape((2, 3), order="F").tolist()
