"""Meta's consolidated.NN.pth against numpy and torch, and into transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import ckpt_tools
from ckpt_tools.errors import DifferenceError, IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.meta.params import build_params_json

HEADS, GROUPS, WIDTH, HIDDEN, TOKENS = 4, 2, 32, 48, 40
COLUMNS = ("wo", "w2")
CONFIG: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
}


def model() -> dict[str, Tensor]:
    rows = {"wq": WIDTH, "wk": WIDTH // HEADS * GROUPS, "wv": WIDTH // HEADS * GROUPS, "wo": WIDTH}
    torch.manual_seed(0)
    found = {"tok_embeddings.weight": torch.randn(TOKENS, WIDTH), "rope.freqs": torch.randn(4)}
    for layer in range(2):
        found |= {f"layers.{layer}.attention.{name}.weight": torch.randn(size, WIDTH) for name, size in rows.items()}
        mlp = {"w1": (HIDDEN, WIDTH), "w2": (WIDTH, HIDDEN), "w3": (HIDDEN, WIDTH)}
        found |= {f"layers.{layer}.feed_forward.{name}.weight": torch.randn(shape) for name, shape in mlp.items()}
        found |= {f"layers.{layer}.{name}.weight": torch.randn(WIDTH) for name in ("attention_norm", "ffn_norm")}
    found |= {"norm.weight": torch.randn(WIDTH), "output.weight": torch.randn(TOKENS, WIDTH)}
    return {name: tensor.bfloat16() for name, tensor in found.items()}


def cut(weights: dict[str, Tensor], ranks: int, embedding: int) -> list[dict[str, Tensor]]:
    """The parts as Meta's parallel layers have them."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
    for name, tensor in weights.items():
        axis = embedding if name.startswith("tok") else int(name.split(".")[-2] in COLUMNS)
        pieces = [tensor] * ranks if tensor.dim() == 1 else tensor.chunk(ranks, axis)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece.clone()
    return parts


def write(folder: Path, parts: list[dict[str, Tensor]], **params: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, part in enumerate(parts):
        torch.save(part, folder / f"consolidated.{rank:02d}.pth")
    sizes = {"dim": WIDTH, "n_layers": 2, "n_heads": HEADS, "n_kv_heads": GROUPS, "vocab_size": -1}
    (folder / "params.json").write_text(json.dumps({**sizes, **params}))
    return folder


def paired(weight: Tensor, heads: int) -> bytes:
    """Rows of query or key with the real parts of all pairs of a head before the imaginary ones."""
    array = weight.view(torch.int16).numpy()
    pairs = array.reshape(heads, -1, 2, array.shape[1])
    return np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).tobytes()


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize(("ranks", "embedding"), [(1, 0), (2, 0), (4, 1)])
def test_files_of_ranks_are_one_model_for_transformers(ranks, embedding, card, tmp_path):
    weights = model()
    source = write(tmp_path / "meta", cut(weights, ranks, embedding))
    config = tmp_path / "config"
    LlamaConfig(**CONFIG, tie_word_embeddings=False, architectures=["LlamaForCausalLM"]).save_pretrained(config)
    ckpt_tools.convert(source, tmp_path / "hub", to="safetensors", recipe="meta_llama", config=config)
    found, told = LlamaForCausalLM.from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not any(told.values()), told
    state = found.state_dict()
    for layer in range(2):
        ours, theirs = f"layers.{layer}.attention.", f"model.layers.{layer}.self_attn."
        assert bits(state[f"{theirs}q_proj.weight"]) == paired(weights[f"{ours}wq.weight"], HEADS)
        assert bits(state[f"{theirs}k_proj.weight"]) == paired(weights[f"{ours}wk.weight"], GROUPS)
        assert bits(state[f"{theirs}v_proj.weight"]) == bits(weights[f"{ours}wv.weight"])
        down = f"model.layers.{layer}.mlp.down_proj.weight"
        assert bits(state[down]) == bits(weights[f"layers.{layer}.feed_forward.w2.weight"])
    assert bits(state["model.embed_tokens.weight"]) == bits(weights["tok_embeddings.weight"])
    ckpt_tools.convert(tmp_path / "hub", tmp_path / "back", to="meta", recipe="meta_llama", inverse=True)
    back = torch.load(tmp_path / "back/consolidated.00.pth", weights_only=True)
    del weights["rope.freqs"]
    assert {name: bits(tensor) for name, tensor in back.items()} == {name: bits(weights[name]) for name in weights}
    told = "tiny llama", "names and shapes; numpy says where the rows of Meta's conversion are"
    card("meta_llama", ["transformers"], *told, way="both")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_files_are_written_for_ranks(ranks, tmp_path):
    weights = model()
    source = write(tmp_path / "meta", cut(weights, 2, 0))
    ckpt_tools.convert(source, tmp_path / "out", to="meta", world_size=ranks)
    for rank, part in enumerate(cut(weights, ranks, 1 if ranks > 1 else 0)):
        found = torch.load(tmp_path / f"out/consolidated.{rank:02d}.pth", weights_only=True)
        assert {name: bits(each) for name, each in found.items()} == {name: bits(each) for name, each in part.items()}
    assert ckpt_tools.verify(source, tmp_path / "out").equal


@pytest.mark.parametrize(
    ("dim", "width"), [(4096, 11008), (4096, 14336), (8192, 28672), (2048, 8192), (3072, 8192), (5120, 13824), (32, 47)]
)
def test_params_json_gives_the_width_of_the_feed_forward(dim, width, tmp_path):
    """By the computation of Meta's FeedForward."""
    weights = model()
    source = write(tmp_path / "meta", cut(weights, 1, 0))
    config = {**CONFIG, "hidden_size": dim, "intermediate_size": width, "rms_norm_eps": 1e-5, "model_type": "llama"}
    rope = {"rope_theta": 500000.0, "rope_type": "llama3"}
    (source / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    ckpt_tools.convert(source, tmp_path / "out", to="meta")
    params = json.loads((tmp_path / "out/params.json").read_text())
    hidden = int(2 * (4 * params["dim"]) / 3)
    if (factor := params.get("ffn_dim_multiplier")) is not None:
        hidden = int(factor * hidden)
    multiple = params["multiple_of"]
    assert multiple * ((hidden + multiple - 1) // multiple) == width
    assert (params["n_heads"], params["n_kv_heads"], params["n_layers"], params["vocab_size"]) == (4, 2, 2, TOKENS)
    assert (params["norm_eps"], params["rope_theta"], params["use_scaled_rope"]) == (1e-5, 500000.0, True)


@pytest.mark.parametrize("size", [0, -1, 10**400, 0.5, None, "32"])
@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_attention_heads"])
def test_params_json_is_not_made_of_sizes_that_no_model_has(key, size):
    made = build_params_json({**CONFIG, key: size})
    assert made is None or (key == "intermediate_size" and "multiple_of" not in json.loads(made))


def without(rank: int, folder: Path) -> None:
    (folder / f"consolidated.{rank:02d}.pth").unlink()


def changed(name: str, value: Tensor | None, folder: Path) -> None:
    path = folder / "consolidated.01.pth"
    part = torch.load(path, weights_only=True)
    part.pop(name, None)
    torch.save(part if value is None else {**part, name: value}, path)


QUERY = "layers.0.attention.wq.weight"


class TestRefusals:
    @pytest.mark.parametrize(
        ("damage", "error", "message"),
        [
            (lambda folder: without(1, folder), IncompleteError, "consolidated.01.pth is missing"),
            (lambda folder: without(3, folder), IncompleteError, "24 rows in 3 files, and all heads have 32"),
            (lambda folder: changed("norm.weight", None, folder), MalformedError, "do not hold the same tensors"),
            (lambda folder: changed(QUERY, torch.zeros(9, WIDTH), folder), MalformedError, "in different shapes"),
            (lambda folder: (folder / "params.json").write_text("[]"), MalformedError, "not a JSON object"),
        ],
    )
    def test_what_is_not_whole(self, damage, error, message, tmp_path):
        source = write(tmp_path / "meta", cut(model(), 4, 0))
        damage(source)
        with pytest.raises(error, match=message):
            ckpt_tools.convert(source, tmp_path / "out", to="dcp")
        assert not (tmp_path / "out").exists()

    def test_norms_of_ranks_that_differ(self, tmp_path):
        parts = cut(model(), 2, 0)
        parts[1]["layers.1.ffn_norm.weight"][3] += 1
        source = write(tmp_path / "meta", parts)
        with pytest.raises(DifferenceError, match=r"layers\.1\.ffn_norm\.weight of consolidated\.00\.pth and of"):
            ckpt_tools.convert(source, tmp_path / "out", to="dcp")

    def test_names_that_are_not_llamas(self, tmp_path):
        parts = [{**part, "layers.0.feed_forward.experts.0.v1": torch.zeros(2, 2)} for part in cut(model(), 2, 0)]
        with pytest.raises(UnsupportedError, match="none of Llama's, so it is not known how ranks cut it"):
            ckpt_tools.inspect(write(tmp_path / "meta", parts))
        ckpt_tools.inspect(write(tmp_path / "one", parts[:1], head_dim=4))

    def test_columns_that_cannot_be_cut(self, tmp_path):
        source = write(tmp_path / "meta", cut(model(), 1, 0))
        with pytest.raises(UnsupportedError, match="its 32 columns cannot be cut evenly for 3 ranks"):
            ckpt_tools.convert(source, tmp_path / "out", to="meta", world_size=3)
