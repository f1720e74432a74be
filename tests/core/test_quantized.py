"""Quantized weights and the tensors that they need stay together, and keep their bits, in every conversion."""

import json
from pathlib import Path
from time import process_time

import pytest
import torch
from safetensors.torch import save_file
from transformers.utils.quantization_config import QuantizationMethod

import ckpt_tools
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.quantized import find_uncastable_keys
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.errors import UnsupportedError, UsageError
from tests.support.quantized import Tensors, bytes_of, floats8
from tests.support.sweep import tiered

E4M3 = torch.float8_e4m3fn

MODULES: dict[str, Tensors] = {
    "block fp8": {"weight": floats8((4, 8), E4M3), "weight_scale_inv": torch.rand(2, 2)},
    "DeepSeek V4": {
        "weight": bytes_of((4, 8)).view(torch.int8),
        "scale": bytes_of((4, 1)).view(torch.float8_e8m0fnu),
    },
    "fp8 of ModelOpt": {"weight": floats8((4, 8), E4M3), "weight_scale": torch.rand(()), "input_scale": torch.rand(())},
    "nvfp4 of ModelOpt": {
        "weight": bytes_of((4, 8)),
        "weight_scale": floats8((4, 1), E4M3),
        "weight_scale_2": torch.rand(()),
        "input_scale": torch.rand(()),
    },
    "nvfp4 of compressed-tensors": {
        "weight_packed": bytes_of((4, 8)),
        "weight_scale": floats8((4, 1), E4M3),
        "weight_global_scale": torch.rand(1),
        "input_global_scale": torch.rand(1),
    },
    "packed integers": {
        "weight_packed": torch.ones(4, 1, dtype=torch.int32),
        "weight_scale": torch.rand(4, 1),
        "weight_zero_point": torch.ones(1, 1, dtype=torch.int32),
        "weight_shape": torch.tensor([4, 8]),
        "weight_g_idx": torch.zeros(8, dtype=torch.int32),
    },
    "int8 of bitsandbytes": {
        "weight": bytes_of((4, 8)).view(torch.int8),
        "SCB": torch.rand(4),
        "weight_format": torch.zeros((), dtype=torch.uint8),
    },
    "nf4 of bitsandbytes": {
        "weight": bytes_of((16, 1)),
        "weight.absmax": torch.rand(2),
        "weight.quant_map": torch.rand(16),
        "weight.nested_absmax": torch.rand(1),
        "weight.quant_state.bitsandbytes__nf4": bytes_of((64,)),
    },
    "GPTQ": {
        "qweight": torch.ones(1, 4, dtype=torch.int32),
        "qzeros": torch.ones(1, 1, dtype=torch.int32),
        "scales": torch.rand(1, 4),
        "g_idx": torch.zeros(8, dtype=torch.int32),
    },
    "experts of gpt-oss": {
        "down_proj_blocks": bytes_of((2, 4, 1, 16)),
        "down_proj_scales": bytes_of((2, 4, 1)),
    },
    "experts of fp8": {"down_proj": floats8((2, 4, 8), E4M3), "down_proj_scale_inv": torch.rand(2, 1, 1)},
    "float4": {
        "weight": bytes_of((4, 4)).view(torch.float4_e2m1fn_x2),
        "weight_scale": bytes_of((4, 1)).view(torch.float8_e8m0fnu),
    },
}
"""Modules of each quantizer: what the first tensor needs comes after it."""


@pytest.fixture(params=MODULES)
def module(request):
    return MODULES[request.param]


@pytest.fixture
def source(module, tmp_path):
    tensors = {f"a.q.{name}": tensor for name, tensor in module.items()} | {"a.norm.weight": torch.rand(4)}
    save_file(tensors, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    elements = tensor.contiguous() if tensor.dim() else tensor.reshape(1)
    return tensor.dtype, tensor.shape, elements.view(torch.uint8).numpy().tobytes()


def read(path: Path) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    with_torch = ckpt_tools.open(path)
    return {name: raw(with_torch[name].torch()) for name in with_torch}


def test_a_cast_leaves_all_of_them_alone_and_a_new_name_takes_all_along(source, module, tmp_path):
    for name, prefix in (("out.safetensors", "a.q"), ("out.pt", "b.p")):
        rename = [] if prefix == "a.q" else [r"^a\.q\.=b.p."]
        ckpt_tools.convert(source, tmp_path / name, dtype="bfloat16", rename=rename)
        found = read(tmp_path / name)
        assert found.pop("a.norm.weight")[0] is torch.bfloat16
        assert found == {f"{prefix}.{each}": raw(tensor) for each, tensor in module.items()}


def test_a_cast_names_the_weights_that_stay_fp8(tmp_path):
    save_file({"q.weight": floats8((4, 8), E4M3), "q.scale_weight": torch.rand(())}, tmp_path / "in.safetensors")
    report = ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dtype="bfloat16")
    assert {note.what for note in report.notes} == {"q.weight", "q.scale_weight"}


def test_taking_one_of_them_apart_is_refused(source, module, tmp_path):
    for number, name in enumerate(module):
        with pytest.raises(UsageError, match=r"a\.q\.\S+ is quantized and becomes .* which it needs, would become"):
            ckpt_tools.convert(source, tmp_path / "out.safetensors", rename=[rf"^a\.q\.{name}$=b.p.{name}"])
        if number:
            with pytest.raises(UsageError, match=r"is quantized and needs"):
                ckpt_tools.convert(source, tmp_path / "out.safetensors", exclude=[f"a.q.{name}"])
    assert not (tmp_path / "out.safetensors").exists()


HALF = torch.full((8,), 1.0009765625, dtype=torch.float16)
"""Other bits in bfloat16."""

SAVED: dict[str, Tensors] = {
    "exl3": {"trellis": torch.ones(2, 2, 4, dtype=torch.int16), "suh": HALF, "svh": HALF},
    "aqlm": {"codes": torch.ones(2, 2, 1, dtype=torch.int16), "codebooks": HALF, "scales": HALF},
    "vptq": {
        "indices": torch.ones(1, 4, 2, dtype=torch.int32),
        "centroids.weight": HALF,
        "res_centroids.weight": HALF,
        "weight_scale": HALF,
        "weight_bias": HALF,
    },
    "hqq": {"W_q": torch.ones(4, 2, dtype=torch.int32), "scale": HALF, "zero": HALF, "nbits": torch.tensor(4)},
    "quanto": {
        "weight._data": bytes_of((4, 8)).view(torch.int8),
        "weight._scale": HALF,
        "input_scale": torch.ones((), dtype=torch.float16),
    },
    "eetq": {"weight": bytes_of((8, 4)).view(torch.int8), "weight_scales": HALF},
    "higgs": {"weight": torch.ones(4, 2, dtype=torch.int16), "scales": HALF, "tables": HALF, "tables2": HALF},
    "torchao": {"_weight_qdata": bytes_of((8, 4)).view(torch.int8), "_weight_scale": HALF, "_weight_act_scale": HALF},
    "bitnet": {"weight": bytes_of((2, 4)), "weight_scale": HALF},
    "spqr": {"dense_weights": torch.ones(4), "row_offsets": torch.ones(5, dtype=torch.int32), "col_vals": HALF},
    "fp_quant": {"qweight": bytes_of((4, 2)), "scales": bytes_of((4, 1)), "weight_global_scale": HALF},
    "sinq": {"W_q": bytes_of((4, 2)), "scale": HALF, "zero": HALF, "scale2": HALF},
    "auto-round": {k: v.half() if v.is_floating_point() else v for k, v in MODULES["GPTQ"].items()},
    "bitsandbytes": {
        "weight": torch.arange(4, dtype=torch.float32).to(torch.bfloat16),
        "weight.absmax": bytes_of((2,)),
        "weight.quant_map": torch.rand(16),
        "weight.nested_absmax": torch.rand(1),
        "weight.quant_state.bitsandbytes__nf4": bytes_of((64,)),
    },
}
"""What the libraries save of a layer, with the codes of bitsandbytes in a float type, as FSDP wants them."""

ANY: Tensors = {"weight": torch.ones(4, 2, dtype=torch.int16), "of_its_own": HALF, "codes_8": bytes_of((4,))}


METHODS = sorted({*SAVED, *(method.value for method in QuantizationMethod)})
"""Those of which ``SAVED`` has no layer differ for us in their names alone."""


@pytest.mark.parametrize("method", tiered(METHODS, test=(*SAVED, "gptq"), extended=METHODS))
def test_every_method_keeps_its_settings_and_bits(method, tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    layer = {f"l.q.{name}": tensor.clone() for name, tensor in SAVED.get(method, ANY).items()}
    save_file({**layer, "norm.weight": torch.ones(4, dtype=torch.float16)}, source / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": {"quant_method": method, "bits": 4}}
    (source / "config.json").write_text(json.dumps(config))
    ckpt_tools.convert(source, out, to="safetensors", dtype="float32", strict=True)
    assert json.loads((out / "config.json").read_text()) == config
    found = read(out / "model.safetensors")
    assert found.pop("norm.weight")[0] is torch.float32
    assert found == {name: raw(tensor) for name, tensor in layer.items()}
    assert ckpt_tools.verify(source, out, dtype="float32").equal
    if method in SAVED and method != "spqr":
        # Without a config, names tell them.
        ckpt_tools.convert(source / "model.safetensors", tmp_path / "plain.safetensors", dtype="bfloat16")
        found = read(tmp_path / "plain.safetensors")
        assert found.pop("norm.weight")[0] is torch.bfloat16
        assert found == {name: raw(tensor) for name, tensor in layer.items()}


class Attention(torch.nn.Module):
    """Parameters of no usual name beside a mask of 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj_weight = torch.nn.Parameter(torch.randn(12, 4))
        self.pos_embed = torch.nn.Parameter(torch.randn(4, 4))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.uint8))
        self.register_buffer("bias", torch.ones(4, dtype=torch.int8))
        self.out = torch.nn.Linear(4, 4)


def test_a_buffer_of_8_bits_makes_nothing_quantized(tmp_path):
    model = torch.nn.ModuleDict({"attn": Attention()})
    torch.save(model.state_dict(), tmp_path / "m.pt")
    parameters = {name for name, _ in model.named_parameters()}
    ckpt_tools.convert(tmp_path / "m.pt", tmp_path / "o.safetensors", dtype="bfloat16")
    assert {name for name, each in read(tmp_path / "o.safetensors").items() if each[0] is torch.bfloat16} == parameters
    for to in ("zero1", "zero3"):
        ckpt_tools.convert(tmp_path / "m.pt", tmp_path / to, to=to, dtype="bfloat16")
        (states,) = (tmp_path / to).rglob("*model_states.pt")
        content = torch.load(states, weights_only=False)
        assert {name for group in content["param_shapes"] for name in group} == parameters
        assert set(content["buffer_names"]) == {"attn.mask", "attn.bias"}


def recipe_of(path: Path, left: str, right: str, *more: str) -> Path:
    lines = "".join(
        f"[[map]]\nleft = {one}\nright = {other}\n" for one, other in [(left, right), *zip(more, more, strict=True)]
    )
    path.write_text(f'about = "a"\nleft = "a"\nright = "b"\n{lines}')
    return path


def test_a_recipe_that_renames_takes_all_of_them_along(source, module, tmp_path):
    first = next(iter(module))
    recipe = recipe_of(tmp_path / "r.toml", f'"{{m}}.q.{first}"', f'"{{m}}.p.o.{first}"', '"a.norm.weight"')
    ckpt_tools.convert(source, tmp_path / "there.safetensors", recipe=recipe)
    assert read(tmp_path / "there.safetensors").keys() == {"a.norm.weight", *(f"a.p.o.{name}" for name in module)}
    ckpt_tools.convert(tmp_path / "there.safetensors", tmp_path / "back.safetensors", recipe=recipe, inverse=True)
    assert read(tmp_path / "back.safetensors") == read(source)


def test_zero_points_follow_the_weight_that_comes_after_them(tmp_path):
    tensors = {f"a.q.{name}": MODULES["GPTQ"][name] for name in ("qzeros", "scales", "qweight")}
    torch.save(tensors, tmp_path / "in.pt")
    recipe = recipe_of(tmp_path / "r.toml", '"{m}.q.qweight"', '"{m}.p.qweight"')
    ckpt_tools.convert(tmp_path / "in.pt", tmp_path / "out.pt", recipe=recipe)
    assert read(tmp_path / "out.pt").keys() == {name.replace("q.", "p.", 1) for name in tensors}


@pytest.mark.parametrize(
    ("module", "left", "right", "said"),
    [
        ("block fp8", '{ "m.weight" = "A B" }', '{ "n.weight" = "B A" }', r"quantized \(float8_e4m3fn\).*dequantize"),
        ("int8 of bitsandbytes", '"m.weight"', '"m.kernel"', r"quantized, and the recipe would part it from m\.SCB"),
    ],
    ids=["with shapes", "that parts it from its scales"],
)
def test_a_recipe_is_refused(module, left, right, said, tmp_path):
    save_file({f"m.{name}": tensor for name, tensor in MODULES[module].items()}, tmp_path / "in.safetensors")
    recipe = recipe_of(tmp_path / "r.toml", left, right)
    with pytest.raises(UnsupportedError, match=rf"m\.weight is {said}"):
        ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", recipe=recipe)


PAIRS = """
    w,v w,w_scale w1,w1_scale w.weight,w.weight_scale weight,weight_scale_inv w_blocks,w_scales a.w_blocks,a.w_scales
    w.qweight,w.scales w.weight,w.weight.absmax w.weight,w.weight.quant_state.nf4
"""


@pytest.mark.parametrize("pair", PAIRS.split())
def test_names_are_looked_up_once(pair):
    """10,000 of them: each with each would take minutes."""
    table = ShardTable.whole((1,), DType.UINT8, ByteRange("file", 0, 1))
    entry = TensorEntry((1,), DType.UINT8, Kind.BUFFER, table)
    names = {each.replace("w", f"w{'1' * (n % 90)}{n}", 1) for n in range(10_000) for each in pair.split(",")}
    tensors = {StateKey(name): entry for name in (*names, "v", "v_scale")}
    began = process_time()
    assert find_uncastable_keys(Manifest("torch", tensors)) >= {StateKey("v")}
    assert process_time() - began < 3
