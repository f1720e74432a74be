"""Folders of weights come out whole: transformers itself opens them, and gives the answers of the source's model."""

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.core.notes import Outcome
from ckpt_tools.errors import CkptError, UsageError
from tests.inference.tiny_models import save_writer

TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_writer(tmp_path_factory.mktemp("models") / "llama", dtype=torch.bfloat16)


def sharded(model: Path, folder: Path, to: Any = "dcp") -> Path:
    ckpt_tools.convert(model / "model.safetensors", folder, to=to, world_size=2)
    return folder


def config_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def with_config(model: Path, folder: Path, **changed: Any) -> tuple[Path, dict[str, Any]]:
    """A copy of the model with other entries in config.json; and the config before."""
    source, before = Path(shutil.copytree(model, folder)), config_in(model)
    (source / "config.json").write_text(json.dumps({**before, **changed}))
    return source, before


def companions(model: Path, into: Path) -> None:
    into.mkdir(exist_ok=True, parents=True)
    for file in model.glob("*.json"):
        shutil.copy(file, into)


@torch.no_grad()
def logits_of(folder: Path, **kwargs: Any) -> torch.Tensor:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **kwargs)
    assert not any(report.values()), report
    return model(torch.arange(12).reshape(2, 6)).logits


def assert_whole(folder: Path, source: Path) -> None:
    """The folder gives the source's logits to the bit, and its tokenizer the source's tokens."""
    assert torch.equal(logits_of(folder), logits_of(source))
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, source))
    assert ours("a text").input_ids == theirs("a text").input_ids


@pytest.mark.parametrize("to", ["safetensors", "torch"])
@pytest.mark.parametrize("place", ["{}", "{}/huggingface", "{}/.."])
def test_what_lies_beside_a_sharded_checkpoint_is_carried(place, to, llama, tmp_path):
    run = sharded(llama, tmp_path / "run" / "step")
    companions(llama, Path(place.format(run)).resolve())
    report = ckpt_tools.convert(run, tmp_path / "out", to=to)
    assert_whole(tmp_path / "out", llama)
    for name in TOKENIZER | {"generation_config.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (llama / name).read_bytes()
    assert config_in(tmp_path / "out") == config_in(llama)
    assert [note.what for note in report.plan.notes] == (["config.json"] if place == "{}/.." else [])


@pytest.mark.parametrize("source", ["", "model.safetensors"])
def test_a_folder_and_the_file_in_it_are_carried_alike_with_the_weights_last(source, llama, tmp_path):
    plan = ckpt_tools.plan(llama / source, tmp_path / "out", to="safetensors")
    assert [*plan.files][-1] == "model.safetensors" and plan.num_tensors == len(ckpt_tools.open(llama))
    ckpt_tools.convert(llama / source, tmp_path / "out", to="safetensors", max_shard_size="20KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert_whole(tmp_path / "out", llama)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_the_config_says_the_dtype_that_is_written(key, llama, tmp_path):
    source = shutil.copytree(llama, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    before = config.pop("dtype")
    (source / "config.json").write_text(json.dumps(config if key is None else {**config, key: before}))
    report = ckpt_tools.convert(source, tmp_path / "out", to="safetensors", dtype="float32")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {**config, key or "torch_dtype": "float32"}
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(llama, dtype=torch.float32))
    said = [note.why for note in report.plan.notes if note.what == "dtype in config.json"]
    assert said == ([] if key is None else ["bfloat16 to float32, the dtype of the weights"])


def test_a_quantized_model_keeps_the_dtype_that_it_computes_in(llama, tmp_path):
    source, _ = with_config(llama, tmp_path / "source", quantization_config={"quant_method": "x"})
    config = config_in(source)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    ckpt_tools.convert(source, tmp_path / "out", to="safetensors", dtype="float32")
    assert config_in(tmp_path / "out") == config


def test_a_model_that_is_not_quantized_does_not_say_so(llama, tmp_path):
    """Such as one that was trained from a quantized model, beside the config of that: it could not be loaded."""
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    source, config = with_config(llama, tmp_path / "source", quantization_config=settings)
    report = ckpt_tools.convert(source, tmp_path / "out", to="safetensors", strict=True)
    assert config_in(tmp_path / "out") == config
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(llama))
    assert [note.why for note in report.notes if "quantization" in note.what] == ["no weight is quantized"]


def test_a_remote_folder_is_carried_to_a_remote_folder(llama, tmp_path):
    fs = fsspec.filesystem("memory")
    for file in llama.iterdir():
        fs.pipe(f"/carried/llama/{file.name}", file.read_bytes())
    ckpt_tools.convert("memory://carried/llama", "memory://carried/out", to="torch")
    ckpt_tools.convert("memory://carried/llama/model.safetensors", "memory://carried/file", to="safetensors")
    ckpt_tools.convert(
        llama / "model.safetensors", tmp_path / "named", to="safetensors", config="memory://carried/llama"
    )
    for name in ("out", "file"):
        fs.get(f"/carried/{name}/", f"{tmp_path / name}/", recursive=True)
    for name in ("out", "file", "named"):
        assert_whole(tmp_path / name, llama)


@pytest.mark.parametrize("dst", ["model.safetensors", "model.pt"])
def test_a_single_file_gets_nothing_beside_it(dst, llama, tmp_path):
    ckpt_tools.convert(llama, tmp_path / "out" / dst)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [dst]
    with pytest.raises(UsageError, match=rf"config= is for folders; {dst} is one file"):
        ckpt_tools.plan(llama, tmp_path / "other" / dst, config=llama)
    with pytest.raises(UsageError, match="is for folders that from_pretrained opens"):
        ckpt_tools.plan(llama, tmp_path / "out", to="dcp", config=llama)


def test_what_is_missing_is_said(llama, tmp_path):
    bare = shutil.copytree(llama, tmp_path / "bare")
    (bare / "config.json").unlink()
    note, left = ckpt_tools.plan(bare, tmp_path / "out", to="safetensors").notes
    assert (note.what, "from_pretrained needs it" in note.why) == ("config.json", True)
    assert left.is_loss and left.count == 1 + len(TOKENIZER)
    (bare / "config.json").write_bytes((llama / "config.json").read_bytes())
    for name in TOKENIZER:
        (bare / name).unlink()
    (note,) = ckpt_tools.plan(bare, tmp_path / "out", to="safetensors").notes
    assert "none found beside config.json" in note.why


def test_a_config_of_another_program_or_a_broken_one(llama, tmp_path):
    run = sharded(llama, tmp_path / "run")
    (run / "config.json").write_text('{"learning_rate": 1}')
    assert [*ckpt_tools.plan(run, tmp_path / "out", to="safetensors").files] == ["model.safetensors"]
    with pytest.raises(UsageError, match=r"has no config\.json of a model"):
        ckpt_tools.plan(run, tmp_path / "out", to="safetensors", config=run)
    source = shutil.copytree(llama, tmp_path / "source")
    (source / "config.json").write_text("{")
    with pytest.raises(CkptError, match=r"config\.json"):
        ckpt_tools.plan(source, tmp_path / "out", to="safetensors")


OF_MODEL = (
    *("tiktoken.model", "tokenization_x.py", "modeling_x.py", "qwen.tiktoken", "tekken.json", "params.json"),
    *("modules.json", "chat_template.jinja", "LICENSE", "README.md", "vocab.bpe"),
)
OF_OTHERS = ("model.onnx", "flax_model.msgpack", "SHA256SUMS", "training_args.bin", "trainer_state.json")


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_every_small_file_of_a_model_is_carried(to, llama, tmp_path):
    source, out = shutil.copytree(llama, tmp_path / "source"), tmp_path / "out"
    for name in (*OF_MODEL, *OF_OTHERS, ".gitattributes", "hf_quant_config.json"):
        (source / name).write_text("{}")
    report = ckpt_tools.convert(source, out, to=to)
    assert {path.name for path in out.iterdir()} >= {path.name for path in llama.glob("*.json")} | {*OF_MODEL}
    assert not {path.name for path in out.iterdir()} & {*OF_OTHERS, ".gitattributes", "hf_quant_config.json"}
    dropped = ", ".join(note.what for note in report.notes if note.outcome is Outcome.DROPPED)
    assert all(name in dropped for name in ("model.onnx", "flax_model.msgpack", "SHA256SUMS", "hf_quant_config.json"))
    ckpt_tools.convert(source, out, to=to, overwrite=True)
    shutil.copytree(out, tmp_path / "clean")
    ckpt_tools.convert(tmp_path / "clean", tmp_path / "strict", to=to, strict=True)


def test_verify_compares_the_files_of_a_model(llama, tmp_path):
    source, out = shutil.copytree(llama, tmp_path / "source"), tmp_path / "out"
    (source / "tokenization_x.py").write_text("x")
    ckpt_tools.convert(source, out, to="safetensors", dtype="float32")
    assert ckpt_tools.verify(source, out, dtype="float32").equal
    (out / "tokenization_x.py").write_text("y")
    (out / "tokenizer.json").unlink()
    (out / "config.json").write_text(json.dumps({**config_in(out), "vocab_size": 1}))
    report = ckpt_tools.verify(source, out, dtype="float32")
    assert {each.key.fqn: each.what for each in report.differences} == {
        "config.json": "vocab_size: another content",
        "tokenization_x.py": "another content",
        "tokenizer.json": "missing",
    }
    (out / "config.json").unlink()
    assert ckpt_tools.verify(source, out, dtype="float32").differences[0].what == "missing"
