"""``--dequantize``: the bits of transformers' and compressed-tensors' own code, and of the rules written anew in
numpy."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.cli.main import main
from ckpt_tools.core.notes import Outcome
from ckpt_tools.errors import UsageError
from tests.support.pages import ROOT, check_commands
from tests.support.quantized import (
    Tensors,
    bytes_of,
    dequantized,
    floats8,
    fp8,
    fp8_model,
    same_bits,
    scales32,
    tensors_in,
    write_model,
)
from tests.support.sweep import tiered

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


@pytest.fixture(params=[37, 1 << 18], ids=["small pieces", "whole pieces"])
def piece(request, monkeypatch):
    """Elements computed at once: the edges of small pieces lie within rows, blocks and bytes."""
    monkeypatch.setattr("ckpt_tools.core.manifest.MAX_PIECE", request.param)


def blocks_of(matrix: NDArray[np.float32], block: tuple[int, int], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A scale for each element of ``shape``, of a grid of scales; blocks are cut at the edges."""
    rows, columns = (np.arange(extent) // size for extent, size in zip(shape[-2:], block, strict=True))
    return matrix[..., rows[:, None], columns[None, :]]


def as_torch(values: NDArray[Any]) -> torch.Tensor:
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(values.copy())


def halves(packed: torch.Tensor) -> NDArray[np.float32]:
    """The two E2M1 values of each byte: the low bits first, the highest bit of four is the sign."""
    data = packed.view(torch.uint8).numpy()
    codes = np.stack([data % 16, data // 16], axis=-1).reshape(*data.shape[:-1], -1)
    return np.where(codes >= 8, -E2M1[codes % 8], E2M1[codes % 8]).astype(np.float32)


# transformers' own code


FP8: dict[str, tuple[torch.Tensor, torch.Tensor, str]] = {
    "blocks": (floats8((96, 160), E4M3), scales32((3, 5)), "weight_scale_inv"),
    "ue8m0": (floats8((96, 160), E4M3), bytes_of((3, 5)).view(E8M0), "scale"),
    "bytes of ue8m0": (floats8((96, 160), E4M3), bytes_of((3, 5)), "qscale_weight"),
    "e5m2": (floats8((96, 160), E5M2), scales32((3, 5)), "weight_scale_inv"),
    "fp4 experts": (bytes_of((32, 64)).view(torch.int8), bytes_of((32, 4)).view(E8M0), "scale"),
    "one scale": (floats8((96, 160), E4M3), scales32((1, 1)), "weight_scale_inv"),
    "a number": (floats8((96, 160), E4M3), scales32(()), "weight_scale_inv"),
}
FP8_CELLS = {f"{name} {dtype}": (name, dtype) for name in FP8 for dtype in (None, "float32", "float16")}
FP8_TEST = {
    "blocks None", "ue8m0 float32", "bytes of ue8m0 float16", "e5m2 None", "fp4 experts float32", "a number None",
}  # fmt: skip


@pytest.mark.parametrize("cell", tiered(FP8_CELLS, test=FP8_TEST, extended=FP8_CELLS.keys() - FP8_TEST))
@pytest.mark.usefixtures("piece")
def test_fp8_is_what_transformers_computes(cell, tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    kind, dtype = FP8_CELLS[cell]
    weight, scale, name = FP8[kind]
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scale, getattr(torch, dtype or "bfloat16"))
    tensors = {"m.weight": weight, f"m.{name}": scale, "m.bias": torch.ones(3, dtype=torch.bfloat16)}
    found = dequantized(tmp_path, tensors, fp8(32, 32) if scale.numel() > 1 else fp8(), dtype=dtype)
    assert found.keys() == {"m.weight", "m.bias"}
    assert same_bits(found["m.weight"], wanted)


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.usefixtures("piece")
def test_stacked_experts_of_fp8_too(dtype, tmp_path):
    """The names that ``save_pretrained`` of transformers' live names gives."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight, scale = floats8((4, 32, 64), E4M3), scales32((4, 2, 2))
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scale, getattr(torch, dtype or "bfloat16"))
    tensors = {"e.gate_up_proj": weight, "e.gate_up_proj_scale_inv": scale, "e.gate_up_proj_bias": torch.ones(4, 32)}
    tensors |= {"e.down_proj": weight, "e.down_proj_scale_inv": scale, "e.activation_scale": torch.ones(())}
    found = dequantized(tmp_path, tensors, fp8(16, 32), dtype=dtype)
    assert found.keys() == {"e.gate_up_proj", "e.down_proj", "e.gate_up_proj_bias"}
    assert same_bits(found["e.gate_up_proj"], wanted)
    assert same_bits(found["e.down_proj"], wanted)


@pytest.mark.parametrize(("dtype", "strip"), [(None, 64), ("float32", 64), ("float16", 4 << 20)])
@pytest.mark.usefixtures("piece")
def test_mxfp4_is_what_transformers_computes(dtype, strip, tmp_path, monkeypatch):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    monkeypatch.setattr("ckpt_tools.recipes.scales.STRIP_BYTES", strip)
    blocks, exponents = bytes_of((3, 10, 2, 16)), bytes_of((3, 10, 2))
    wanted = convert_moe_packed_tensors(blocks, exponents, dtype=getattr(torch, dtype or "bfloat16"))
    tensors = {"mlp.experts.gate_up_proj_blocks": blocks, "mlp.experts.gate_up_proj_scales": exponents}
    tensors |= {"mlp.experts.gate_up_proj_bias": torch.zeros(3, 10, dtype=torch.bfloat16)}
    found = dequantized(tmp_path, tensors, {"quant_method": "mxfp4"}, dtype=dtype)
    assert found.keys() == {"mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"}
    assert same_bits(found["mlp.experts.gate_up_proj"], wanted)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return fp8_model(tmp_path_factory.mktemp("fp8") / "model")


def assert_computes_alike(plain: Path, quantized: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours, theirs = (AutoModelForCausalLM.from_pretrained(each, dtype="auto") for each in (plain, quantized))
    assert ours.dtype == torch.bfloat16
    assert all(same_bits(ours.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())
    rows = torch.arange(12).reshape(2, 6)
    assert torch.equal(ours(rows).logits, theirs(rows).logits)


def test_transformers_computes_with_the_output_as_with_the_source(model, tmp_path):
    report = ckpt_tools.convert(model, tmp_path / "plain", to="safetensors", dequantize=True)
    assert [note.what for note in report.notes if "dequantized" in note.why] == ["14 float8_e4m3fn tensors"]
    assert_computes_alike(tmp_path / "plain", model)


def test_the_way_of_a_dequantized_tensor_through_other_formats(model, tmp_path):
    ckpt_tools.convert(model, tmp_path / "plain", to="safetensors", dequantize=True)
    ckpt_tools.convert(model, tmp_path / "dcp", to="dcp", dequantize=True)
    ckpt_tools.convert(model, tmp_path / "zero", to="zero3", world_size=3, dequantize=True, dtype="bfloat16")
    assert ckpt_tools.diff(tmp_path / "plain", tmp_path / "dcp").equal
    assert ckpt_tools.verify(model, tmp_path / "zero", dequantize=True, dtype="bfloat16").equal
    assert ckpt_tools.diff(model, tmp_path / "dcp", dequantize=True).equal
    moved = ckpt_tools.plan(model, tmp_path / "x.pt", dequantize=True)
    assert moved.bytes_read == ckpt_tools.convert(model, tmp_path / "x.pt", dequantize=True).bytes_read
    assert moved.bytes_read < 0.7 * moved.num_bytes


def test_a_checkpoint_in_pieces_needs_a_folder_of_its_config(model, tmp_path):
    """Weights and scales are cut by rows among the ranks of a DCP, in other places than blocks end."""
    ckpt_tools.convert(model, tmp_path / "plain", to="safetensors", dequantize=True)
    ckpt_tools.convert(model, tmp_path / "dcp", to="dcp", world_size=5)
    with pytest.raises(UsageError, match="needs the quantization_config"):
        ckpt_tools.convert(tmp_path / "dcp", tmp_path / "out", to="safetensors", dequantize=True)
    ckpt_tools.convert(tmp_path / "dcp", tmp_path / "out", to="safetensors", dequantize=True, config=model)
    assert ckpt_tools.diff(tmp_path / "plain", tmp_path / "out").equal
    part = ["model.layers.0.*.weight"]
    ckpt_tools.convert(model, tmp_path / "part.safetensors", dequantize=True, include=part)
    assert ckpt_tools.diff(tmp_path / "plain", tmp_path / "part.safetensors", include=part).equal


# The rules, written anew


@pytest.mark.parametrize("shape", [(130, 200), (128, 257), (1, 300), (300, 1)])
@pytest.mark.usefixtures("piece")
def test_blocks_are_cut_at_the_edges(shape, tmp_path):
    weight, scale = floats8(shape, E4M3), scales32((-(-shape[0] // 128), -(-shape[1] // 128)))
    values = weight.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    with np.errstate(all="ignore"):
        wanted = (values * blocks_of(scale.numpy(), (128, 128), shape)).astype(ml_dtypes.bfloat16)
    found = dequantized(tmp_path, {"m.weight": weight, "m.weight_scale_inv": scale}, fp8(128, 128))
    assert same_bits(found["m.weight"], as_torch(wanted))


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.usefixtures("piece")
def test_nvfp4_of_modelopt(shape, tmp_path):
    packed, scale = bytes_of((24, 40)), floats8((24, 5), E4M3)
    number = torch.full(shape, 0.0123)
    spread = np.repeat(scale.to(torch.float32).numpy() * np.float32(0.0123), 16, axis=1)
    wanted = (halves(packed) * spread).astype(ml_dtypes.bfloat16)
    tensors = {"m.weight": packed, "m.weight_scale": scale, "m.weight_scale_2": number, "m.input_scale": number}
    tensors |= {"m.k_proj.k_scale": torch.ones(()), "norm.weight": torch.ones(4, dtype=torch.bfloat16)}
    found = dequantized(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert found.keys() == {"m.weight", "norm.weight"}
    assert same_bits(found["m.weight"], as_torch(wanted))
    report = ckpt_tools.plan(tmp_path / "quantized", tmp_path / "x.pt", dequantize=True, strict=True)
    told = ["1 uint8 tensor", "2 tensors of quantized activations or caches", "config.json"]
    assert [note.what for note in report.notes] == told


@pytest.mark.usefixtures("piece")
def test_int8_of_bitsandbytes(tmp_path):
    weight, scale = bytes_of((24, 40)).view(torch.int8), scales32((24,)).abs()
    wanted = (weight.to(torch.float32) * scale[:, None] * 7.874015718698502e-3).to(torch.bfloat16)
    tensors = {"m.weight": weight, "m.SCB": scale, "m.weight_format": torch.zeros((), dtype=torch.uint8)}
    found = dequantized(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert found.keys() == {"m.weight"}
    assert same_bits(found["m.weight"], wanted)


def test_the_dtype_is_that_of_the_model(tmp_path):
    tensors = {"m.weight": floats8((4, 4), E4M3), "m.weight_scale_inv": torch.ones(())}
    for number, (config, wanted) in enumerate(
        [
            ({"dtype": "float16"}, torch.float16),
            ({"dtype": None, "torch_dtype": "float32"}, torch.float32),
            ({"dtype": None, "text_config": {"dtype": "float16"}}, torch.float16),
            ({"dtype": None}, torch.bfloat16),
        ]
    ):
        source = write_model(tmp_path / str(number), tensors, fp8(), **config)
        ckpt_tools.convert(source, tmp_path / f"{number}.safetensors", dequantize=True)
        assert load_file(tmp_path / f"{number}.safetensors")["m.weight"].dtype is wanted


def test_the_settings_may_be_those_of_the_text_model(tmp_path):
    tensors = {"m.weight": floats8((4, 4), E4M3), "m.weight_scale_inv": torch.ones(())}
    source = write_model(tmp_path / "in", tensors, None, text_config={"quantization_config": fp8(), "hidden_size": 4})
    ckpt_tools.convert(source, tmp_path / "out", to="safetensors", dequantize=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["text_config"] == {"hidden_size": 4}
    assert tensors_in(tmp_path / "out")["m.weight"].dtype is torch.bfloat16


def test_a_matrix_of_any_size_takes_little_memory(tmp_path):
    """The most that the plan says is a part of one matrix."""
    tensors = {"m.weight": floats8((6144, 8192), E4M3), "m.weight_scale_inv": scales32((48, 64))}
    source = write_model(tmp_path / "in", tensors, fp8(128, 128))
    report = ckpt_tools.convert(source, tmp_path / "out", to="safetensors", dequantize=True, memory="64MiB", workers=1)
    assert report.plan.peak_memory_bytes < 64 << 20 < report.plan.num_bytes


BESIDE: dict[str, tuple[str, tuple[int, ...]]] = {
    "ComfyUI": ("scale_weight", ()),
    "of the tensor": ("weight_scale", (1,)),
    "of rows": ("weight_scale", (256, 1)),
    "a row of scales": ("weight_scale_inv", (256,)),
    "of blocks": ("weight_scale_inv", (2, 3)),
}


@pytest.mark.parametrize("kind", BESIDE)
def test_scales_beside_the_weights_need_no_config(kind, tmp_path):
    name, grid = BESIDE[kind]
    weight, scale = floats8((256, 384), E4M3), torch.rand(grid) + 0.5
    more = {"scaled_fp8": torch.empty(2, dtype=E4M3), "m.scale_input": torch.ones(())} if kind == "ComfyUI" else {}
    save_file({"m.weight": weight, f"m.{name}": scale, **more}, tmp_path / "in.safetensors")
    ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dequantize=True, dtype="float32")
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1) if kind == "of blocks" else scale
    spread = spread[:, None] if kind == "a row of scales" else spread
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == {"m.weight"}
    assert torch.equal(found["m.weight"], weight.float() * spread)
    ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "out.gguf", dequantize=True)


def test_plain_floats_of_8_bits_are_widened_or_named(tmp_path):
    """There are no scales: as torch's own ``.to`` does it, and a note says so."""
    weights = {f"m.{dtype}": bytes_of((4, 16)).view(dtype) for dtype in (E4M3, torch.float8_e5m2)}
    source = tmp_path / "in.safetensors"
    save_file({**weights, "n.weight": torch.ones(2)}, source)
    kept = [n for n in ckpt_tools.convert(source, tmp_path / "a.safetensors", dtype="bfloat16").notes if n.count == 2]
    assert [note.outcome for note in kept] == [Outcome.KEPT] and "m.torch.float8_e4m3fn" in kept[0].what
    report = ckpt_tools.convert(source, tmp_path / "b.safetensors", dequantize=True)
    assert [note.why.partition(":")[0] for note in report.notes if note.outcome is Outcome.KEPT] == [
        "taken as the numbers that they are"
    ]
    found = load_file(tmp_path / "b.safetensors")
    for name, weight in weights.items():
        assert torch.equal(found[name].nan_to_num(7), weight.to(torch.bfloat16).nan_to_num(7)), name


# What is refused


def weight_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return bytes_of(shape or (4, 16)).view(dtype)


def m(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"m.{name}": tensor for name, tensor in tensors.items()}


def scheme(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights}}}


def ints(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int32)


E4, ROWS, BLOCK = weight_of(E4M3), torch.ones(4, 1), torch.ones(1, 1)
ROTATED = {"quant_method": "compressed-tensors", "config_groups": {}, "transform_config": {"config_groups": {"u": {}}}}
AWQ = {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}
EXPERTS = m(w1_blocks=weight_of(torch.uint8, 2, 4, 1, 16), w1_scales=weight_of(torch.uint8, 2, 4, 1))
PACKED = m(weight_packed=ints(4, 2), weight_scale=ROWS, weight_zero_point=ints(1, 1))
BOTH = m(weight_packed=bytes_of((4, 8)), weight=torch.ones(4, 16), weight_scale=bytes_of((4, 1)))

REFUSED: dict[str, tuple[Tensors, Mapping[str, Any] | None, str]] = {
    "no config": (m(weight=bytes_of((4, 16)).view(torch.int8)) | {"n.weight": E4}, None,
        "m.weight is int8 ... --config"),
    "blocks of no known size": (m(weight=weight_of(E4M3, 200, 128), weight_scale_inv=torch.ones(2, 1)), None,
        "m.weight has scales [2, 1] of blocks of an unknown size ... needs the quantization_config"),
    "nothing": (m(weight=torch.ones(2)), fp8(), "no tensor is quantized"),
    "gptq": (m(qweight=ints(2)), {"quant_method": "gptq"}, "gptq ... fp8, mxfp4"),
    "no scales": (m(weight=E4), fp8(), "m.weight ... without scales"),
    "other blocks": (m(weight=E4, weight_scale_inv=torch.ones(3, 5)), fp8(128, 128), "m.weight ... [4, 16] ... [3, 5]"),
    "a bad block size": (m(weight=E4, weight_scale_inv=BLOCK), {"quant_method": "fp8", "weight_block_size": [0, "x"]},
        "m.weight ... weight_block_size"),
    "a companion that is not known": (m(weight=E4, weight_scale_inv=BLOCK, pre_quant_scale=torch.ones(16)), fp8(),
        "m.pre_quant_scale ... not known"),
    "scales without a weight": (m(weight=E4, weight_scale_inv=BLOCK) | {"n.weight_scale": torch.ones(16)}, fp8(),
        "n.weight_scale ... not known"),
    "experts of another model": (EXPERTS, {"quant_method": "mxfp4"}, "m.w1_blocks ... gpt-oss"),
    "another algorithm of ModelOpt": (m(weight=weight_of(torch.uint8), weight_scale=ROWS), AWQ,
        "m.weight_scale ... float32"),
    "a group of another width": (m(weight=E4, weight_scale=ROWS), scheme(num_bits=4, type="int"),
        "m.weight ... no group, or several"),
    "a strategy that the shapes contradict": (m(weight=E4, weight_scale=torch.ones(4, 2)),
        scheme(num_bits=8, type="float", strategy="channel"), "m.weight ... channel"),
    "rotated weights": (m(weight=E4, weight_scale=ROWS), ROTATED, "transform_config"),
    "packed zero points": (PACKED, scheme(num_bits=4, type="int", strategy="channel"),
        "m.weight_packed ... zero points"),
    "two that become one": (BOTH, scheme(num_bits=4, type="float", group_size=32),
        "m.weight_packed would become m.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_whole_is_refused_by_name(case, tmp_path, capsys):
    tensors, quantization, words = REFUSED[case]
    source = write_model(tmp_path / "in", tensors, quantization)
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(source), str(tmp_path / "out"), "--to", "safetensors", "--dequantize"])
    said = capsys.readouterr().err
    assert ended.value.code in (2, 4), said
    assert said.startswith("Error: ") and said.count("\n") == 1, said
    assert [word for word in words.split(" ... ") if word not in said] == [], said
    assert not (tmp_path / "out").exists()


# compressed-tensors' own code

FLOAT8, INT8 = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}
FLOAT4, INT4 = {"num_bits": 4, "type": "float"}, {"num_bits": 4, "type": "int"}
OF_32 = {"strategy": "group", "group_size": 32}
OF_16 = {"strategy": "group", "group_size": 16}

GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8, one scale": ("float-quantized", {**FLOAT8, "strategy": "tensor"}),
    "fp8, rows": ("float-quantized", {**FLOAT8, "strategy": "channel"}),
    "fp8, blocks": ("float-quantized", {**FLOAT8, "strategy": "block", "block_structure": [32, 32]}),
    "fp8, groups": ("naive-quantized", {**FLOAT8, **OF_32}),
    "int8, one scale": ("int-quantized", {**INT8, "strategy": "tensor"}),
    "int8, rows": ("int-quantized", {**INT8, "strategy": "channel"}),
    "int8, groups": ("int-quantized", {**INT8, **OF_16}),
    "int8, rows with zero points": ("int-quantized", {**INT8, "strategy": "channel", "symmetric": False}),
    "nvfp4": ("nvfp4-pack-quantized", {**FLOAT4, "strategy": "tensor_group", "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn"}),
    "mxfp4": ("mxfp4-pack-quantized", {**FLOAT4, **OF_32, "scale_dtype": "torch.uint8"}),
    "mxfp8": ("mxfp8-quantized", {**FLOAT8, **OF_32, "scale_dtype": "torch.uint8"}),
    "packed, 4 bits": ("pack-quantized", {**INT4, **OF_32}),
    "packed, 4 bits, rows": ("pack-quantized", {**INT4, "strategy": "channel"}),
    "packed, 8 bits": ("pack-quantized", {**INT8, **OF_16}),
}  # fmt: skip

HEIGHT, WIDTH = 64, 96


def scales_of(weights: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    by_strategy = {
        "tensor": (1,),
        "channel": (HEIGHT, 1),
        "block": (-(-HEIGHT // 32), -(-WIDTH // 32)),
        "group": (HEIGHT, WIDTH // weights.get("group_size", 1)),
        "tensor_group": (HEIGHT, WIDTH // 16),
    }
    shape = by_strategy[weights["strategy"]]
    generator = torch.Generator().manual_seed(3)
    if weights.get("scale_dtype") == "torch.uint8":
        return 2.0 ** torch.randint(-20, 20, shape, generator=generator).to(dtype)
    return (torch.rand(shape, generator=generator) * 0.1 + 1e-3).to(dtype)


def compressed(form: str, weights: dict[str, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Any, Any]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    state = {
        "weight": torch.randn(HEIGHT, WIDTH, generator=torch.Generator().manual_seed(4)).to(dtype),
        "weight_scale": scales_of(weights, dtype),
        "weight_zero_point": torch.zeros(1, dtype=torch.int8),
    }
    if form == "nvfp4-pack-quantized":
        state["weight_global_scale"] = torch.full(shape, 37.5)
    if weights.get("symmetric") is False:
        state["weight_zero_point"] = torch.arange(HEIGHT, dtype=torch.int8)[:, None] - 20
    else:
        del state["weight_zero_point"]
    return BaseCompressor.get_value_from_registry(form).compress(state, scheme), scheme


@pytest.mark.extended
@pytest.mark.parametrize("group", GROUPS)
def test_compressed_tensors_decompresses_to_the_same_bits(group, tmp_path):
    from compressed_tensors.compressors import BaseCompressor

    form, weights = GROUPS[group]
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"a": {"weights": weights}}}
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for shape in [(1,), ()] if group == "nvfp4" else [()]:
            state, its_scheme = compressed(form, dict(weights), dtype, shape)
            wanted = BaseCompressor.get_value_from_registry(form).decompress(state, its_scheme)["weight"]
            for name in ("float32", "bfloat16"):
                folder = tmp_path / f"{dtype}{shape}{name}"
                found = dequantized(folder, {f"m.{key}": value for key, value in state.items()}, settings, dtype=name)
                assert found.keys() == {"m.weight"}
                assert same_bits(found["m.weight"], wanted.to(getattr(torch, name)))


@pytest.mark.extended
def test_the_page_shows_what_its_commands_print(tmp_path):
    fp8_model(tmp_path / "fp8")
    check_commands(ROOT / "docs" / "quantized.md", tmp_path)


def test_tied_tensors_stay_tied(tmp_path):
    embeddings = torch.ones(4, 8)
    tensors = {"m.weight": floats8((32, 32), E4M3), "m.weight_scale_inv": scales32((1, 1)), "embed": embeddings}
    source = write_model(tmp_path / "source", {}, fp8(32, 32))
    (source / "model.safetensors").unlink()
    torch.save({**tensors, "head": embeddings}, source / "pytorch_model.bin")
    ckpt_tools.convert(source, tmp_path / "out.pt", dequantize=True)
    found = torch.load(tmp_path / "out.pt")
    assert found.keys() == {"m.weight", "embed", "head"}
    assert found["embed"].data_ptr() == found["head"].data_ptr()
