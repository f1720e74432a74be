"""One file of a checkpoint is refused by every verb with the folder to name, and never read as though it were all."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.core.notes import Outcome
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import LossError
from ckpt_tools.formats.index import load_all_formats
from ckpt_tools.runs.opening import open_checkpoint
from fixtures.corpus import make
from tests.support.every_verb import READING, USING, refusal

FILES = [
    ("deepspeed-zero1-bf16", "**/*_optim_states.pt", 1),
    ("deepspeed-zero3-bf16", "**/zero_pp_rank_0_*_model_states.pt", 1),
    ("deepspeed-pipeline-bf16", "**/layer_*-model_states.pt", 1),
    ("deepspeed-universal", "**/zero/*/fp32.pt", 3),
    ("dcp", "__0_0.distcp", 1),
    ("dcp-alone", "__0.metadata", 1),
    ("accelerate-fsdp2", "pytorch_model_fsdp_0/__0_0.distcp", 2),
    ("accelerate-fsdp2", "random_states_0.pkl", 1),
    ("accelerate-ranks", "pytorch_model_fsdp*_rank0.bin", 1),
    ("megatron", "**/common.pt", 1),
    ("verl", "**/model_world_size_2_rank_0.pt", 1),
    ("hf-pretrained-sharded", "model-00001-of-*.safetensors", 1),
    ("torchtitan-hf", "**/shard-00001-*.safetensors", 1),
    ("transformers-distributed", "shard-00002-*.safetensors", 1),
    ("lerobot", "**/optimizer_state.safetensors", 2),
    ("gguf-split", "*-00001-of-*.gguf", 1),
    ("hf-trainer", "**/optimizer.pt", 1),
    ("hf-trainer", "**/scheduler.pt", 1),
    ("hf-trainer", "**/trainer_state.json", 1),
    ("orbax", "**/manifest.ocdbt", None),
    ("orbax-zarr", "**/.zarray", None),
]
"""Layout, file, and how many folders above it the one to name is; None where that is the layout's source."""


IN_TEST = ("deepspeed-zero1-bf16", "deepspeed-universal", "dcp", "accelerate-fsdp2", "megatron", "verl", "hf-trainer")


@pytest.mark.parametrize(
    ("name", "pattern", "above"),
    [pytest.param(*row, marks=() if row[0] in IN_TEST else pytest.mark.extended) for row in FILES],
)
def test_the_folder_to_name_is_said_and_opens(name, pattern, above, tmp_path):
    made = make(name)
    file = min(made.folder.glob(pattern))
    folder = made.source if above is None else file.parents[above - 1]
    code, sentence = refusal(file, tmp_path / "out")
    assert code == 4
    assert sentence == f"{file.name}: this is one file of a checkpoint; name its folder {folder}"
    assert ckpt_tools.inspect(folder).num_tensors


@pytest.mark.parametrize(
    ("name", "marker"),
    [("megatron", ".metadata"), ("dcp", ".metadata"), ("deepspeed-universal", "latest_universal")],
)
def test_an_index_stands_for_its_folder(name, marker):
    made = make(name)
    index = min(made.folder.rglob(marker))
    assert ckpt_tools.inspect(index).num_tensors == ckpt_tools.inspect(made.source).num_tensors


def test_a_shard_is_read_by_itself_if_its_format_is_named_and_never_in_silence(tmp_path):
    file = min(make("hf-pretrained-sharded").source.glob("model-00001-of-*.safetensors"))
    manifest = open_checkpoint(file, ReadOptions(), format_name="safetensors").manifest
    (note,) = manifest.notes
    assert note.outcome is Outcome.DROPPED and str(file.parent) in note.what
    with pytest.raises(LossError):
        ckpt_tools.convert(file, tmp_path / "out.safetensors", from_="safetensors", strict=True)
    assert not (tmp_path / "out.safetensors").exists()


def test_a_file_without_tensors_is_shown_and_not_used(tmp_path):
    source = tmp_path / "in.safetensors"
    save_file({}, source)
    for verb in READING.values():
        verb(source, tmp_path / "out", {})
    code, sentence = refusal(source, tmp_path / "out", {k: v for k, v in USING.items() if k != "reshard"})
    assert (code, sentence) == (4, "in.safetensors: it holds no tensors")


READERS = {"torch": "torch", "torch before 1.6": "torch", "safetensors": "safetensors", "npz": "npz", "gguf": "gguf"}
KINDS = [*READERS, "a text", "an empty file"]
FORMATS = [each.name for each in load_all_formats() if each.reads]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, state = tmp_path_factory.mktemp("files"), {"a.weight": torch.ones(2, 2)}
    torch.save(state, folder / "torch.pt")
    torch.save(state, folder / "torch before 1.6.pt", _use_new_zipfile_serialization=False)
    save_file(state, folder / "safetensors.safetensors")
    np.savez(folder / "npz.npz", **{"a.weight": np.ones((2, 2), np.float32)})
    ckpt_tools.convert(folder / "torch.pt", folder / "gguf.gguf")
    contents = {path.stem: path.read_bytes() for path in folder.iterdir()}
    return {**contents, "a text": b"nothing\n" * 20, "an empty file": b""}


@pytest.mark.parametrize("from_", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_without_an_ending(kind, from_, files, tmp_path):
    (tmp_path / "blob").write_bytes(files[kind])
    reader = READERS.get(kind)
    if from_ == reader or (from_, reader) == ("peft", "safetensors"):
        assert list(ckpt_tools.open(tmp_path / "blob", from_=from_)) == ["a.weight"]
        ckpt_tools.convert(tmp_path / "blob", tmp_path / "out.pt", from_=from_)
        assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)["a.weight"], torch.ones(2, 2))
        return
    code, sentence = refusal(tmp_path / "blob", tmp_path / "out", from_=from_)
    assert code in (3, 4) and "0 tensors" not in sentence


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n"
PAGE = "\n<!DOCTYPE html><html>Sign in</html>"
ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".gguf", ".npz", "")


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(("text", "wanted"), [(POINTER, "it is a Git LFS pointer"), (PAGE, "it is a page of HTML")])
def test_what_a_download_left_in_the_place_of_a_file(text, wanted, ending, tmp_path):
    (tmp_path / f"model{ending}").write_text(text)
    for src in (tmp_path, tmp_path / f"model{ending}"):
        assert wanted in refusal(src, tmp_path.parent / f"{tmp_path.name}-out")[1]


@pytest.mark.parametrize("ending", [".safetensors", ".gguf", ".npz", ""])
@pytest.mark.parametrize("kind", ["torch", "torch before 1.6"])
def test_a_torch_file_under_another_name(kind, ending, files, tmp_path):
    (tmp_path / f"model{ending}").write_bytes(files[kind])
    wanted = "its content is that of torch.save, but its name is not; add from_='torch'"
    assert wanted in refusal(tmp_path / f"model{ending}", tmp_path / "out")[1]
    assert ckpt_tools.inspect(tmp_path / f"model{ending}", from_="torch").num_tensors == 1


def test_two_complete_sets_of_shards(tmp_path):
    (tmp_path / "two").mkdir()
    for total in (2, 3):
        for number in range(total):
            name = f"model-{number + 1:05d}-of-{total:05d}.safetensors"
            save_file({f"m.{number}": torch.ones(2)}, tmp_path / "two" / name)
    sentence = refusal(tmp_path / "two", tmp_path / "out")[1]
    assert "2 complete sets of shards (of 2, of 3) and no index: name one" in sentence
    (tmp_path / "two" / "model-00002-of-00003.safetensors").unlink()
    assert "are missing" in refusal(tmp_path / "two", tmp_path / "out")[1]
