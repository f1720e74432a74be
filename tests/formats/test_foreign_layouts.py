"""Layouts of other people that hold no whole model where one is looked for: refused by name, or told in a note.

Each of them was opened with exit code 0 once, or refused with words that led to a wrong file. Those that a framework
writes on CPU are written by it; the others are stand-ins made from the documented layout, and say so.
"""

import json
import pickle
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

import ckpt_tools
from ckpt_tools.core.notes import Outcome
from ckpt_tools.errors import CkptError, IncompleteError, UnsupportedError
from fixtures.corpus import make
from tests.formats.deepspeed import zero_files

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(name)`: a copy of a layout of the corpus, once."""

    @cache
    def get(name: str) -> Path:
        return shutil.copytree(make(name).folder, tmp_path_factory.mktemp(name) / "made")

    return get


def refusal(path: Path, **options: Any) -> str:
    """The sentence with which ``path`` is refused, whether it is looked at or converted."""
    out = path.parent / "refused.safetensors"
    with pytest.raises(UnsupportedError) as inspected:
        ckpt_tools.inspect(path, **options)
    assert inspected.value.exit_code == 4
    with pytest.raises(UnsupportedError):
        ckpt_tools.convert(path, out, **options)
    assert not out.exists()
    return str(inspected.value)


def saved_dcp(state: dict[str, Any], folder: Path) -> Path:
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def saved_file(state: dict[str, Any], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return path


ONE_FILE = "this is one file of a checkpoint; name its folder"


class TestRanks:
    """``torch.save`` on every rank of a state that is sharded: the folder opens, and one file of it does not."""

    @pytest.mark.parametrize(("name", "rank"), [("model", 0), ("optim", 1)])
    def test_a_file_of_dtensors_says_of_which_rank_it_is(self, saved, name, rank, tmp_path):
        """By the name of the file or, where the format is said or the name is another, by its content."""
        path, of_rank = saved("verl") / f"actor/{name}_world_size_2_rank_{rank}.pt", f"this is rank {rank} of 2 of a"
        assert ONE_FILE in refusal(path) and of_rank in refusal(path, from_="torch")
        assert of_rank in refusal(Path(shutil.copy(path, tmp_path / "model.pt")))

    def test_beside_a_whole_model_they_are_noted(self, saved, tmp_path):
        folder = shutil.copytree(saved("verl") / "actor", tmp_path / "actor")
        saved_file({"w": torch.ones(2)}, folder / "model.safetensors")
        notes = ckpt_tools.convert(folder, tmp_path / "out.safetensors").plan.notes
        ranks = {f"{name}_world_size_2_rank_{rank}.pt" for name in ("model", "optim", "extra_state") for rank in (0, 1)}
        dropped = {note.what for note in notes if note.outcome is Outcome.DROPPED}
        assert dropped == {*ranks, "fsdp_config.json, huggingface/config.json"}

    def test_sharded_tensors_of_fsdp1_say_of_which_rank_they_are(self, saved):
        message = refusal(saved("fsdp1-ranks") / "checkpoint-0.pt")
        assert "this is rank 0 of 2 of a sharded state (ShardedTensors)" in message
        assert "malformed" not in message and "Opaque" not in message

    def test_a_rank_in_the_name_of_a_whole_file_means_nothing(self, tmp_path):
        """Composer calls its whole checkpoint ``ep0-ba10-rank0.pt``, and one GPU's file of verl is whole."""
        for name in ("ep0-ba10-rank0.pt", "model_world_size_1_rank_0.pt"):
            torch.save({"w": torch.ones(3)}, tmp_path / name)
            assert ckpt_tools.inspect(tmp_path / name).num_parameters == 3


class TestMegatron:
    """Stand-ins for ``torch_dist``: its names in a DCP that torch writes, and the files that it lays beside them."""

    @pytest.mark.parametrize(
        ("sign", "missing", "inside"),
        [("metadata.json", "common.pt", ""), ("common.pt", "metadata.json", "iter_0000010")],
    )
    def test_it_is_known_by_its_files(self, tmp_path, sign, missing, inside):
        folder = saved_dcp({"decoder.weight": torch.ones(2)}, tmp_path / "run" / inside)
        if sign == "common.pt":
            torch.save({"iteration": 10}, folder / sign)
        else:
            (folder / sign).write_text(json.dumps({"sharded_backend": "torch_dist"}))
        assert "read it with from_='megatron'" in refusal(tmp_path / "run", from_="dcp")
        for from_ in (None, "megatron"):
            with pytest.raises(IncompleteError, match=missing):
                ckpt_tools.inspect(tmp_path / "run", from_=from_)

    def test_it_is_known_by_its_objects_and_by_its_data_in_the_index(self, tmp_path):
        message = refusal(
            saved_dcp({"decoder.weight": torch.ones(2), "common_state/shard_0_1": [10]}, tmp_path / "one")
        )
        assert "megatron-core" in message and "metadata.json" in message
        run = saved_dcp({"decoder.weight": torch.ones(2)}, tmp_path / "run")
        metadata = dcp.FileSystemReader(run).read_metadata()
        vars(metadata)["mcore_data"] = {}
        (run / ".metadata").write_bytes(pickle.dumps(metadata))
        assert "megatron-core" in refusal(run)

    def test_another_metadata_json_means_nothing(self, tmp_path):
        run = saved_dcp({"w": torch.ones(2)}, tmp_path / "run")
        (run / "metadata.json").write_text('{"author": "someone"}')
        assert ckpt_tools.inspect(run).num_parameters == 2


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.state.exp_avg.w", "chained_0.optimizer.state.fp32_param.w", "w.exp_avg", "state.0.exp_avg_sq",
        "optim.state.w.step", "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket", "state.w.momentum_buffer",
        "opt.momentum_buffer.w",
    ],
)  # fmt: skip
def test_names_of_moments_are_no_names_of_weights(name, tmp_path):
    state = {"w": torch.ones(4), name: torch.ones(4)}
    for path in (saved_dcp(state, tmp_path / "dcp"), saved_file(state, tmp_path / "whole.pt")):
        assert name in refusal(path)


def test_names_of_weights_are_left_alone(tmp_path):
    names = ["state_encoder.weight", "blocks.0.state.proj", "optimizer_head.weight", "average.weight"]
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "model.pt")
    assert ckpt_tools.inspect(tmp_path / "model.pt").num_parameters == 8


class TestHalves:
    """A model in one folder and the DCP of its optimizer in another."""

    def test_both_are_named(self, saved, tmp_path):
        """In folders of any other names than NeMo Automodel's."""
        shutil.copytree(saved("automodel") / "epoch_0_step_3", tmp_path / "in")
        (tmp_path / "in" / "model").rename(tmp_path / "in" / "weights")
        message = refusal(tmp_path / "in")
        assert "optim/.metadata" in message and "weights/shard-00001-model" in message

    def test_a_model_that_ends_too_early_is_told_by_its_optimizer(self, saved, tmp_path):
        """Pieces alone do not tell how far a tensor reaches: without the last two ranks, all are whole and smaller."""
        folder = shutil.copytree(saved("transformers-distributed"), tmp_path / "in")
        for rank in (3, 4):
            (folder / f"shard-0000{rank}-model-00001-of-00001.safetensors").unlink()
        message = refusal(folder)
        assert "are not in the model under these names and shapes" in message
        assert "or a file of it is missing); add " in message
        assert ckpt_tools.inspect(folder, from_="safetensors").num_tensors

    def test_a_model_beside_a_whole_dcp_is_noted(self, tmp_path):
        saved_dcp({"w": torch.ones(2)}, tmp_path / "run" / "dcp")
        saved_file({"v": torch.ones(2)}, tmp_path / "run" / "critic" / "model.safetensors")
        notes = ckpt_tools.convert(tmp_path / "run", tmp_path / "out.safetensors").plan.notes
        assert [note.what for note in notes] == ["critic/model.safetensors"]


class TestTrainersOfOthers:
    """What is not joined is named, and leads to what can be read."""

    def test_several_models_of_one_optimizer(self, tmp_path):
        torch.save({"state": {}, "param_groups": [{"params": [0]}]}, tmp_path / "optimizer.bin")
        for name in ("unet", "text_encoder", "unet_ema"):
            saved_file({"w": torch.ones(2)}, tmp_path / name / "model.safetensors")
        assert "several models (text_encoder, unet) of one optimizer; name the folder of one" in refusal(tmp_path)
        assert ckpt_tools.inspect(tmp_path / "unet").num_tensors == 1

    def test_several_optimizers_of_a_policy(self, tmp_path):
        folder = tmp_path / "005000"
        saved_file({"w": torch.ones(2)}, folder / "pretrained_model" / "model.safetensors")
        saved_file(
            {"state/0/step": torch.ones(())}, folder / "training_state" / "actor" / "optimizer_state.safetensors"
        )
        message = refusal(folder)
        assert "has an optimizer of its own" in message and "name pretrained_model for the weights alone" in message
        assert ckpt_tools.inspect(folder / "pretrained_model").num_tensors == 1

    def test_state_of_another_policy(self, saved, tmp_path):
        folder = shutil.copytree(saved("lerobot") / "checkpoints" / "000003", tmp_path / "in")
        (folder / "training_state" / "optimizer_param_groups.json").write_text("[]")
        state = {"state/9/exp_avg": torch.ones(3), "param_groups": torch.ones(1)}
        safetensors.torch.save_file(state, folder / "training_state" / "optimizer_state.safetensors")
        with pytest.raises(CkptError):
            ckpt_tools.convert(folder, tmp_path / "out", to="dcp")

    def test_a_rank_of_torch_checkpointing_in_safetensors(self, tmp_path):
        """Its tensors have local shapes, and no header says so."""
        saved_file({"w": torch.ones(2)}, tmp_path / "model_0.safetensors")
        assert ckpt_tools.inspect(tmp_path / "model_0.safetensors").num_tensors == 1
        layout_info = {"file_path": "model_0.safetensors", "serialization_format": {"type": "SafetensorsSerialization"}}
        index = {"version": "2.0", "world_size": 2, "metadata": {"model": {"rank_to_layout_info": {0: layout_info}}}}
        (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(index))
        assert f"{ONE_FILE} {tmp_path}" in refusal(tmp_path / "model_0.safetensors")
        assert "is stored by SafetensorsSerialization" in refusal(tmp_path)

    def test_the_recipe_of_torchtune_is_named(self, tmp_path):
        saved_file({"w": torch.ones(2)}, tmp_path / "epoch_0" / "model-00001-of-00001.safetensors")
        torch.save({"optimizer": {"state": {}}, "epochs_run": 1}, tmp_path / "epoch_0" / "recipe_state.pt")
        notes = ckpt_tools.inspect(tmp_path / "epoch_0").notes
        assert [note.what for note in notes] == ["recipe_state.pt"]


def test_quantized_weights_of_two_files_are_those_of_torchs_reader(tmp_path):
    """A weight and its scale lie in different shards. The judge is ``QuantizedHuggingFaceStorageReader``."""
    weight = torch.randn(130, 200).to(torch.float8_e4m3fn)
    parts = [{"q.weight": weight, "q.bias": torch.rand(130)}, {"q.weight_scale_inv": torch.rand(2, 2) + 0.5}]
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (tmp_path / "in").mkdir()
    for name, part in zip(names, parts, strict=True):
        safetensors.torch.save_file(part, tmp_path / "in" / name)
    index = {"metadata": {}, "weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part}}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))

    def dequantized(folder: Path) -> torch.Tensor:
        state = {"q.weight": torch.zeros(130, 200)}
        dcp.load(state, storage_reader=QuantizedHuggingFaceStorageReader(str(folder)), no_dist=True)
        return state["q.weight"]

    ckpt_tools.convert(tmp_path / "in", tmp_path / "dcp", to="dcp", world_size=3)
    out = tmp_path / "out"
    ckpt_tools.convert(tmp_path / "dcp", out, to="safetensors", dtype="bfloat16", max_shard_size="20KB")
    assert torch.equal(dequantized(out), dequantized(tmp_path / "in"))
    for source in (tmp_path / "in", out):
        state = {"q.weight": torch.zeros(130, 200)}
        with pytest.raises(CheckpointException, match=r"q\.weight: it is stored as float8_e4m3fn, which cannot be"):
            dcp.load(state, storage_reader=ckpt_tools.storage_reader(source), no_dist=True)
        state = {"q.weight": torch.zeros(130, 200, dtype=torch.float8_e4m3fn)}
        dcp.load(state, storage_reader=ckpt_tools.storage_reader(source), no_dist=True)
        assert torch.equal(state["q.weight"].view(torch.uint8), weight.view(torch.uint8))
    with pytest.raises(UnsupportedError, match="dequantize the weights with"):
        ckpt_tools.convert(tmp_path / "in", tmp_path / "zero", to="zero3", world_size=2, dtype="bfloat16")


def test_without_quantized_weights_scales_are_weights(tmp_path):
    tensors = {"logit_scale": torch.rand(1), "a.weight_scale": torch.rand(2), "ids": torch.ones(2, dtype=torch.int64)}
    safetensors.torch.save_file(tensors, tmp_path / "in.safetensors")
    ckpt_tools.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dtype="bfloat16")
    found = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert [found[name].dtype for name in tensors] == [torch.bfloat16, torch.bfloat16, torch.int64]


def of_zero(stage: int, file: str) -> Any:
    return zero_files.build(stage, 2, [{"w": (3, 2)}])[file]


STAGE_0 = {"module": {"w": torch.ones(2).bfloat16()}, "optimizer": {"fp32_groups": [[torch.ones(2)]]}}
OF_DEEPSPEED = {
    "the masters of stage 0": (STAGE_0, "whose fp32 masters lie in its optimizer"),
    "the optimizer of a rank in stage 1": (of_zero(1, zero_files.optim(0)), "one rank's file"),
    "the optimizer of a rank in stage 3": (of_zero(3, zero_files.optim(0)), "one rank's file"),
    "the emptied module of stage 3": (of_zero(3, zero_files.rank_model(0)), "no elements of w"),
}


@pytest.mark.parametrize(("content", "words"), OF_DEEPSPEED.values(), ids=OF_DEEPSPEED)
def test_a_file_of_deepspeeds_by_itself_is_no_model(content, words, tmp_path):
    torch.save(content, tmp_path / "model.pt")
    assert words in refusal(tmp_path / "model.pt", from_="torch")


def test_tensors_in_the_place_of_weights_are_named(tmp_path):
    """A DCP keeps a tuple whole, in an item that is no tensor."""
    run = saved_dcp({"params": (torch.ones(2), torch.ones(3))}, tmp_path / "run")
    with pytest.raises(UnsupportedError, match=r"known to be a weight: 2 tensors in other entries \(params"):
        ckpt_tools.convert(run, tmp_path / "out.safetensors")


@pytest.mark.parametrize("name", [".in_progress", "INCOMPLETE", "save.in-progress", "checkpoint.incomplete"])
def test_an_unfinished_checkpoint_is_refused(name, tmp_path):
    """Stand-ins: trainers lay such a file down first and take it away last. A word inside another means nothing."""
    run = saved_dcp({"w": torch.ones(2)}, tmp_path / "run")
    (run / "progress.json").touch()
    assert ckpt_tools.inspect(run).num_parameters == 2
    (run / name).touch()
    with pytest.raises(IncompleteError, match="unfinished"):
        ckpt_tools.inspect(run)


def test_torchscript_is_named_whatever_its_ending(tmp_path):
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "model.jit")
    message = refusal(tmp_path / "model.jit")
    assert "it is a TorchScript archive" in message and "state_dict()" in message
