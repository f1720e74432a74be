"""Every bit of every dtype through every pair of formats, judged by the frameworks' loaders.

A tensor of each dtype holds what a careless route would lose: NaNs of any payload and sign, signalling ones too, both
zeros, subnormals, infinities, and random bits; beside it an element without dims, and tensors without elements.
"""

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpt_tools
from ckpt_tools.core.dtypes import DType
from tests.support.ranks import for_ranks
from tests.support.trees import assert_same_tree

State = Mapping[str, torch.Tensor]

SHAPES = {"bits": (6, 32), "scalar": (), "empty": (0,), "empty_rows": (3, 0, 2)}

EXPONENT_AND_FRACTION = {
    DType.FLOAT64: (11, 52),
    DType.FLOAT32: (8, 23),
    DType.FLOAT16: (5, 10),
    DType.BFLOAT16: (8, 7),
    DType.COMPLEX128: (11, 52),
    DType.COMPLEX64: (8, 23),
    DType.COMPLEX32: (5, 10),
}
"""Bits of the exponent and of the fraction, of a part for the complex ones."""

pytestmark = [
    pytest.mark.extended,
    pytest.mark.filterwarnings(
        "ignore:ComplexHalf support is experimental:UserWarning", "ignore:torch.distributed is:UserWarning"
    ),
]


def special(exponent: int, fraction: int) -> list[int]:
    """The patterns that are easily lost: of both signs, zeros, subnormals, infinity, and NaNs quiet and signalling."""
    top = ((1 << exponent) - 1) << fraction
    quiet = 1 << (fraction - 1)
    numbers = [0, 1, (1 << fraction) - 1, 1 << fraction, top - 1, top, top | 1, top | quiet, top | quiet | 5, top | 3]
    return [sign | number for sign in (0, 1 << (exponent + fraction)) for number in numbers]


def elements(dtype: DType, numel: int) -> torch.Tensor:
    """The special patterns of a dtype, then random bits; of the 8-bit ones all patterns in order; bools are 0 or 1."""
    generator = np.random.default_rng(list(DType).index(dtype))
    if dtype is DType.BOOL:
        data = generator.integers(0, 2, numel, np.uint8).tobytes()
    elif dtype.item_bytes == 1:
        data = np.arange(numel, dtype=np.uint8).tobytes()
    else:
        data = generator.bytes(numel * dtype.item_bytes)
    if (form := EXPONENT_AND_FRACTION.get(dtype)) is not None:
        width = (sum(form) + 1) // 8
        first = b"".join(pattern.to_bytes(width, "little") for pattern in special(*form))
        data = (first + data)[: len(data)]
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return raw.view(getattr(torch, dtype.value))


def state_of(dtypes: tuple[DType, ...]) -> dict[str, torch.Tensor]:
    return {
        f"{dtype.value}.{name}": elements(dtype, int(np.prod(shape))).reshape(shape)
        for dtype, (name, shape) in product(dtypes, SHAPES.items())
    } | {"main": elements(DType.FLOAT32, 4000).reshape(40, 100)}


ALL = tuple(dtype for dtype in DType if dtype.num_values == 1)
"""Torch cannot copy those of several values, which tests/formats/test_packed_dtypes.py has."""
NO_SAFETENSORS = {DType.COMPLEX128, DType.COMPLEX32}
HOLDS: dict[str, tuple[DType, ...]] = {
    **dict.fromkeys(("torch", "dcp", "zero1", "zero2", "zero3"), ALL),
    "safetensors": tuple(dtype for dtype in ALL if dtype not in NO_SAFETENSORS),
    "universal": (*(dtype for dtype in ALL if not dtype.is_floating), DType.FLOAT32),
}
"""A universal checkpoint knows no frozen weights, and DeepSpeed trains all others in one dtype."""


def load_dcp(path: Path) -> State:
    """What torch's own reader finds."""
    whole = path.with_suffix(".from_dcp")
    dcp_to_torch_save(path, whole)
    found = torch.load(whole, weights_only=True)
    for key in ("app", "model"):
        found = found.get(key, found)
    return found


def load_zero(path: Path) -> State:
    """Weights that are trained as DeepSpeed joins their masters; the others as a rank finds them in its model file."""
    file = sorted(path.glob("global_step0/*model_states.pt"))[0]
    saved = torch.load(file, weights_only=False)
    trained = {name for shapes in saved["param_shapes"] for name in shapes}
    masters = get_fp32_state_dict_from_zero_checkpoint(str(path))
    return {name: masters[name] if name in trained else tensor for name, tensor in saved["module"].items()}


def load_universal(path: Path) -> State:
    """Trained weights as ``load_hp_checkpoint_state`` finds them, the others as a rank finds them in its model file."""
    saved = torch.load(path / "global_step0" / "mp_rank_00_model_states.pt", weights_only=False)
    folders = (path / "global_step0" / "zero").glob("*/fp32.pt")
    trained = {file.parent.name: torch.load(file, weights_only=False)["param"] for file in folders}
    shapes = {name: shape for group in saved["param_shapes"] for name, shape in group.items()}
    return saved["module"] | {name: tensor.reshape(shapes[name]) for name, tensor in trained.items()}


LOADERS: Mapping[str, Callable[[Path], State]] = {
    "torch": lambda path: torch.load(path / "pytorch_model.bin", weights_only=True),
    "dcp": load_dcp,
    "safetensors": lambda path: load_file(path / "model.safetensors"),
    **dict.fromkeys(("zero1", "zero2", "zero3"), load_zero),
    "universal": load_universal,
}


def assert_same(wanted: State, found: State) -> None:
    assert_same_tree(dict(wanted), dict(found))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder with a checkpoint of all that it holds for each format."""
    folder = tmp_path_factory.mktemp("sources")
    for name, dtypes in HOLDS.items():
        state = state_of(dtypes)
        if name == "dcp":
            dcp.save({"model": state}, checkpoint_id=folder / name, no_dist=True)
            continue
        (folder / name).mkdir()
        if name == "torch":
            torch.save(state, folder / name / "pytorch_model.bin")
        elif name == "safetensors":
            save_file(state, folder / name / "model.safetensors")
        else:  # the framework does not write any tensor that it is given
            torch.save(state, folder / f"{name}.pt")
            (folder / name).rmdir()
            ckpt_tools.convert(folder / f"{name}.pt", folder / name, to=name, **for_ranks(name, 3))
    return folder


@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param(*pair, marks=pytest.mark.soak if {*pair} & {"zero1"} else ()) for pair in product(HOLDS, HOLDS)],
)
def test_every_bit_of_every_dtype(source, target, sources, tmp_path):
    held = tuple(dtype for dtype in HOLDS[source] if dtype in HOLDS[target])
    names = [f"{dtype.value}.*" for dtype in held]
    ckpt_tools.convert(sources / source, tmp_path / "out", to=target, include=[*names, "main"], **for_ranks(target, 2))
    assert_same(state_of(held), LOADERS[target](tmp_path / "out"))


@pytest.mark.parametrize("through", HOLDS)
def test_every_bit_of_a_moment(through, tmp_path):
    """Masters and moments of all special patterns, there and back."""
    special_bits = elements(DType.FLOAT32, 192).reshape(6, 32)
    moments = {"step": torch.tensor(7.0), "exp_avg": special_bits.flip(0), "exp_avg_sq": special_bits.flip(1)}
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": ["w"]}
    optim = {"state": {"w": moments}, "param_groups": [group]}
    torch.save({"model": {"w": special_bits}, "optim": optim}, tmp_path / "all.pt")
    ckpt_tools.convert(tmp_path / "all.pt", tmp_path / "there", to=through, state="all", **for_ranks(through, 3))
    ckpt_tools.convert(tmp_path / "there", tmp_path / "back.pt", state="all")
    found = torch.load(tmp_path / "back.pt", weights_only=True)
    weights = found["model"] if "model" in found else {"w": found["w"]}
    assert_same({"w": special_bits}, weights)
    assert_same(moments, {name: torch.as_tensor(value) for name, value in found["optim"]["state"]["w"].items()})
