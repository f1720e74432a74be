"""Dtypes of safetensors 0.8: read and written bit for bit, and refused by name where the target has none."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import deserialize, safe_open
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

import ckpt_tools
from ckpt_tools.errors import FormatError, UnsupportedError
from tests.support.quantized import bytes_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = {
    "F4": torch.float4_e2m1fn_x2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3": torch.float8_e4m3fn,
    "C64": torch.complex64,
}
"""Those that torch has too."""

FLOAT6 = ("F6_E2M3", "F6_E3M2")


def stored(*tensors: tuple[str, str, list[int], bytes]) -> bytes:
    header: dict[str, Any] = {}
    data = b""
    for name, dtype, shape, content in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def contents(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Tensors by the library's own parser, which knows all dtypes."""
    found = deserialize(path.read_bytes())
    return {name: (each["dtype"], each["shape"], bytes(each["data"])) for name, each in found}


def sample(dtype: torch.dtype) -> torch.Tensor:
    return bytes_of((6, 16)).view(dtype)


@pytest.fixture
def known(tmp_path):
    save_file({name: sample(dtype) for name, dtype in DTYPES.items()}, tmp_path / "known.safetensors")
    return tmp_path / "known.safetensors"


@pytest.fixture
def float6(tmp_path):
    """Odd numbers of bytes, so that what lies after them must still be aligned."""
    tensors = [(name, name, [3, 4 * (n + 1)], bytes(range(9 * (n + 1)))) for n, name in enumerate(FLOAT6)]
    path = tmp_path / "float6.safetensors"
    path.write_bytes(stored(*tensors, ("m.plain", "BF16", [2], bytes(4))))
    return path


def test_the_header_counts_values_and_the_manifest_elements(known):
    with safe_open(known, "pt") as file:
        assert file.get_slice("F4").get_shape() == [6, 32]
    checkpoint = ckpt_tools.open(known)
    assert (checkpoint["F4"].shape, checkpoint["F4"].dtype_name) == ((6, 16), "float4_e2m1fn_x2")
    with pytest.raises(UnsupportedError, match=r"numpy has no float4_e2m1fn_x2; read it with \.torch\(\)"):
        checkpoint["F4"].numpy()


@pytest.mark.parametrize("way", ["copy.safetensors", "folder", "state.pt", "dcp", "sharded"])
def test_every_bit_is_kept_on_the_way_through_other_formats(way, known, tmp_path):
    to: Any = {"folder": "safetensors", "dcp": "dcp", "sharded": "sharded"}.get(way)
    ckpt_tools.convert(known, tmp_path / way, to=to, world_size=3 if way in ("dcp", "sharded") else None)
    ckpt_tools.convert(tmp_path / way, tmp_path / "back.safetensors", state="model")
    assert contents(tmp_path / "back.safetensors") == contents(known)
    assert ckpt_tools.diff(known, tmp_path / way, state="model").equal


def test_torch_reads_them(known, tmp_path):
    ckpt_tools.convert(known, tmp_path / "state.pt")
    ckpt_tools.convert(known, tmp_path / "dcp", to="dcp", model_key="model")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    empty = {name: torch.zeros(6, 16, dtype=torch.uint8).view(dtype) for name, dtype in DTYPES.items()}
    state = {"model": empty}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, dtype in DTYPES.items():
        for found in (loaded[name], state["model"][name]):
            assert found.dtype is dtype
            assert torch.equal(found.view(torch.uint8), bytes_of((6, 16)))


def test_float6_goes_from_file_to_file(float6, tmp_path):
    ckpt_tools.convert(float6, tmp_path / "out.safetensors", dtype="float32")
    found = contents(tmp_path / "out.safetensors")
    assert found.pop("m.plain")[0] == "F32"
    assert found == {name: value for name, value in contents(float6).items() if name in FLOAT6}
    assert ckpt_tools.verify(float6, tmp_path / "out.safetensors", dtype="float32").equal
    assert ckpt_tools.scan(tmp_path / "out.safetensors").clean
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.get_tensor("m.plain").data_ptr() % 4 == 0


@pytest.mark.parametrize("to", ["torch", "dcp", "zero3", "universal", "sharded", "megatron", "gguf", "npz"])
def test_float6_is_refused_where_it_has_no_place(to, float6, tmp_path):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UnsupportedError, match=r"F6_E\dM\d.*float6_e\dm\dfn_x4"):
        ckpt_tools.convert(float6, tmp_path / "out", to=to, world_size=2 if to in ("dcp", "zero3") else None)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes", "said"),
    [
        ("F4", [2, 3], 3, r"rows of \[2, 3\] are not whole elements of 2 F4 values"),
        ("F4", [], 1, "not whole elements"),
        ("F6_E2M3", [2, 2], 3, "not whole elements of 4 F6_E2M3 values"),
        ("F4", [2, 4], 5, "5 bytes cannot hold"),
    ],
)
def test_rows_that_end_within_a_byte_are_refused(dtype, shape, num_bytes, said, tmp_path):
    path = tmp_path / "in.safetensors"
    path.write_bytes(stored(("x", dtype, shape, bytes(num_bytes))))
    with pytest.raises(FormatError, match=said):
        ckpt_tools.inspect(path)
