"""``[[copy]]``: transformers and torch are the judges of what copies compute, and numpy of their bits."""

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import UnsupportedError, UsageError

UPCYCLE = """
others = "same"

[[map]]
left = "model.layers.{layer}.mlp.gate_proj.weight"
right = "model.layers.{layer}.mlp.w1.weight"

[[map]]
left = "model.layers.{layer}.mlp.down_proj.weight"
right = "model.layers.{layer}.mlp.w2.weight"

[[map]]
left = "model.layers.{layer}.mlp.up_proj.weight"
right = "model.layers.{layer}.mlp.w3.weight"

[[copy]]
left = "model.layers.{layer}.mlp.{part}.weight"
right = "model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight"
count = 4
"""
DEEPER = """
others = "same"

[[copy]]
left = "model.layers.{layer}.{rest...}"
right = "model.layers.{new}.{rest...}"
numbers = "0-2, 1-3"
"""
SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(12).reshape(2, 6)).logits


def test_an_upcycled_model_computes_what_the_dense_one_does(tmp_path):
    from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    dense = MistralForCausalLM(MistralConfig(**SIZES, num_hidden_layers=2))
    sparse = MixtralConfig(**SIZES, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2)
    dense.save_pretrained(tmp_path / "dense")
    MixtralForCausalLM(sparse).save_pretrained(tmp_path / "routers")
    (tmp_path / "upcycle.toml").write_text(UPCYCLE)
    options: dict[str, Any] = {
        "recipe": tmp_path / "upcycle.toml", "fill": tmp_path / "routers", "config": tmp_path / "routers"
    }  # fmt: skip
    report = ckpt_tools.convert(tmp_path / "dense", tmp_path / "out", to="safetensors", **options)
    assert ckpt_tools.verify(tmp_path / "dense", tmp_path / "out", **options).equal
    notes = {note.outcome.value: f"{note.what} ({note.why})" for note in report.plan.notes}
    assert notes["filled"].startswith("2 tensors from ") and "block_sparse_moe.gate" in notes["filled"]
    assert notes["kept"] == "6 copied tensors (written as 24 tensors; config.json is not changed for them)"
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(model) is MixtralForCausalLM and not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(logits(model), logits(dense), rtol=1e-5, atol=1e-6)


def test_a_deeper_model_has_its_layers_and_their_moments_bit_for_bit(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shallow = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=4))
    optimizer = torch.optim.AdamW(shallow.parameters())
    shallow(torch.arange(12).reshape(2, 6), labels=torch.arange(12).reshape(2, 6)).loss.backward()
    optimizer.step()
    torch.save({"model": shallow.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    (tmp_path / "deeper.toml").write_text(DEEPER)
    recipe = {"recipe": tmp_path / "deeper.toml"}
    ckpt_tools.convert(tmp_path / "run.pt", tmp_path / "out", to="dcp", **recipe)
    assert ckpt_tools.verify(tmp_path / "run.pt", tmp_path / "out", **recipe).equal
    made = ckpt_tools.open(tmp_path / "out")
    number = {0: 0, 1: 1, 2: 2, 3: 1, 4: 2, 5: 3}
    numbers = {name: index for index, (name, _) in enumerate(shallow.named_parameters())}
    deep = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=6))
    expected = {}
    for name in deep.state_dict():
        parts = name.split(".")
        old = ".".join([*parts[:2], str(number[int(parts[2])]), *parts[3:]]) if parts[1] == "layers" else name
        expected[name] = shallow.state_dict()[old]
        assert made[name].numpy().tobytes() == expected[name].numpy().tobytes()
        for slot in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state_dict()["state"][numbers[old]][slot]
            assert ckpt_tools.cat(tmp_path / "out", name, slot=slot).numpy().tobytes() == moment.numpy().tobytes()
    assert {*made} == {*expected}
    deep.load_state_dict(expected)
    ckpt_tools.convert(tmp_path / "out", tmp_path / "out.pt", state="model")
    loaded = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=6))
    loaded.load_state_dict(torch.load(tmp_path / "out.pt"))
    assert torch.equal(logits(loaded), logits(deep))


@pytest.fixture
def source(tmp_path):
    tensors = {f"l.{n}.w": np.array([0x7FC00001 + n, 0x80000000], np.uint32).view(np.float32) for n in range(3)}
    save_file({**tensors, "norm": np.ones(2, np.float32)}, tmp_path / "src.safetensors")
    return tmp_path / "src.safetensors"


def apply(source: Any, rules: str, *, inverse: bool = False) -> dict[str, bytes]:
    (source.parent / "r.toml").write_text(f'others = "same"\n{rules}')
    out = source.parent / "out.safetensors"
    ckpt_tools.convert(source, out, recipe=source.parent / "r.toml", inverse=inverse, overwrite=True)
    return {name: array.tobytes() for name, array in load_file(out).items()}


NUMBERED = '[[copy]]\nleft = "l.{i}.w"\nright = "l.{j}.w"\nnumbers = '


@pytest.mark.parametrize(("numbers", "expected"), [("2, 0-1", [2, 0, 1]), ("1", [1]), ("0,0,2", [0, 0, 2])])
def test_layers_are_reordered_left_out_and_repeated(source, numbers, expected):
    before = {name: array.tobytes() for name, array in load_file(source).items()}
    made = apply(source, f'{NUMBERED}"{numbers}"')
    assert made == {"norm": before["norm"]} | {f"l.{i}.w": before[f"l.{old}.w"] for i, old in enumerate(expected)}
    report = ckpt_tools.plan(source, source.parent / "new.safetensors", recipe=source.parent / "r.toml")
    dropped = [note.what for note in report.notes if note.outcome.value == "dropped"]
    left_out = [f"l.{i}.w" for i in range(3) if i not in expected]
    assert dropped == ([f"{len(left_out)} tensor{'s' * (len(left_out) > 1)} of {', '.join(left_out)}"] * bool(left_out))


def test_check_shows_each_copy_with_its_source(source):
    apply(source, f'{NUMBERED}"2,2"')
    found = ckpt_tools.check_recipe(source.parent / "r.toml", source).tensors
    assert {each.name: each.sources for each in found} == {
        "l.0.w": ("l.2.w",), "l.1.w": ("l.2.w",), "norm": ("norm",)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (f'{NUMBERED}"0-3"', "no tensor has the i 3"),
        (f'{NUMBERED}"2-0"', "is not a list of at most"),
        (f'{NUMBERED}"0-99999999"', "is not a list of at most"),
        (f'{NUMBERED}""', "is not a list of at most"),
        (f'{NUMBERED}"0"\ncount = 1', "has either count or numbers"),
        ('[[copy]]\nleft = "l.{i}.w"\nright = "l.{i}.v"\ncount = 2', "right has one variable more"),
        ('[[copy]]\nleft = "l.{i}.w"\nright = "l.{j}.w"\ncount = 2', "left has none"),
        ('[[copy]]\nleft = "x.{i}"\nright = "y.{i}.{j}"\ncount = 2', "matches no tensor"),
        ('[[copy]]\nleft = "norm"\nright = "l.{j}.w"\ncount = 2', r"makes l\.0\.w of .* names must stay distinct"),
        ('[[copy]]\nleft = "norm"\nright = "n.{j}"\ncount = 0', "count = 0 is not a whole number"),
        ('[[copy]]\nleft = "norm"\nright = "n.{j}"\ncount = 2\ntimes = 3', "copy]] has no key 'times'"),
        ('[copy]\nleft = "norm"', "copy is not a list of tables"),
        ("", "needs at least one .*map.*, .*copy.* or .*grow"),
    ],
)
def test_rules_that_are_none_are_refused(source, rules, said):
    with pytest.raises(UsageError, match=said):
        apply(source, rules)


def test_copies_have_no_way_back(source):
    with pytest.raises(UsageError, match="inverse=True: the recipe r copies or grows tensors, and has no way back"):
        apply(source, f'{NUMBERED}"0"', inverse=True)


def test_a_quantized_weight_is_copied_with_its_scale(tmp_path):
    tensors = {"l.0.weight": np.ones((4, 4), np.int8), "l.0.weight_scale": np.ones(4, np.float32)}
    save_file(tensors, tmp_path / "src.safetensors")
    with pytest.raises(
        UnsupportedError, match=r"l.0.weight is quantized, and copying would part it from l.0.weight_sc"
    ):
        apply(tmp_path / "src.safetensors", NUMBERED.replace(".w", ".weight") + '"0,0"')
    made = apply(tmp_path / "src.safetensors", NUMBERED.replace("w", "{rest...}") + '"0,0"')
    assert {*made} == {f"l.{i}.weight{scale}" for i in range(2) for scale in ("", "_scale")}


def test_a_tied_tensor_is_not_copied(tmp_path):
    shared = torch.ones(2, 2)
    torch.save({"a.0.w": shared, "b": shared, "c": torch.zeros(1)}, tmp_path / "src.pt")
    (tmp_path / "r.toml").write_text(
        'others = "same"\n[[copy]]\nleft = "a.{i}.w"\nright = "a.{j}.w"\nnumbers = "0,0"\n'
    )
    with pytest.raises(UnsupportedError, match=r"is tied to .*a tensor that is tied is not copied"):
        ckpt_tools.convert(tmp_path / "src.pt", tmp_path / "out.pt", recipe=tmp_path / "r.toml")
