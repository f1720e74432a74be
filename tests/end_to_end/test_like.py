"""``--like FOLDER``: trained models of transformers come out in the names, shapes, dtypes and files of a reference.

The judge is transformers itself: ``from_pretrained`` reports nothing missing or unexpected, and logits are those of the
trained model to the bit.
"""

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from click.testing import CliRunner
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import ckpt_tools
from ckpt_tools.cli.main import group
from ckpt_tools.core.option_names import use_command_line_spelling
from ckpt_tools.errors import CkptError, IncompleteError, UsageError
from tests.support.s3_server import BUCKET
from tests.support.sweep import tiered
from tests.support.trees import assert_same_tree

V = 50
TEXT: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.5,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
    "deepseek_v3": {**EXPERTS, **LATENT},
}
TOKENS = torch.arange(12).reshape(2, 6)
INDEX = "model.safetensors.index.json"


def built(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**TEXT, **FAMILIES[family], **more})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_()
    return model.eval()


def trained(model: Any) -> torch.optim.Optimizer:
    """Two steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def save_dcp(tensors: Mapping[str, torch.Tensor], folder: Path, **more: Any) -> Path:
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": dict(tensors), **more}, checkpoint_id=folder, no_dist=True)
    return folder


def loaded_dcp(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


@torch.no_grad()
def logits_in(folder: Path) -> torch.Tensor:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype="auto"
    )
    assert not any(report.values()), report
    return model.eval()(TOKENS).logits


@torch.no_grad()
def assert_same_logits(folder: Path, model: Any) -> None:
    assert torch.equal(logits_in(folder), model(TOKENS).logits)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert_same_tree(dict(wanted), dict(found))


@pytest.mark.parametrize("family", tiered(FAMILIES, ["llama", "qwen3_moe", "deepseek_v3"], ["qwen2"]))
def test_a_trained_model_comes_out_as_save_pretrained_writes_it(family, tmp_path):
    model = built(family)
    optimizer = trained(model)
    state = save_dcp(model.state_dict(), tmp_path / "dcp", optim=get_optimizer_state_dict(model, optimizer))
    # The reference is another model of the family, in bf16: its bits must be nowhere in the output.
    ref, out = tmp_path / "ref", tmp_path / "out"
    built(family, dtype=torch.bfloat16, seed=1).save_pretrained(ref, max_shard_size="8KB")
    ckpt_tools.convert(state, out, like=ref)

    half = built(family, dtype=torch.bfloat16)
    half.load_state_dict(model.state_dict())
    assert_same_logits(out, half)
    half.save_pretrained(tmp_path / "saved", max_shard_size="8KB")
    assert_same(tensors_in(out), tensors_in(tmp_path / "saved"))
    assert {path.name for path in ref.iterdir()} == {path.name for path in out.iterdir()}
    maps = [json.loads((folder / INDEX).read_text())["weight_map"] for folder in (out, ref)]
    assert maps[0] == maps[1] and len(set(maps[0].values())) > 1
    assert ckpt_tools.verify(state, out, like=ref).equal


@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("zero3-bf16", marks=pytest.mark.extended)])
def test_states_of_several_ranks_follow(kind, checkpoint, tmp_path):
    """Awkward tensors in real shards, to a reference of other files, another order and one other dtype."""
    made, ref = checkpoint(kind, "awkward", 3).checkpoint, tmp_path / "ref"
    ckpt_tools.convert(made, tmp_path / "plain", to="safetensors", dtype="bfloat16")
    tensors = dict(sorted(tensors_in(tmp_path / "plain").items(), reverse=True))
    name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16 and tensor.numel())
    ref.mkdir()
    files = {each: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, each in enumerate(tensors)}
    for file in set(files.values()):
        part = {each: tensor.float() if each == name else tensor for each, tensor in tensors.items()}
        safetensors.torch.save_file({each: part[each] for each in part if files[each] == file}, ref / file)
    (ref / INDEX).write_text(json.dumps({"weight_map": files}))
    ckpt_tools.convert(made, tmp_path / "out", like=ref)
    found = tensors_in(tmp_path / "out")
    assert found[name].dtype == torch.float32
    assert_same(found | {name: found[name].bfloat16()}, tensors)
    assert json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"] == files
    for to in ("safetensors", "dcp"):
        ckpt_tools.convert(made, tmp_path / to, to=to, like=ref)
        assert ckpt_tools.verify(made, tmp_path / to, like=ref).equal


@pytest.mark.parametrize("to", ["torch", "zero3"])
def test_moments_follow_in_a_format_of_whole_states(to, tmp_path):
    """Fused experts of a hub folder's model, and the way back by a reference with live names."""
    model = built("qwen3_moe")
    optimizer = trained(model)
    live = save_dcp(model.state_dict(), tmp_path / "live", optim=get_optimizer_state_dict(model, optimizer))
    model.save_pretrained(tmp_path / "hub")
    more = {"world_size": 2} if to == "zero3" else {"state": "all"}
    ckpt_tools.convert(live, tmp_path / "out", to=to, like=tmp_path / "hub", **more)
    ckpt_tools.convert(tmp_path / "out", tmp_path / "back", to="dcp", like=live, rename=[])
    assert ckpt_tools.verify(live, tmp_path / "back").equal


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_padded_vocabulary_is_cropped(family, tmp_path):
    model = built(family)
    model.save_pretrained(tmp_path / "ref")
    tensors = model.state_dict()
    for name in tensors:
        if "embed_tokens" in name or "lm_head" in name:
            tensors[name] = torch.cat([tensors[name], torch.full((14, tensors[name].shape[1]), 7.0)])
    state = save_dcp(tensors, tmp_path / "dcp")
    report = ckpt_tools.convert(state, tmp_path / "out", like=tmp_path / "ref", strict=True)
    assert_same_logits(tmp_path / "out", model)
    assert_same(tensors_in(tmp_path / "out"), tensors_in(tmp_path / "ref"))
    assert "model.embed_tokens.weight, rows 50 to 63" in [note.what for note in report.plan.notes]


def test_rows_that_the_source_lacks_are_zeros(tmp_path):
    model = built("llama")
    built("llama", vocab_size=V + 14).save_pretrained(tmp_path / "ref")
    ckpt_tools.convert(save_dcp(model.state_dict(), tmp_path / "dcp"), tmp_path / "out", like=tmp_path / "ref")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        found = tensors_in(tmp_path / "out")[name]
        assert torch.equal(found[:V], model.state_dict()[name]) and not found[V:].any()


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_a_live_tie_is_given_again(to, tmp_path):
    """A state dict in one file holds the head as another name of the embeddings, which the hub's folder does not."""
    model = built("qwen2")
    model.save_pretrained(tmp_path / "hub")
    torch.save(model.state_dict(), tmp_path / "live.pt")
    out = tmp_path / ("out" if to == "dcp" else "out.pt")
    ckpt_tools.convert(tmp_path / "hub", out, to=to, like=tmp_path / "live.pt")
    found = loaded_dcp(model, out) if to == "dcp" else torch.load(out, weights_only=True)
    if to == "torch":
        assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()
    assert_same(found, model.state_dict())


def test_layers_that_one_side_has_alone_are_named_and_left_out_if_asked(tmp_path):
    """Those of multi-token prediction, in the source or in the reference."""
    model = built("deepseek_v3")
    for each in ("ref", "more"):
        model.save_pretrained(tmp_path / each)
    file = tmp_path / "more/model.safetensors"
    layer = {f"model.layers.2.{name}.weight": torch.ones(16) for name in ("enorm", "hnorm", "eh_proj")}
    safetensors.torch.save_file(tensors_in(file.parent) | layer, file, metadata={"format": "pt"})
    plain = save_dcp(model.state_dict(), tmp_path / "plain")
    for state, ref, said in (
        (save_dcp(model.state_dict() | layer, tmp_path / "dcp"), "ref",
         r"the reference lacks model\.layers\.2\.enorm\.weight, model\.layers\.2"),
        (plain, "more", r"the source lacks model\.layers\.2\.e.*; exclude= leaves out"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            ckpt_tools.convert(state, tmp_path / "out", like=tmp_path / ref)
        assert not (tmp_path / "out").exists()
        ckpt_tools.convert(state, tmp_path / f"out-{ref}", like=tmp_path / ref, exclude="model.layers.2.*")
        assert_same_logits(tmp_path / f"out-{ref}", model)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A trained state with live names, a reference with those of the hub, and the model."""
    folder = tmp_path_factory.mktemp("pair")
    model = built("qwen3_moe")
    model.save_pretrained(folder / "ref", max_shard_size="20KB")
    return save_dcp(model.state_dict(), folder / "dcp"), folder / "ref", model


def test_a_reference_on_s3(pair, s3, tmp_path):
    state, ref, model = pair
    prefix = s3.new_prefix()
    s3.upload(f"{prefix}ref/", ref)
    url = f"s3://{BUCKET}/{prefix}"
    ckpt_tools.convert(state, f"{url}out", like=f"{url}ref")
    (tmp_path / "out").mkdir()
    for name, data in s3.files(f"{prefix}out/").items():
        (tmp_path / "out" / name).write_bytes(data)
    assert_same_logits(tmp_path / "out", model)
    assert_same(tensors_in(tmp_path / "out"), tensors_in(ref))


def with_torch_files(ref: Path, folder: Path) -> None:
    ckpt_tools.convert(ref, folder, to="torch")


def with_configuration_alone(ref: Path, folder: Path) -> None:
    folder.mkdir()
    shutil.copy(ref / "config.json", folder)


@pytest.mark.parametrize("make", [with_torch_files, with_configuration_alone])
def test_references_of_other_files(make, pair, tmp_path):
    state, ref, model = pair
    make(ref, tmp_path / "ref")
    report = ckpt_tools.convert(state, tmp_path / "out", like=tmp_path / "ref")
    assert_same_logits(tmp_path / "out", model)
    if make is with_configuration_alone:
        assert any("qwen2_moe" in note.what for note in report.plan.notes)
        assert_same(tensors_in(tmp_path / "out"), tensors_in(ref))


@pytest.mark.parametrize("options", [{"max_shard_size": "1GB"}, {"recipe": "qwen2_moe"}], ids=str)
def test_options_win_over_the_reference(options, pair, tmp_path):
    state, ref, _ = pair
    report = ckpt_tools.convert(state, tmp_path / "out", like=ref, **options)
    assert getattr(report.plan.recipe, "name", None) == options.get("recipe")
    is_one = [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]
    assert is_one is ("max_shard_size" in options)
    assert_same(tensors_in(tmp_path / "out"), tensors_in(ref))


@pytest.mark.parametrize("form", ["module._orig_mod.{}", "model.{}", "_fsdp_wrapped_module.{}"])
def test_prefixes_of_wrapped_models_are_taken_off(form, pair, tmp_path):
    _, ref, model = pair
    state = save_dcp({form.format(name): tensor for name, tensor in model.state_dict().items()}, tmp_path / "dcp")
    ckpt_tools.convert(state, tmp_path / "out", like=ref)
    assert_same(tensors_in(tmp_path / "out"), tensors_in(ref))
    ckpt_tools.convert(state, tmp_path / "bare", to="dcp", strip="auto")
    assert set(ckpt_tools.open(tmp_path / "bare")) == set(model.state_dict())
    assert ckpt_tools.verify(state, tmp_path / "bare", strip="auto").equal
    assert ckpt_tools.diff(state, tmp_path / "bare", strip="auto").equal
    assert ckpt_tools.inspect(state).wrapping and not ckpt_tools.inspect(tmp_path / "bare").wrapping


def test_strip_auto_leaves_the_prefix_of_a_model_without_a_head(tmp_path):
    """All names of a tied model begin with ``model.``, which is a part of them."""
    tensors = {name: tensor for name, tensor in built("qwen2").state_dict().items() if name != "lm_head.weight"}
    assert all(name.startswith("model.") for name in tensors)
    state = save_dcp(tensors, tmp_path / "dcp")
    ckpt_tools.convert(state, tmp_path / "out", to="dcp", strip="auto")
    assert set(ckpt_tools.open(tmp_path / "out")) == set(tensors)
    assert not ckpt_tools.inspect(state).wrapping


def shown(*words: str | Path) -> list[str]:
    """The lines that a command prints."""
    with use_command_line_spelling():
        return CliRunner().invoke(group, [str(word) for word in words]).stdout.splitlines()


def test_inspect_says_whose_names_they_are(pair, tmp_path):
    state, ref, _ = pair
    assert ckpt_tools.inspect(ref).naming == "hub (qwen3_moe)"
    shutil.copytree(state, tmp_path / "dcp")
    shutil.copy(ref / "config.json", tmp_path / "dcp")
    wanted = "transformers 5 (qwen3_moe); --recipe qwen2_moe gives those of the hub"
    lines = shown("inspect", tmp_path / "dcp")
    assert [line for line in lines if line.startswith("names\t")] == [f"names\t{wanted}"]
    said = "transformers 5; like='FOLDER' gives those of the hub's model in FOLDER, and so does a recipe: one of "
    assert str(ckpt_tools.inspect(state).naming).startswith(said)
    built("llama").save_pretrained(tmp_path / "llama")
    assert ckpt_tools.inspect(tmp_path / "llama").naming == "hub (llama)"


def test_names_that_are_not_the_hubs(pair, tmp_path):
    """The first line after the figures says so, with the way to the hub's; ``from_pretrained`` is printed for names
    that it knows."""
    state, ref, _ = pair
    lines = shown("convert", state, tmp_path / "a", "--to", "hf", "--config", ref)
    said = "kept: names of tensors (those of transformers 5, which other loaders do not know; --like FOLDER gives those"
    assert lines[1].startswith(said) and any("from_pretrained" in line for line in lines)
    report = ckpt_tools.convert(state, tmp_path / "b", like=ref)
    assert not [note for note in report.notes if note.what == "names of tensors"]
    built("llama").save_pretrained(tmp_path / "llama")
    options: dict[str, Any] = {"recipe": "megatron_llama", "inverse": True, "config": tmp_path / "llama"}
    ckpt_tools.convert(tmp_path / "llama", tmp_path / "megatron.pt", **options)
    report = ckpt_tools.convert(tmp_path / "megatron.pt", tmp_path / "c", to="safetensors", config=tmp_path / "llama")
    assert "does not know these names: recipe='megatron_llama' gives those of the hub" in report.loading
    assert "from_pretrained(" not in report.loading
    assert "those of Megatron-Core, which from_pretrained does not know" in report.notes[0].why


BAD: list[tuple[dict[str, Any], type[CkptError], str]] = [
    ({"dtype": "float32"}, UsageError, "--dtype contradicts --like, which says the dtype of each weight; drop one"),
    ({"config": "/any"}, UsageError, "--config contradicts --like, which says where config.json comes from; drop one"),
    ({"like": "/no-such/none"}, CkptError, "there is no file or folder .*/none"),
    ({"strip": "student"}, UsageError, "--strip student is the prefix of no tensor; the nearest names are"),
    ({"recipe": "mixtral"}, UsageError, "does not fit: the source lacks .*experts"),
]


@pytest.mark.parametrize(("options", "error", "said"), BAD)
def test_bad_references_are_one_sentence(options, error, said, pair, tmp_path):
    state, ref, _ = pair
    with use_command_line_spelling(), pytest.raises(error, match=said) as caught:
        ckpt_tools.convert(state, tmp_path / "out", **{"like": ref, **options})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_another_model_is_one_sentence(pair, tmp_path):
    built("llama").save_pretrained(tmp_path / "other")
    with pytest.raises(UsageError, match=r"the reference lacks .*experts"):
        ckpt_tools.convert(pair[0], tmp_path / "out", like=tmp_path / "other")


def test_a_missing_expert_is_named(pair, tmp_path):
    """A checkpoint of one expert-parallel group alone."""
    _, ref, model = pair
    state = save_dcp(model.state_dict(), tmp_path / "live")
    hub = {name: tensor for name, tensor in tensors_in(ref).items() if ".experts.3." not in name}
    safetensors.torch.save_file(hub, tmp_path / "part.safetensors")
    shutil.copy(ref / "config.json", state)
    said = r"after recipe='qwen2_moe' inverse=True: .* lacks .*\.experts\.3\."
    with pytest.raises(IncompleteError, match=said):
        ckpt_tools.convert(tmp_path / "part.safetensors", tmp_path / "out", to="dcp", like=state)
    assert not (tmp_path / "out").exists()
