"""``--quantize``: the bits and the settings of transformers and compressed-tensors, what stays as it is, and that both
load the output."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.core.notes import Outcome
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.recipes.block_quantization import BlockFormat, QuantizedElements
from ckpt_tools.recipes.quantize import _LAYERS
from tests.support.quantized import Tensors, same_bits, tensors_in, write_model

METHODS = ("fp8-block", "fp8", "int8")
UP, GATE = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture(params=[37, 1 << 18], ids=["small pieces", "whole pieces"])
def piece(request, monkeypatch):
    monkeypatch.setattr("ckpt_tools.core.manifest.MAX_PIECE", request.param)


def hard_weight(rows: int, columns: int) -> torch.Tensor:
    """Blocks and rows of every size with ties, zeros of both signs and subnormals among them."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= 2.0 ** torch.randint(-100, 100, (rows, 1), generator=generator)
    weight[:128, :128] = torch.arange(128) / 16 - 4  # ties of e4m3
    weight[:128, 0] = 448
    weight[128:256, :128] = -0.0
    weight[300] = torch.arange(columns) - columns / 2 + 0.5
    weight[301], weight[302] = -0.0, 1e-41
    return weight


def quantized(
    folder: Path, tensors: Tensors, method: str, config: Mapping[str, Any] | None = None, **options: Any
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors that ``quantize`` writes of these, and ``quantization_config``; ``verify`` agrees."""
    source = write_model(folder / "source", tensors, None, **(config or {}))
    options = {"quantize": method, **options}
    ckpt_tools.convert(source, folder / "out", to="safetensors", **options)
    assert ckpt_tools.verify(source, folder / "out", **options).equal
    return tensors_in(folder / "out"), json.loads((folder / "out" / "config.json").read_text())["quantization_config"]


def by_transformers(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    settings = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    found = Fp8Quantize(SimpleNamespace(quantization_config=settings)).convert({"m.weight": weight})
    return found["m.weight"], found["m.weight_scale_inv"]


def by_compressed_tensors(weight: torch.Tensor, method: str) -> tuple[torch.Tensor, torch.Tensor]:
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = preset_name_to_scheme({"fp8": "FP8_DYNAMIC", "int8": "INT8"}[method], ["Linear"]).weights
    extremes = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scale, _ = calculate_qparams(*extremes, arguments)
    return quantize(weight, scale, None, arguments, dtype=arguments.pytorch_dtype()), scale


# The bits


@pytest.mark.usefixtures("piece")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_the_libraries(method, dtype, tmp_path):
    weight = hard_weight(512, 384).to(dtype)
    found, _ = quantized(tmp_path, {UP: weight, GATE: torch.ones(128, 128)}, method)
    if method == "fp8-block":
        wanted, scale = by_transformers(weight)
        name = f"{UP}_scale_inv"
    else:
        wanted, scale = by_compressed_tensors(weight.float(), method)
        name = f"{UP}_scale"
    assert found[UP].dtype == wanted.dtype
    assert torch.equal(found[UP].view(torch.uint8), wanted.view(torch.uint8))
    assert same_bits(found[name], scale)


def test_blocks_too_small_for_a_scale_become_zeros(tmp_path):
    """Where transformers writes NaN, since 448 divided by the largest number is infinite."""
    weight = torch.zeros(128, 256)
    weight[0, 0], weight[1, 0], weight[0, 128] = 1e-37, -1e-40, 1e-35
    assert torch.isnan(by_transformers(weight)[0].float()).any()
    found, _ = quantized(tmp_path, {UP: weight, GATE: weight}, "fp8-block")
    assert not found[UP][:, :128].float().any()
    assert found[UP].float()[0, 128] == 448
    assert found[f"{UP}_scale_inv"][0, 0] == 1


def test_rounding_to_e4m3_is_that_of_ml_dtypes_for_all_upper_bits():
    """Elements are rounded by their upper 16 bits and whether a lower one is set: these are all the cases."""
    uppers = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    values = (uppers | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).view(np.float32)
    values = values[np.isfinite(values).all(1) & (np.abs(values) <= 448).all(1)]
    values = np.concatenate([values, np.full((len(values), 1), 448, np.float32)], 1)  # the scale is 1
    rows = QuantizedElements(values.shape, BlockFormat.FP8_ROWS.dtype, (), "w", BlockFormat.FP8_ROWS)
    out = np.empty(values.shape, ml_dtypes.float8_e4m3fn)
    rows.compute_box(SimpleNamespace(shape=values.shape), [values], out)
    assert np.array_equal(out.view(np.uint8), values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@given(
    st.sampled_from([BlockFormat.FP8_ROWS, BlockFormat.INT8_ROWS]),
    st.lists(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=3, max_size=3), min_size=1, max_size=4),
)
def test_what_is_read_back_is_near(block_format, rows):
    """Half a step of the elements times their scale, in float64."""
    values = np.array(rows, np.float32)
    tensor = QuantizedElements(values.shape, block_format.dtype, (), "w", block_format)
    out = np.empty(values.shape, ml_dtypes.float8_e4m3fn if block_format.dtype.is_floating else np.int8)
    tensor.compute_box(SimpleNamespace(shape=values.shape), [values], out)
    scales = block_format.compute_factors(values, "w").astype(np.float64)
    steps = np.maximum(np.abs(values / scales) * 2.0**-4, 2.0**-10) if block_format.dtype.is_floating else 0.5
    # The largest of int8 is half a step beyond 127. What is subnormal has a scale of fewer bits.
    assert (np.abs(out.astype(np.float64) * scales - values) <= steps * scales * (1 + 1e-4) + 1e-42).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_refused(method, value, tmp_path):
    weight = torch.ones(256, 256)
    weight[200, 3] = value
    source = write_model(tmp_path / "source", {UP: weight, GATE: weight}, None)
    with pytest.raises(UnsupportedError, match=r"(up|gate)_proj.weight holds a NaN or an infinity.*keep="):
        ckpt_tools.convert(source, tmp_path / "out", to="safetensors", quantize=method)
    assert not (tmp_path / "out").exists()


def test_fp32_masters_are_quantized(checkpoint, tmp_path):
    dcp = checkpoint("fsdp2", "plain", 2).checkpoint
    names = [name for name, shape in ((t.name, t.shape) for t in ckpt_tools.inspect(dcp).tensors) if len(shape) == 2]
    rule = f"^{re.escape(names[0])}$=model.layers.0.self_attn.o_proj.weight"
    ckpt_tools.convert(dcp, tmp_path / "zero2", to="zero2", world_size=2, dtype="bfloat16")
    folder = write_model(tmp_path / "model", {UP: torch.ones(1, 1)}, None)
    options = {"to": "safetensors", "config": folder, "rename": [rule], "quantize": "int8", "dtype": "bfloat16"}
    for name, source, weights in (
        ("a", dcp, None),
        ("b", tmp_path / "zero2", None),
        ("c", tmp_path / "zero2", "model"),
    ):
        ckpt_tools.convert(source, tmp_path / name, weights=weights, **options)
    made = [tensors_in(tmp_path / name) for name in "abc"]
    scales = [each["model.layers.0.self_attn.o_proj.weight_scale"] for each in made]
    assert made[0]["model.layers.0.self_attn.o_proj.weight"].dtype == torch.int8
    assert same_bits(scales[0], scales[1])
    assert not torch.equal(scales[1], scales[2])


# What loads it


SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "tied qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 128, "num_experts": 8, "head_dim": 64}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 128,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 128,
            "kv_lora_rank": 128,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
        },
    ),
}


def save_model(kind: str, folder: Path) -> Any:
    import transformers

    name, sizes = MODELS[kind]
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**{**SIZES, **sizes})).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_transformers_loads_blocks_as_they_are(kind, tmp_path):
    """Without a GPU it dequantizes: to the bits of ``--dequantize``, and of its own quantization of each weight."""
    from transformers import AutoModelForCausalLM

    model = save_model(kind, tmp_path / "model")
    ckpt_tools.convert(tmp_path / "model", tmp_path / "out", to="safetensors", quantize="fp8-block")
    found, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values())
    ckpt_tools.convert(tmp_path / "out", tmp_path / "plain", to="safetensors", dequantize=True)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    tokens = torch.arange(32)[None]
    assert {**plain.state_dict()}.keys() == {**found.state_dict()}.keys()
    assert all(same_bits(found.state_dict()[name], each) for name, each in plain.state_dict().items())
    assert torch.equal(found(tokens).logits, plain(tokens).logits)
    assert torch.allclose(found(tokens).logits, model(tokens).logits, atol=0.4)
    source, written = load_file(tmp_path / "model" / "model.safetensors"), tensors_in(tmp_path / "out")
    names = [name for name in source if f"{name}_scale_inv" in written]
    assert len(names) > 10
    for name in names:
        elements, scales = by_transformers(source[name])
        assert torch.equal(written[name].view(torch.uint8), elements.view(torch.uint8))
        assert same_bits(written[f"{name}_scale_inv"], scales)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(("kind", "method"), [*((kind, "fp8") for kind in MODELS), ("llama", "int8")])
def test_transformers_loads_rows(kind, method, tmp_path):
    """But experts in int8, which it refuses."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    model = save_model(kind, tmp_path / "model")
    ckpt_tools.convert(tmp_path / "model", tmp_path / "out", to="safetensors", quantize=method)
    found, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )  # fmt: skip
    assert not any(info.values())
    ckpt_tools.convert(tmp_path / "out", tmp_path / "plain", to="safetensors", dequantize=True, dtype="float32")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    assert all(same_bits(found.state_dict()[name], each) for name, each in plain.state_dict().items())
    tokens = torch.arange(32)[None]
    assert torch.allclose(found(tokens).logits, model.float()(tokens).logits, atol=0.4)


def test_settings_are_those_that_the_libraries_write(tmp_path):
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from transformers import FineGrainedFP8Config

    tensors = {UP: torch.ones(128, 128), GATE: torch.ones(128, 128), "model.norm.weight": torch.ones(128)}
    tensors |= {"lm_head.weight": torch.ones(8, 128), "model.embed_tokens.weight": torch.ones(8, 128)}
    _, settings = quantized(tmp_path / "fp8-block", tensors, "fp8-block")
    assert FineGrainedFP8Config.from_dict(settings).to_dict() == {
        **FineGrainedFP8Config(modules_to_not_convert=["lm_head"]).to_dict(),
        "weight_block_size": [128, 128],
        **({"fmt": "e4m3"} if "fmt" in FineGrainedFP8Config.from_dict(settings).to_dict() else {}),
    }
    for method, preset, form in (("fp8", "FP8_DYNAMIC", "float"), ("int8", "INT8", "int")):
        scheme = preset_name_to_scheme(preset, ["Linear"])
        scheme.format = f"{form}-quantized"
        wanted = QuantizationConfig(
            config_groups={"group_0": scheme}, format=f"{form}-quantized",
            quantization_status="compressed", ignore=["lm_head"],
        )  # fmt: skip
        _, settings = quantized(tmp_path / method, tensors, method)
        assert QuantizationConfig.model_validate(settings) == wanted
        assert {**json.loads(wanted.model_dump_json()), **settings} == json.loads(wanted.model_dump_json())


# What is left as it is


def model_types() -> list[Any]:
    kinds = ["llama", "qwen3", "gemma3_text", "phi3", "glm4", "deepseek_v3", "gpt_oss", "qwen3_next", "falcon", "gpt2"]
    return [*kinds, pytest.param("*", marks=pytest.mark.extended)]


def is_matrix(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) and weight.ndim == 2


@pytest.mark.parametrize("kind", model_types())
def test_layers_are_linear_ones_of_transformers(kind):
    """An embedding, a router or a matrix of another class would be read as what it is not."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind == "*" else (kind,):
        try:
            config = AutoConfig.for_model(model_type)
            config.num_hidden_layers = 4
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except Exception:
            assert kind == "*"
            continue
        matrices = {
            name: module for name, module in model.named_modules() if is_matrix(getattr(module, "weight", None))
        }
        chosen = {name: type(each) for name, each in matrices.items() if _LAYERS.fullmatch(f"{name}.weight")}
        assert {*chosen.values()} <= {torch.nn.Linear}, model_type
        assert bool(chosen) or kind in ("*", "falcon", "gpt2")


def test_layers_that_stay_are_listed_and_noted(tmp_path):
    """``should_convert_module`` of transformers says which modules it takes for quantized ones."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    matrix, odd = torch.ones(128, 128), torch.ones(96, 128)
    layers = {
        "model.layers.0.self_attn.q_proj": matrix, "model.layers.0.self_attn.k_proj": odd,
        "model.layers.0.self_attn.v_proj": matrix, "model.layers.0.self_attn.o_proj": matrix,
        "model.layers.0.mlp.experts.0.up_proj": matrix, "model.layers.0.mlp.experts.1.up_proj": matrix,
        "model.layers.0.mlp.experts.1.down_proj": matrix, "model.layers.0.mlp.gate": matrix,
        "model.layers.0.mlp.shared_experts.up_proj": matrix, "model.layers.0.mlp.shared_expert_gate": matrix,
        "model.layers.1.mlp.experts.0.up_proj": matrix, "model.layers.1.mlp.down_proj": matrix,
        "model.layers.2.mlp.up_proj": matrix, "mtp.layers.0.mlp.up_proj": matrix, "lm_head": matrix,
        "model.visual.layers.0.mlp.up_proj": matrix, "model.embed_tokens": matrix,
    }  # fmt: skip
    tensors = {f"{name}.weight": each.clone() for name, each in layers.items()}
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(128)
    found, settings = quantized(
        tmp_path,
        tensors,
        "fp8-block",
        {"num_hidden_layers": 2},
        keep=["*.1.mlp.down_proj.*", "*.0.mlp.experts.1.down*"],
    )
    made = {name for name in layers if f"{name}.weight_scale_inv" in found}
    assert made == {
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.shared_experts.up_proj",
        "model.layers.1.mlp.experts.0.up_proj",
    }
    skipped = settings["modules_to_not_convert"]
    assert skipped == sorted(skipped)
    for name, each in layers.items():
        assert found[f"{name}.weight"].dtype == (torch.float8_e4m3fn if name in made else each.dtype)
        if name != "model.embed_tokens":
            assert should_convert_module(name, skipped) == (name in made), name
    assert not should_convert_module("model.layers.0.mlp.experts", skipped)
    assert should_convert_module("model.layers.1.mlp.experts", skipped)
    report = ckpt_tools.plan(tmp_path / "source", tmp_path / "x", to="safetensors", quantize="fp8-block")
    noted = {note.what: note.why for note in report.notes if note.outcome is Outcome.KEPT}
    assert "blocks of 128 x 128 do not fill" in noted["model.layers.0.self_attn.k_proj.weight"]
    assert "predicts later tokens" in noted["model.layers.2.mlp.up_proj.weight"]


def test_other_weights_are_cast(tmp_path):
    tensors = {UP: torch.ones(128, 128), GATE: torch.ones(128, 128), "lm_head.weight": torch.ones(300, 128)}
    found, _ = quantized(tmp_path, tensors, "fp8-block", {"dtype": "float32"}, dtype="bfloat16")
    assert found["lm_head.weight"].dtype == torch.bfloat16
    assert found[f"{UP}_scale_inv"].dtype == torch.float32
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_quantized_weights_become_others(tmp_path):
    """``--dequantize`` comes first, and what the source says of its own weights is left out."""
    tensors = {UP: hard_weight(512, 384), GATE: torch.ones(128, 128)}
    quantized(tmp_path, tensors, "int8")
    (tmp_path / "out" / "hf_quant_config.json").write_text("{}")
    options = {"dequantize": True, "quantize": "fp8"}
    report = ckpt_tools.convert(tmp_path / "out", tmp_path / "again", to="safetensors", **options)
    assert ckpt_tools.verify(tmp_path / "out", tmp_path / "again", **options).equal
    assert {note.what for note in report.notes if note.outcome is Outcome.DROPPED} >= {"hf_quant_config.json"}
    assert not (tmp_path / "again" / "hf_quant_config.json").exists()
    settings = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "float-quantized"


def test_verify_finds_a_changed_bit_and_a_changed_setting(tmp_path):
    quantized(tmp_path, {UP: hard_weight(512, 384), GATE: torch.ones(128, 128)}, "fp8")
    source, out = tmp_path / "source", tmp_path / "out"
    assert ckpt_tools.verify(out).equal
    assert not ckpt_tools.verify(source, out).equal
    assert not ckpt_tools.verify(source, out, quantize="int8").equal
    tensors = tensors_in(out)
    tensors[UP].view(torch.uint8)[3, 3] ^= 1
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    report = ckpt_tools.verify(source, out, quantize="fp8")
    assert [str(each.key) for each in report.differences] == [UP]


# Refusals


MODEL = {UP: torch.ones(128, 128), GATE: torch.ones(128, 128)}
STACKED = {**MODEL, "model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 128, 128)}
REFUSALS: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "a tree": (MODEL, {"to": "dcp"}, "folders of safetensors.*this writes dcp"),
    "a pickle": (MODEL, {"to": "torch"}, "this writes torch"),
    "one file": (MODEL, {"dst": "out.safetensors"}, "writes a folder with config.json; out.safetensors is one file"),
    "a method": (MODEL, {"quantize": "int4"}, "'int4' is not one of fp8-block, fp8, int8"),
    "a glob of nothing": (MODEL, {"keep": ["*.nothing"]}, r"keep='\*.nothing' matches no tensor"),
    "keep alone": (MODEL, {"quantize": None, "keep": ["*"]}, "keep= is for quantize="),
    "a model like another": (MODEL, {"like": "."}, "quantize= contradicts like="),
    "names of others": ({"layers.0.w.weight": torch.ones(128, 128)}, {}, "quantize nothing: no matrix has a name"),
    "small matrices": ({UP: torch.ones(64, 64)}, {}, "would quantize nothing: of .*of a shape that.* takes any"),
    "stacked experts": (STACKED, {}, "has the experts of a layer in one tensor.*recipe= writes a matrix.*keep="),
    "fp8 already": ({UP: torch.ones(128, 128).to(torch.float8_e4m3fn)}, {}, "quantized already; dequantize=True"),
    "scales already": ({**MODEL, f"{UP}_scale_inv": torch.ones(1, 1)}, {}, "would have this name"),
    "all state": (MODEL, {"state": "all"}, "quantize='fp8-block' writes weights alone, and state='all' all state"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_written_is_refused(case, tmp_path):
    tensors, options, said = REFUSALS[case]
    source = write_model(tmp_path / "source", tensors, None)
    options = {"to": None if "dst" in options else "safetensors", "quantize": "fp8-block", **options}
    with pytest.raises((UsageError, UnsupportedError), match=said):
        ckpt_tools.convert(source, tmp_path / options.pop("dst", "out"), **options)
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


def test_stacked_experts_stay_if_asked(tmp_path):
    found, settings = quantized(tmp_path, STACKED, "fp8-block", keep=["*.experts.*"])
    assert found["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.float32
    assert settings["modules_to_not_convert"] == ["lm_head", "model.layers.0.mlp.experts"]


@pytest.mark.parametrize("config", [None, {"architectures": ["LlamaForCausalLM"]}])
def test_config_of_the_model_is_needed(config, tmp_path):
    save_file(MODEL, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"quantize='fp8' needs the model's config.json with its model_type.*config="):
        ckpt_tools.plan(tmp_path / "model.safetensors", tmp_path / "out", to="safetensors", quantize="fp8")
