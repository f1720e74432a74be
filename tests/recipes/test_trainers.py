"""Checkpoints that trainers' own code wrote (tests/corpus/trainers/README.md), and names by the computations of their
own converters, written anew in numpy."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

import ckpt_tools
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.recipes.apply import apply_recipe
from ckpt_tools.recipes.index import load_recipe
from tests.recipes.test_apply import Arrays, key, numbers, stored
from tests.recipes.test_properties import read
from tests.support.sweep import tiered

CORPUS = Path(__file__).parents[1] / "corpus" / "trainers"


def unpacked(name: str, folder: Path) -> Path:
    with zipfile.ZipFile(CORPUS / f"{name}.zip") as archive:
        archive.extractall(folder)
    return folder


BOUNDS = {
    "torchtitan_llama": 1e-6, "torchtitan_qwen3_moe": 1e-4, "torchtitan_deepseek_v3": 1e-5, "olmo_core_llama": 1e-6,
    "olmo_core_olmo2": 1e-6, "automodel_qwen3_moe": 1e-6, "automodel_glm4_moe": 1e-6, "automodel_deepseek_v3": 1e-6,
    "automodel_gpt_oss": 1e-6, "prime_rl_qwen3_moe": 1e-6, "prime_rl_glm4_moe": 1e-6, "prime_rl_afmoe": 1e-6,
    "prime_rl_minimax_m2": 1e-6,
}  # fmt: skip
"""The largest difference of logits as a part of the largest logit. torchtitan multiplies complex numbers for rotary
embeddings and experts in groups, where transformers does neither; OLMo-core calls torch's attention."""

TRAINERS = {
    "torchtitan": "torchtitan of 2026-08", "olmo_core": "OLMo-core of 2026-06", "automodel": "NeMo Automodel 36044ad3",
    "prime_rl": "prime-rl 559b4477",
}  # fmt: skip
"""Their versions, by tests/corpus/trainers/README.md."""

OF_TEST = ("torchtitan_qwen3_moe", "olmo_core_olmo2", "automodel_gpt_oss")
OF_ALL = ("torchtitan_llama", "torchtitan_deepseek_v3", "automodel_deepseek_v3", "prime_rl_afmoe", "prime_rl_glm4_moe")


@pytest.mark.parametrize("name", tiered(BOUNDS, test=OF_TEST, extended=(*OF_ALL, "automodel_qwen3_moe")))
def test_a_genuine_checkpoint_has_the_same_logits_and_comes_back(name, card, tmp_path):
    folder = unpacked(name, tmp_path)
    ckpt_tools.convert(folder / "dcp", folder / "hub", to="safetensors", recipe=name, config=folder)
    model, told = AutoModelForCausalLM.from_pretrained(
        folder / "hub", output_loading_info=True, attn_implementation="eager"
    )
    surplus = {each for each in told.pop("unexpected_keys") if not each.startswith("model.layers.2.")}
    assert not surplus and not any(told.values()), told
    wanted = torch.from_numpy(np.load(folder / "logits.npy"))
    with torch.no_grad():
        found = model.eval()((torch.arange(12) * 5 % len(wanted[0]))[None]).logits[0]
    assert (found - wanted).abs().max() <= BOUNDS[name] * wanted.abs().max()
    report = ckpt_tools.convert(folder / "dcp", folder / "named", to="dcp", recipe=name, config=folder)
    # transformers' Qwen3-MoE has no bias of the router's choice.
    lost = [f"layers.{n}.moe.expert_bias_E" for n in range(2)] if name == "torchtitan_qwen3_moe" else []
    assert [note.what for note in report.notes] == lost
    ckpt_tools.convert(folder / "named", folder / "back", to="dcp", recipe=name, inverse=True, config=folder)
    ckpt_tools.diff(folder / "dcp", folder / "back", exclude=lost)
    trainer = next(each for each in TRAINERS if name.startswith(each))
    card(
        name,
        [TRAINERS[trainer], "transformers"],
        f"tiny {name.removeprefix(f'{trainer}_')}",
        "logits",
        bound=BOUNDS[name],
    )


def test_optimizer_state_of_torchtitan_is_parted_for_jobs_without_fuse_qkv(tmp_path):
    unpacked("torchtitan_llama", tmp_path)
    ckpt_tools.convert(tmp_path / "dcp", tmp_path / "parted", to="dcp", recipe="torchtitan_qkv", config=tmp_path)
    found = ckpt_tools.open(tmp_path / "parted")
    fused = ckpt_tools.open(tmp_path / "dcp").state("layers.1.attention.qkv_linear.wqkv.weight", "exp_avg").numpy()
    rows = fused.reshape(2, 4, 4, 16)
    for part, name in ((rows[:, :2], "wq"), (rows[:, 2:3], "wk"), (rows[:, 3:], "wv")):
        state = found.state(f"layers.1.attention.qkv_linear.{name}.weight", "exp_avg").numpy()
        assert state.tobytes() == part.tobytes()
    ckpt_tools.convert(
        tmp_path / "parted", tmp_path / "back", to="dcp", recipe="torchtitan_qkv", inverse=True, config=tmp_path
    )
    ckpt_tools.diff(tmp_path / "dcp", tmp_path / "back")


def mapped(recipe: str, arrays: Arrays, config: dict[str, Any], *, inverse: bool = False) -> dict[str, NDArray[Any]]:
    manifest, store = stored(arrays)
    made, _ = apply_recipe(manifest, load_recipe(recipe, inverse=inverse), config)
    return {str(name): read(entry, store).view(np.float32) for name, entry in made.tensors.items()}


def both_ways(recipe: str, arrays: Arrays, config: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """What the recipe makes of the left side; the way back gives the same bits."""
    found = mapped(recipe, arrays, config)
    back = mapped(recipe, {StateKey(name): array for name, array in found.items()}, config, inverse=True)
    assert {name: array.tobytes() for name, array in back.items()} == {
        str(name): array.tobytes() for name, array in arrays.items()
    }
    return found


def same(found: NDArray[Any], wanted: NDArray[Any]) -> bool:
    return found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16, "head_dim": 4}


def paired(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows with the real parts of all pairs of a head before the imaginary ones, as Meta's conversion orders them."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(weight.shape)


def dense(prefix: str, layer: dict[str, tuple[int, ...]], ends: dict[str, tuple[int, ...]]) -> Arrays:
    names = {**ends, **{prefix + name: shape for name, shape in layer.items()}}
    return {key(name): numbers(*shape, seed=seed) for seed, (name, shape) in enumerate(names.items())}


TITAN = {
    "attention_norm.weight": (16,), "ffn_norm.weight": (16,), "attention.wo.weight": (16, 16),
    "feed_forward.w1.weight": (12, 16), "feed_forward.w2.weight": (16, 12), "feed_forward.w3.weight": (12, 16),
}  # fmt: skip
TITAN_ENDS = {"tok_embeddings.weight": (8, 16), "norm.weight": (16,)}


@pytest.mark.parametrize(
    ("head", "names"),
    [("output", "attention.{}"), ("lm_head", "attention.qkv_linear.{}"), ("lm_head", "attention.qkv_linear.wqkv")],
)
def test_spellings_of_torchtitan(head, names):
    """Those of before April 2026, of today, and of the months in which the three were one tensor on the disk."""
    shapes = {f"{names.format(x)}.weight": (16 if x == "wq" else 8, 16) for x in ("wq", "wk", "wv")}
    if names.endswith("wqkv"):
        shapes = {f"{names}.weight": (32, 16)}
    arrays = dense("layers.0.", {**TITAN, **shapes}, {**TITAN_ENDS, f"{head}.weight": (8, 16)})
    found = mapped("torchtitan_llama", arrays, HEADS)
    if names.endswith("wqkv"):
        fused = arrays[key(f"layers.0.{names}.weight")].reshape(2, 4, 4, 16)
        query, one_key, value = (part.reshape(-1, 16) for part in (fused[:, :2], fused[:, 2], fused[:, 3]))
    else:
        query, one_key, value = (arrays[key(f"layers.0.{names.format(x)}.weight")] for x in ("wq", "wk", "wv"))
    assert same(found["model.layers.0.self_attn.q_proj.weight"], paired(query, 4))
    assert same(found["model.layers.0.self_attn.k_proj.weight"], paired(one_key, 2))
    assert same(found["model.layers.0.self_attn.v_proj.weight"], value)
    assert same(found["lm_head.weight"], arrays[key(f"{head}.weight")])


@pytest.mark.parametrize("spelling", ["experts.w{}", "experts.w{}_{}", "routed_experts.inner_experts.w{}_{}"])
def test_spellings_of_torchtitans_experts(spelling):
    experts = {
        f"moe.{spelling.format(number, letters)}": (3, *shape)
        for number, letters, shape in ((1, "EFD", (5, 16)), (3, "EFD", (5, 16)), (2, "EDF", (16, 5)))
    }
    rest = {name: shape for name, shape in TITAN.items() if "feed_forward" not in name}
    attention = {f"attention.qkv_linear.{x}.weight": (16 if x == "wq" else 8, 16) for x in ("wq", "wk", "wv")} | {
        f"attention.{x}_norm.weight": (4,) for x in "qk"
    }
    arrays = dense("layers.0.", {**rest, **attention, **experts, "moe.router.gate.weight": (3, 16)}, TITAN_ENDS)
    found = mapped("torchtitan_qwen3_moe", arrays, {**HEADS, "num_experts": 3})
    for name, wanted in zip(experts, ("gate_proj", "up_proj", "down_proj"), strict=True):
        for expert in range(3):
            made = found[f"model.layers.0.mlp.experts.{expert}.{wanted}.weight"]
            assert same(made, arrays[key(f"layers.0.{name}")][expert])


@pytest.mark.parametrize("spelling", [
    ("routed_experts.inner_experts.mlp1_weight_EGD", "routed_experts.inner_experts.mlp2_weight_EDF"),
    ("experts.mlp1_weight", "experts.mlp2_weight"),
])  # fmt: skip
def test_torchtitans_gpt_oss_is_transposed(spelling):
    """The orientation of transformers is that of its MXFP4 files after dequantization, with the last axes exchanged."""
    first, second = spelling
    biases = {
        f"moe.{name.replace('weight', 'bias').replace('EGD', 'EG').replace('EDF', 'ED')}": shape
        for name, shape in ((first, (3, 10)), (second, (3, 16)))
    }
    layer = {name: shape for name, shape in TITAN.items() if "feed_forward" not in name}
    layer |= {
        "attention.wo.bias": (16,),
        "attention.sinks": (4,),
        f"moe.{first}": (3, 10, 16),
        f"moe.{second}": (3, 16, 5),
    }
    layer |= {"moe.router.gate.weight": (3, 16), "moe.router.gate.bias": (3,), **biases}
    for name, rows in (("wq", 16), ("wk", 8), ("wv", 8)):
        layer |= {f"attention.qkv_linear.{name}.weight": (rows, 16), f"attention.qkv_linear.{name}.bias": (rows,)}
    arrays = dense("layers.0.", layer, {**TITAN_ENDS, "lm_head.weight": (8, 16)})
    found = mapped("torchtitan_gpt_oss", arrays, HEADS)
    for name, wanted in ((first, "gate_up_proj"), (second, "down_proj")):
        made = found[f"model.layers.0.mlp.experts.{wanted}"]
        assert same(made, np.ascontiguousarray(arrays[key(f"layers.0.moe.{name}")].swapaxes(1, 2)))


P = "model.layers.0."


def test_olmo_cores_experts_are_below_each_other():
    block = "blocks.0.feed_forward_moe."
    layer = {f"attention.{name}.weight": (16, 16) for name in ("w_q", "w_k", "w_v", "w_out")}
    layer |= {
        "attention_norm.weight": (16,),
        "feed_forward_norm.weight": (16,),
        "feed_forward_moe.router.weight": (48,),
    }
    layer |= {f"feed_forward_moe.experts.mlp.{name}": (48, 5) for name in ("w1", "w3")}
    layer |= {"feed_forward_moe.experts.mlp.w2": (15, 16)}
    ends = {"embeddings.weight": (8, 16), "lm_head.norm.weight": (16,), "lm_head.w_out.weight": (8, 16)}
    arrays = dense("blocks.0.", layer, ends)
    found = both_ways("olmo_core_flex_olmo", arrays, {**HEADS, "num_experts": 3})
    assert same(found[f"{P}mlp.gate.weight"], arrays[key(f"{block}router.weight")].reshape(3, 16))
    for number, name, rows in (("w1", "gate", 16), ("w3", "up", 16), ("w2", "down", 5)):
        stacked = arrays[key(f"{block}experts.mlp.{number}")].reshape(3, rows, -1)
        for expert in range(3):
            made = found[f"{P}mlp.experts.{expert}.{name}_proj.weight"]
            assert same(made, np.ascontiguousarray(stacked[expert].T))


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_nanotrons_rows(is_interleaved):
    layer = {"attn.qkv_proj.weight": (32, 16), "attn.o_proj.weight": (16, 16), "mlp.gate_up_proj.weight": (20, 16)}
    layer |= {
        "mlp.down_proj.weight": (16, 10),
        "input_layernorm.weight": (16,),
        "post_attention_layernorm.weight": (16,),
    }
    ends = {
        "model.token_position_embeddings.pp_block.token_embedding.weight": (8, 16),
        "model.final_layer_norm.pp_block.weight": (16,),
        "model.lm_head.pp_block.weight": (8, 16),
    }
    arrays = dense("model.decoder.0.pp_block.", layer, ends)
    found = both_ways(f"nanotron_llama{'_interleaved' if is_interleaved else ''}", arrays, HEADS)
    rows = arrays[key("model.decoder.0.pp_block.attn.qkv_proj.weight")]
    query, one_key = rows[:16], rows[16:24]
    if is_interleaved:
        query, one_key = paired(query, 4), paired(one_key, 2)
    for name, wanted in (("q", query), ("k", one_key), ("v", rows[24:])):
        assert same(found[f"{P}self_attn.{name}_proj.weight"], wanted)
    both = arrays[key("model.decoder.0.pp_block.mlp.gate_up_proj.weight")]
    assert same(found[f"{P}mlp.gate_proj.weight"], both[:10])
    assert same(found[f"{P}mlp.up_proj.weight"], both[10:])
