"""``--fill`` and ``--drop``: numpy and the source's own bytes are the judge of what is written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import CkptError, DifferenceError, UnsupportedError, UsageError
from tests.support.commands import run_command

ODD = np.array([0x7FC01234, 0x80000000, 0x3F800000, 0x00000001], np.uint32).view(np.float32)
"""A NaN with a payload, -0.0, 1 and the smallest number."""
BODY = {"model.layers.0.w": np.arange(12, dtype=np.float32).reshape(3, 4), "model.norm": ODD}
TOWER = {"vision_tower.layers.0.w": np.tile(ODD, (2, 1)), "vision_tower.norm": np.ones(2, np.float32)}
MTP = {"model.layers.1.w": np.full((3, 4), 7, np.float32)}


def bits(tensors: dict[str, np.ndarray]) -> dict[str, tuple[Any, ...]]:
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in tensors.items()}


@pytest.fixture
def places(tmp_path):
    save_file(BODY, tmp_path / "src.safetensors")
    save_file({name: array + 1 for name, array in BODY.items()} | TOWER | MTP, tmp_path / "ref.safetensors")
    return tmp_path


@pytest.mark.parametrize("to", ["safetensors", "dcp", "torch", "npz"])
def test_what_the_output_lacks_is_taken_and_nothing_else(places, to):
    ref, out = places / f"ref.{to}", places / f"out.{to}"
    if to != "safetensors":
        ckpt_tools.convert(places / "ref.safetensors", ref, to=to)
    report = ckpt_tools.convert(places / "src.safetensors", out, to=to, fill=ref)
    assert ckpt_tools.verify(places / "src.safetensors", out, fill=ref).equal
    assert not ckpt_tools.verify(places / "src.safetensors", out).equal
    ckpt_tools.convert(out, places / "back.safetensors")
    assert bits(load_file(places / "back.safetensors")) == bits(BODY | TOWER | MTP)
    (note,) = (note for note in report.plan.notes if note.outcome.value == "filled")
    assert note.what == f"3 tensors from {ref}" and note.count == 3
    assert note.why == "model.layers.1.*, vision_tower.*"


def test_what_is_written_is_compared_with_both(places):
    ckpt_tools.convert(places / "src.safetensors", places / "out.safetensors", fill=places / "ref.safetensors")
    written = load_file(places / "out.safetensors")
    save_file(written | {"vision_tower.norm": np.zeros(2, np.float32)}, places / "out.safetensors")
    report = ckpt_tools.verify(places / "src.safetensors", places / "out.safetensors", fill=places / "ref.safetensors")
    assert [(each.key.fqn, each.aspect.value) for each in report.differences] == [("vision_tower.norm", "values")]


def test_names_after_a_recipe_are_filled_and_cast(places):
    (places / "recipe.toml").write_text(
        'others = "same"\n[[map]]\nleft = { "net.{any...}" = "..." }\nright = { "model.{any...}" = "..." }\n'
    )
    renamed = {name.replace("model.", "net."): array for name, array in BODY.items()}
    save_file(renamed, places / "own.safetensors")
    options: dict[str, Any] = {
        "recipe": places / "recipe.toml",
        "fill": places / "ref.safetensors",
        "dtype": "bfloat16",
        "exclude": ["vision_tower.norm"],
    }
    ckpt_tools.convert(places / "own.safetensors", places / "out.safetensors", **options)
    assert ckpt_tools.verify(places / "own.safetensors", places / "out.safetensors", **options).equal
    opened = ckpt_tools.open(places / "out.safetensors")
    assert {*opened} == {*BODY, *TOWER, *MTP} - {"vision_tower.norm"}
    for name in opened:
        expected = torch.from_numpy((BODY | TOWER | MTP)[name].copy()).bfloat16().float().numpy()
        found = opened[name].numpy().astype(np.float32)
        np.testing.assert_array_equal(found, expected)
        assert np.array_equal(np.signbit(found[found == 0]), np.signbit(expected[expected == 0]))


def test_like_says_what_is_needed(places):
    save_file(BODY | MTP, places / "like.safetensors")
    options: dict[str, Any] = {"like": places / "like.safetensors", "fill": places / "ref.safetensors"}
    with pytest.raises(UsageError, match=r"the source lacks model.layers.1.w"):
        ckpt_tools.convert(places / "src.safetensors", places / "out", like=places / "like.safetensors")
    ckpt_tools.convert(places / "src.safetensors", places / "out", **options)
    (written,) = (places / "out").glob("*.safetensors")
    assert bits(load_file(written)) == bits(BODY | MTP)
    assert ckpt_tools.verify(places / "src.safetensors", places / "out", **options).equal
    save_file(BODY | {"model.layers.1.w": np.zeros((3, 5), np.float32)}, places / "like.safetensors")
    with pytest.raises(UsageError, match=r"model.layers.1.w is \[3, 4\] in the source and \[3, 5\]"):
        ckpt_tools.convert(places / "src.safetensors", places / "other", **options)
    save_file(BODY, places / "like.safetensors")
    with pytest.raises(UsageError, match="has no weight that the output lacks"):
        ckpt_tools.convert(places / "src.safetensors", places / "other", **options)


def test_a_head_that_is_tied_is_not_taken_from_elsewhere(tmp_path):
    shared = torch.arange(6.0).reshape(3, 2)
    torch.save({"embed.weight": shared, "head.weight": shared, "v.weight": torch.ones(1, 2)}, tmp_path / "ref.pt")
    save_file({"embed.weight": np.ones((3, 2), np.float32)}, tmp_path / "src.safetensors")
    report = ckpt_tools.convert(tmp_path / "src.safetensors", tmp_path / "out.safetensors", fill=tmp_path / "ref.pt")
    assert {*load_file(tmp_path / "out.safetensors")} == {"embed.weight", "v.weight"}
    assert ("missing", "head.weight") in [(note.outcome.value, note.what) for note in report.plan.notes]
    # And if both are lacking, both are written, tied.
    save_file({"body.weight": np.ones((4, 4), np.float32)}, tmp_path / "src.safetensors")
    ckpt_tools.convert(tmp_path / "src.safetensors", tmp_path / "both.pt", fill=tmp_path / "ref.pt")
    both = torch.load(tmp_path / "both.pt")
    assert both["embed.weight"].data_ptr() == both["head.weight"].data_ptr()
    assert torch.equal(both["head.weight"], shared)


@pytest.mark.parametrize(
    ("tensors", "error", "said"),
    [
        (BODY, UsageError, "has no weight that the output lacks"),
        (TOWER | {"model.norm": np.ones(5, np.float32)}, UsageError,
            r"not of the same model: model.norm is \[4\] in the source and \[5\] there; like= says which"),
        ({f"module.x.{name}": array for name, array in BODY.items()} | TOWER, UsageError,
            "own weights under other names .*module.x.model.*recipe= or rename="),
        (BODY | {"q.weight": np.ones((4, 4), np.int8), "q.weight_scale": ODD}, UnsupportedError,
            "q.weight.* is quantized; convert it first, with dequantize=True"),
    ],
)  # fmt: skip
def test_what_is_no_reference_is_refused(places, tensors, error, said):
    save_file(tensors, places / "ref.safetensors")
    with pytest.raises(error, match=said):
        ckpt_tools.convert(places / "src.safetensors", places / "out.safetensors", fill=places / "ref.safetensors")
    assert not (places / "out.safetensors").exists()


def train(path: Path) -> dict[str, torch.Tensor]:
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 3), "tower": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    for module, width in ((model["body"], 4), (model["tower"], 2)):
        module(torch.randn(5, width)).square().sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return model.state_dict()


def test_moments_are_never_missing_in_silence(tmp_path):
    model = train(tmp_path / "run.pt")
    save_file({"head.weight": np.ones((2, 3), np.float32)}, tmp_path / "ref.safetensors")
    options: dict[str, Any] = {"to": "dcp", "fill": tmp_path / "ref.safetensors"}
    with pytest.raises(UsageError, match=r"has no optimizer state for head.weight; .*state='model'"):
        ckpt_tools.convert(tmp_path / "run.pt", tmp_path / "out", **options)
    ckpt_tools.convert(tmp_path / "run.pt", tmp_path / "out", state="model", **options)
    opened = ckpt_tools.open(tmp_path / "out")
    assert {*opened} == {*model, "head.weight"}
    assert np.array_equal(opened["body.weight"].numpy(), model["body.weight"].numpy())
    assert ckpt_tools.verify(tmp_path / "run.pt", tmp_path / "out", state="model", fill=options["fill"]).equal


@pytest.mark.parametrize("to", ["dcp", "zero2", "torch"])
def test_moments_go_with_the_weight_that_is_dropped(tmp_path, to):
    model = train(tmp_path / "run.pt")
    report = ckpt_tools.convert(tmp_path / "run.pt", tmp_path / "out", to=to, state="all", drop=["tower.*"])
    assert ckpt_tools.verify(tmp_path / "run.pt", tmp_path / "out", drop=["tower.*"]).equal
    assert not ckpt_tools.verify(tmp_path / "run.pt", tmp_path / "out").equal
    found = ckpt_tools.inspect(tmp_path / "out").tensors
    assert {row.name for row in found} == {"body.weight", "body.bias"}
    assert {row.slot for row in found} >= {"exp_avg", "exp_avg_sq"}
    (note,) = (note for note in report.plan.notes if note.outcome.value == "dropped" and "tower" in note.what)
    assert note.what == "8 tensors of tower.bias, tower.weight" and note.why == "drop='tower.*'"
    assert np.array_equal(ckpt_tools.open(tmp_path / "out")["body.weight"].numpy(), model["body.weight"].numpy())


def test_drop_names_the_source_and_exclude_the_output(places):
    names = {"rename": ["^model=net"]}
    (places / "recipe.toml").write_text(
        'others = "same"\n[[map]]\nleft = { "model.{any...}" = "..." }\nright = { "net.{any...}" = "..." }\n'
    )
    recipe = {"recipe": places / "recipe.toml"}
    src = places / "src.safetensors"
    for number, options in enumerate((names | {"drop": ["model.norm"]}, recipe | {"drop": ["model.norm"]},
                                      recipe | {"exclude": ["net.norm"]})):  # fmt: skip
        out = places / f"out{number}.safetensors"
        ckpt_tools.convert(src, out, **options)
        assert bits(load_file(out)) == bits({"net.layers.0.w": BODY["model.layers.0.w"]})
    for options in (recipe | {"drop": ["net.norm"]}, names | {"drop": ["net.norm"]}):
        with pytest.raises(UsageError, match=r"drop='net.norm' matches no tensor; the nearest"):
            ckpt_tools.convert(src, places / "none.safetensors", **options)
    with pytest.raises(UsageError, match="drop= leaves no tensor of the source"):
        ckpt_tools.convert(src, places / "none.safetensors", drop=["*"])


def test_what_is_dropped_can_be_filled(places):
    options: dict[str, Any] = {"drop": ["model.norm"], "fill": places / "ref.safetensors"}
    ckpt_tools.convert(places / "src.safetensors", places / "out.safetensors", **options)
    written = load_file(places / "out.safetensors")
    assert bits(written) == bits(BODY | TOWER | MTP | {"model.norm": BODY["model.norm"] + 1})
    assert ckpt_tools.verify(places / "src.safetensors", places / "out.safetensors", **options).equal


def test_a_quantized_weight_is_not_dropped_from_its_scale(tmp_path):
    tensors = {"q.weight": np.ones((4, 4), np.int8), "q.weight_scale": ODD, "b": ODD}
    save_file(tensors, tmp_path / "src.safetensors")
    with pytest.raises(UsageError, match=r"q.weight is quantized and needs q.weight_scale"):
        ckpt_tools.convert(tmp_path / "src.safetensors", tmp_path / "out.safetensors", drop=["q.weight_scale"])
    ckpt_tools.convert(tmp_path / "src.safetensors", tmp_path / "out.safetensors", drop=["q.*"])
    assert bits(load_file(tmp_path / "out.safetensors")) == bits({"b": ODD})


def test_on_the_command_line(places):
    given = [
        str(places / "src.safetensors"),
        str(places / "out.safetensors"),
        "--fill",
        str(places / "ref.safetensors"),
    ]
    done = run_command("convert", *given, "--drop", "model.norm")
    assert done.code == 0
    said = " ".join(done.out.split())
    assert f"filled: 4 tensors from {places / 'ref.safetensors'} (model.layers.1.*, model.norm, vision_tower.*)" in said
    assert "dropped: 1 tensor of model.norm (--drop model.norm)" in said
    assert run_command("verify", *given, "--drop", "model.norm").code == 0
    assert run_command("verify", *given).code == DifferenceError.exit_code
    done = run_command("verify", given[0], "--fill", given[1])
    assert done.code == 2 and "verify with DST" in done.err


def test_the_reference_is_not_written_into(places):
    with pytest.raises(CkptError):
        ckpt_tools.convert(
            places / "src.safetensors", places / "ref.safetensors", fill=places / "ref.safetensors", overwrite=True
        )


def test_a_head_that_the_reference_ties_is_the_sources_own(tmp_path):
    names = ("model.embed_tokens.weight", "lm_head.weight")
    (tmp_path / "like").mkdir()
    value = {"v.weight": np.ones((3, 2), np.float32)}
    save_file({name: np.zeros((6, 2), np.float32) for name in names} | value, tmp_path / "like" / "m.safetensors")
    (tmp_path / "like" / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 6, "tie_word_embeddings": true}'
    )
    save_file({name: np.ones((6, 2), np.float32) for name in names} | value, tmp_path / "ref.safetensors")
    own = np.arange(12, dtype=np.float32).reshape(6, 2)
    save_file({names[0]: own}, tmp_path / "src.safetensors")
    options: dict[str, Any] = {"like": tmp_path / "like", "fill": tmp_path / "ref.safetensors"}
    ckpt_tools.convert(tmp_path / "src.safetensors", tmp_path / "out", **options)
    (written,) = (tmp_path / "out").glob("*.safetensors")
    assert bits(load_file(written)) == bits({names[0]: own, names[1]: own} | value)
