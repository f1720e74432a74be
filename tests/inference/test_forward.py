"""``verify-forward``: numbers as numpy computes them from transformers' own models, and faults at their layers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import CkptError, FormatError, UnsupportedError, UsageError
from inference.forward.__main__ import main
from inference.forward.compare import compare_forward, draw_inputs
from inference.forward.report import DifferenceLimits, LayerOutputs, make_report
from inference.models.options import TensorOptions
from tests.inference import tiny_models
from tests.support.quantized import fp8_model
from tests.test_json import SCHEMAS

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("forward") / "hub"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)).save_pretrained(folder)
    return folder


def changed(hub: Path, out: Path, name: str, change) -> Path:
    """A copy with one tensor changed."""
    shutil.copytree(hub, out)
    tensors = load_file(out / "model.safetensors")
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [*map(str, words), "--device=cpu"])


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_numbers_are_those_of_transformers_own_models(hub, tmp_path):
    other = changed(hub, tmp_path / "other", "model.layers.1.mlp.down_proj.weight", lambda each: each * 3)
    models = [transformers.AutoModelForCausalLM.from_pretrained(each).eval() for each in (hub, other)]
    ids = draw_inputs(models[0])["input_ids"]
    assert ids.shape == (4, 32) and 0 <= int(ids.min()) < int(ids.max()) < SIZES["vocab_size"]
    with torch.no_grad():
        answers = [model(ids, output_hidden_states=True) for model in models]
    a, b = (answer.logits.numpy().astype(np.float64).reshape(-1, SIZES["vocab_size"]) for answer in answers)
    p, q = log_softmax(a), log_softmax(b)
    kl = (np.exp(p) * (p - q)).sum(-1)
    report = compare_forward(hub, other)
    assert report.noise == 0
    assert (report.kl_mean, report.kl_p95) == pytest.approx((kl.mean(), np.quantile(kl, 0.95)), rel=1e-9)
    cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    assert report.cosine == pytest.approx(cosine.mean(), rel=1e-9)
    assert report.top_1 == (a.argmax(-1) == b.argmax(-1)).mean()
    for found, first, second in zip(report.layers, *(each.hidden_states for each in answers), strict=True):
        first, second = first.numpy().astype(np.float64), second.numpy().astype(np.float64)
        relative = np.linalg.norm(first - second, axis=-1) / np.linalg.norm(first, axis=-1)
        assert found.largest == np.abs(first - second).max()
        assert found.relative == pytest.approx(relative.max(), rel=1e-9)
    assert [each.relative > 0 for each in report.layers] == [False, False, True, True]


def permuted(weight: torch.Tensor) -> torch.Tensor:
    """The heads of a query in the opposite order."""
    return weight.reshape(4, 8, 32).flip(0).reshape(32, 32)


FAULTS = {
    "a scaled weight": ("model.layers.1.self_attn.v_proj.weight", lambda each: each * 4, "layer 1"),
    "exchanged heads": ("model.layers.0.self_attn.v_proj.weight", permuted, "layer 0"),
    "rows of embeddings": ("model.embed_tokens.weight", lambda each: each.roll(1, 0), "embeddings"),
    "another norm": ("model.norm.weight", lambda each: each * 2, "layer 2"),
    "no head": ("lm_head.weight", torch.zeros_like, "logits"),
    "NaN": ("model.layers.2.mlp.up_proj.weight", lambda each: each.fill_(torch.nan), "layer 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_at_its_layer(fault, hub, tmp_path):
    name, change, layer = FAULTS[fault]
    other = changed(hub, tmp_path / "other", name, change)
    report = compare_forward(hub, other)
    assert not report.same and report.reasons[0].startswith(layer), report
    done = run(hub, other)
    assert done.exit_code == 6 and f"too different in {layer}" in done.output
    printed = json.loads(run(hub, other, "--json").output, parse_constant=pytest.fail)
    assert list(printed) == SCHEMAS["verify-forward"] and printed["reasons"] == list(report.reasons)


def test_wrong_sizes_in_config_json_show_too(hub, tmp_path):
    """Rotary embeddings of another base: the tensors are the same bits."""
    shutil.copytree(hub, tmp_path / "other")
    config = json.loads((hub / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 2.0
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    assert ckpt_tools.verify(hub / "model.safetensors", tmp_path / "other/model.safetensors").equal
    report = compare_forward(hub, tmp_path / "other", limits=DifferenceLimits(0.0, 0.0))
    assert report.reasons[0].startswith("layer 0")


def test_sharded_checkpoints_of_any_layout_behave_alike_to_the_bit(hub, tmp_path):
    ckpt_tools.convert(hub, tmp_path / "dcp", to="dcp", world_size=2)
    ckpt_tools.convert(hub, tmp_path / "meta", to="meta", recipe="meta_llama", inverse=True)
    exact = DifferenceLimits(0.0, 0.0)
    report = compare_forward(tmp_path / "dcp", hub, reading=TensorOptions(config=hub), limits=exact)
    assert report.same and report.kl_mean == 0 and all(each.largest == 0 for each in report.layers)
    meta = TensorOptions(recipe="meta_llama", config=hub)
    assert compare_forward(tmp_path / "meta", hub, reading=meta, limits=exact).same
    assert compare_forward(hub, tmp_path / "dcp", reading=TensorOptions(config=hub), limits=exact).same
    done = run(tmp_path / "meta", hub, "--recipe=meta_llama", f"--config={hub}", "--max-kl=0", "--max-difference=0")
    assert done.exit_code == 0, done.output
    assert done.output.endswith("both behave alike, within the limits\n")


def test_fp8_is_within_the_default_limits_and_not_the_same(tmp_path):
    fp8 = fp8_model(tmp_path / "fp8")
    torch.manual_seed(0)
    config = json.loads((fp8 / "config.json").read_text())
    del config["quantization_config"]
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config)).bfloat16().save_pretrained(tmp_path / "bf16")
    report = compare_forward(tmp_path / "bf16", fp8)
    assert report.same and report.layers[-1].relative > 0
    assert report.layers[0].largest == 0, "embeddings are not quantized"
    assert not compare_forward(tmp_path / "bf16", fp8, limits=DifferenceLimits(max_difference=1e-3)).same


def test_images_and_classes_of_transformers_are_compared_too(tmp_path):
    first = tiny_models.save_image_model(tmp_path / "first")
    second = tiny_models.save_image_model(tmp_path / "second", seed=1)
    report = compare_forward(first, first)
    assert report.inputs == "pixel_values [4, 3, 32, 32]" and report.same and len(report.layers) == 3
    assert not compare_forward(first, second).same
    labels = tiny_models.save_text_model(tmp_path / "labels")
    assert compare_forward(labels, labels, limits=DifferenceLimits(0.0, 0.0)).same


def refused(hub: Path, other: Path, kind: type[CkptError], said: str) -> None:
    with pytest.raises(kind, match=said):
        compare_forward(hub, other)
    done = run(hub, other)
    assert done.exit_code == kind.exit_code and done.output.splitlines()[-1].startswith("Error: ")


def test_what_cannot_be_compared_is_refused(hub, tmp_path):
    def copy(name: str, **entries: object) -> Path:
        shutil.copytree(hub, tmp_path / name)
        config = {**json.loads((hub / "config.json").read_text()), **entries}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return tmp_path / name

    refused(hub, copy("words", vocab_size=97), UsageError, "vocab_size in config.json is 96 and 97")
    refused(hub, copy("kind", architectures=["MistralForCausalLM"]), UsageError, "architectures in config.json")
    timm = copy("timm")
    (timm / "config.json").write_text('{"architecture": "vit_tiny_patch16_224"}')
    refused(timm, timm, UnsupportedError, "'vit_tiny_patch16_224'; only models of transformers")
    bare = copy("bare")
    (bare / "config.json").unlink()
    refused(hub, bare, FormatError, "no config.json beside .*--config")
    lacking = copy("lacking")
    tensors = load_file(hub / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, lacking / "model.safetensors")
    refused(hub, lacking, FormatError, r"model\.norm\.weight")
    nan = changed(hub, tmp_path / "nan", "model.norm.weight", lambda each: each * torch.nan)
    refused(nan, hub, FormatError, "computes NaN")
    assert run(hub, hub, "--max-kl=nan").exit_code == 2
    assert run(hub, tmp_path / "none").exit_code == 3
    with pytest.raises(UnsupportedError, match="T5ForConditionalGeneration is not a model of tokens"):
        draw_inputs(transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=9, d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8)))  # fmt: skip


def test_vectors_of_zeros_and_limits_at_their_edge():
    zeros, ones = (LayerOutputs((each,), torch.zeros(1, 2)) for each in (torch.zeros(1, 1, 2), torch.ones(1, 1, 2)))
    assert make_report("M", "", zeros, zeros, zeros, DifferenceLimits(0, 0)).layers[0].relative == 0
    assert make_report("M", "", zeros, zeros, ones, DifferenceLimits()).layers[0].relative == float("inf")
    assert make_report("M", "", ones, zeros, zeros, DifferenceLimits(9, 1.0)).noise == 1
    assert make_report("M", "", ones, ones, zeros, DifferenceLimits(9, 1.0)).layers[0].relative == 1.0
    with pytest.raises(FormatError, match="of the shapes"):
        make_report("M", "", ones, ones, LayerOutputs((torch.ones(1, 1, 2),), torch.zeros(1, 3)), DifferenceLimits())
