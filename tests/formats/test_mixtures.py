"""A checkpoint of two saves is refused or doubted by every command wherever its headers tell."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ckpt_tools
from ckpt_tools.cli.main import group
from ckpt_tools.errors import IncompleteError, MalformedError
from tests.formats.mixtures import DAMAGES, ROWS, VERBS, heard, make_saves, outcome, said
from tests.support.saved_files import change_file
from tests.support.sweep import tiered

ROWS_OF_TEST = ("zero1/mp_rank_00_model_states.pt", "zero3_optim_states.pt", "universalbias/fp32.pt", "dcp.distcp")
ROWS_OF_TEST += ("megatron/common.pt", "sharded/optim_world_size_2_rank_?.pt", "meta/consolidated.0?.pth")
ROWS_OF_TEST = (*ROWS_OF_TEST, "Trainer/optimizer.pt")
KINDS = ("zero1", "zero3", "universal", "megatron", "nanotron", "safetensors", "torch", "Trainer")
ROWS_OF_ALL = [str(row) for row in ROWS if row.form in KINDS and str(row) not in ROWS_OF_TEST]
WITHOUT_STEP = ("/fp32.pt", "model_world", ".safetensors", ".pth", ".bin")
"""Files that say nothing of the step: they are exchanged without a trace."""


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    return make_saves(tmp_path_factory.mktemp("saves"))


@pytest.mark.parametrize("row", tiered(ROWS, ROWS_OF_TEST, ROWS_OF_ALL))
def test_the_page_says_who_sees_it(row, saves, tmp_path):
    found = []
    for what in DAMAGES:
        folder = tmp_path / what.replace(" ", "_")
        folder.mkdir()
        found.append(outcome(row, what, saves, folder))
    assert found == ROWS[row]
    assert found[0] in (
        ("digests", "verify") if any(part in row.file for part in WITHOUT_STEP) else ("refused", "warned")
    )


@pytest.mark.parametrize("form", sorted({row.form for row in ROWS}))
def test_a_whole_save_is_not_doubted(form, saves):
    for name in ("one", "later"):
        with heard() as warnings:
            ckpt_tools.inspect(saves / name / form)
        assert not warnings


@pytest.mark.parametrize("command", [["inspect"], ["checksum", "--output", "-"], ["verify"], ["cat"]])
def test_a_command_warns(command, saves, tmp_path):
    shutil.copytree(saves / "one" / "dcp", tmp_path / "dcp")
    shutil.copy(saves / "later" / "dcp" / "__1_0.distcp", tmp_path / "dcp")
    name, *words = command
    words += ["0.bias[0:2]"] if name == "cat" else []
    done = CliRunner().invoke(group, [name, str(tmp_path / "dcp"), *words])
    assert done.exit_code == 0, done.output
    assert "3 in __0_0.distcp and 7 in __1_0.distcp" in " ".join(done.stderr.split())


# Counters that may differ


def doubts(source: Path) -> list[str]:
    return [f"{note.what}: {note.why}" for note in ckpt_tools.inspect(source).notes if note.outcome.value == "doubtful"]


def scheduled(last_epoch: int) -> Callable[[Path], None]:
    return lambda folder: change_file(folder / "scheduler.pt", lambda state: state.update(last_epoch=last_epoch))


def stepped(step: int) -> Callable[[Path], None]:
    def change(state: Any) -> None:
        for slots in state["state"].values():
            slots["step"].fill_(step)

    return lambda folder: change_file(folder / "optimizer.pt", change)


TRAINERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a scheduler ahead": (scheduled(5), "counter of lr_scheduler: it has counted 5, and the run made 3 steps"),
    "a scheduler behind": (scheduled(1), "it has counted 1"),
    "an optimizer ahead": (stepped(9), "step of the optimizer: 9 in optimizer.pt, and the run made 3"),
    "steps skipped": (stepped(2), "2 in optimizer.pt, and the run made 3: steps were skipped"),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_counters_of_the_trainer(name, saves, tmp_path):
    folder = Path(shutil.copytree(saves / "one" / "Trainer", tmp_path / "run"))
    assert not doubts(folder)
    change, words = TRAINERS[name]
    change(folder)
    assert any(words in doubt for doubt in doubts(folder)), doubts(folder)


FREE: dict[str, dict[str, Any]] = {
    "gradient accumulation": {"step": 12},
    "a scheduler of epochs": {"step": 3, "lr_scheduler": {"last_epoch": 1}},
    "a scheduler of four processes": {"step": 3, "lr_scheduler": {"last_epoch": 12}},
    "no step": {"epoch": 1},
}


@pytest.mark.parametrize("name", FREE)
def test_loops_that_count_otherwise_are_not_doubted(name, saves, tmp_path):
    state = torch.load(saves / "one" / "state.pt")
    torch.save({"model": state["model"], "optim": state["optim"], **FREE[name]}, tmp_path / "state.pt")
    assert not doubts(tmp_path / "state.pt")


@pytest.mark.parametrize("form", ["zero1", "zero2", "zero3"])
def test_steps_that_overflow_skipped_are_counted(form, saves, tmp_path):
    folder = Path(shutil.copytree(saves / "one" / form, tmp_path / form))
    for path in folder.rglob("*_model_states.pt"):
        change_file(path, lambda content: content.update(global_steps=5, skipped_steps=2))
    (folder / "global_step3").rename(folder / "global_step5")
    (folder / "latest").write_text("global_step5")
    assert not doubts(folder)


@pytest.mark.parametrize("form", ["zero1", "zero2", "zero3"])
def test_a_rank_with_another_learning_rate(form, saves, tmp_path):
    """All that tells two steps apart where the optimizer counts none, as SGD."""
    folder = Path(shutil.copytree(saves / "one" / form, tmp_path / form))

    def change(content: Any) -> None:
        part = "optimizer_state_dict" if form == "zero3" else "base_optimizer_state"
        content["optimizer_state_dict"][part]["param_groups"][0]["lr"] = 0.5

    change_file(max(folder.rglob("*_optim_states.pt")), change)
    with pytest.raises(MalformedError, match=r"its lr of group 0 is 0.5, but that of .*rank_0_"):
        ckpt_tools.inspect(folder)


@pytest.mark.parametrize("counter", ["global_steps", "global_samples", "skipped_steps", "iteration", "last_epoch"])
def test_a_model_file_with_another_counter(counter, saves, tmp_path):
    folder = Path(shutil.copytree(saves / "one" / "zero3", tmp_path / "zero3"))
    for number, path in enumerate(sorted(folder.rglob("*_model_states.pt"))):
        values = {"lr_scheduler": {"last_epoch": number}} if counter == "last_epoch" else {counter: number}
        change_file(path, lambda content, values=values: content.update(values))
    with pytest.raises(MalformedError, match=f"its {counter} is 1, but that of .* is 0: they are of two saves"):
        ckpt_tools.inspect(folder)


# Items of a DCP


@pytest.fixture
def saved(tmp_path):
    torch.save({"a": torch.arange(4.0), "b": torch.arange(4.0) + 9}, tmp_path / "two.pt")
    ckpt_tools.convert(tmp_path / "two.pt", tmp_path / "dcp", to="dcp", world_size=1)
    return tmp_path / "dcp"


def shifted(infos: Any) -> None:
    infos["b"].offset -= 64


def lengthened(infos: Any) -> None:
    infos[min(infos, key=lambda name: infos[name].offset)].length += 64


@pytest.mark.parametrize("change", [shifted, lengthened])
def test_items_that_share_bytes_are_refused(change, saved, tmp_path):
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    change({key.fqn: info for key, info in metadata.storage_data.items()})
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    assert set(said(saved, tmp_path, *VERBS).values()) == {"error"}
    with pytest.raises(MalformedError, match="shares bytes with another item"):
        ckpt_tools.inspect(saved)


def test_two_pieces_at_one_item_are_refused(saved, tmp_path):
    ckpt_tools.reshard(saved, tmp_path / "halves", world_size=2)
    metadata = pickle.loads((tmp_path / "halves/.metadata").read_bytes())
    one, other = [info for key, info in metadata.storage_data.items() if key.fqn == "a"]
    vars(other).update(vars(one))
    (tmp_path / "halves/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(MalformedError, match="its item is also that of another piece"):
        ckpt_tools.inspect(tmp_path / "halves")


def test_items_of_none_are_doubted(saved):
    assert not doubts(saved)
    with (saved / "__0_0.distcp").open("ab") as file:
        file.write(bytes(100))
    shutil.copy(saved / "__0_0.distcp", saved / "__3_0.distcp")
    assert sorted(doubts(saved)) == [
        "100 bytes at the end of __0_0.distcp: not read: no item in .metadata is there",
        "__3_0.distcp: not read: no item in .metadata is there",
    ]


# A part of a whole


SHARDS = {
    "safetensors": ("safetensors", "model-00002-of-00003.safetensors"),
    "diffusers": ("safetensors", "diffusion_pytorch_model-00002-of-00003.safetensors"),
    "a variant": ("safetensors", "model.fp16-00002-of-00003.safetensors"),
    "torch": ("torch", "pytorch_model-00002-of-00003.bin"),
}


@pytest.mark.parametrize("beside", ["", "config.json"])
@pytest.mark.parametrize("name", SHARDS)
def test_one_shard_without_its_index_is_refused(name, beside, saves, tmp_path):
    form, file = SHARDS[name]
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(next((saves / "one" / form).glob("*-00002-*")), folder / file)
    if beside:
        (folder / beside).write_text("{}")
    assert set(said(folder, tmp_path, *VERBS).values()) == {"error"}
    with pytest.raises(IncompleteError, match="1 of 3 shards, and the others are missing"):
        ckpt_tools.inspect(folder)
    assert ckpt_tools.inspect(folder / file, from_=form).format == form, "the file itself is read by its format"  # type: ignore[arg-type]


@pytest.mark.parametrize(("form", "single"), [("safetensors", "model.safetensors"), ("torch", "pytorch_model.bin")])
@pytest.mark.parametrize("has_shards", [True, False])
def test_a_single_file_beside_an_index_is_read(form, single, has_shards, saves, tmp_path):
    """As transformers loads it."""
    folder = Path(shutil.copytree(saves / "one" / form, tmp_path / "model"))
    ckpt_tools.convert(saves / "later" / "state.pt", folder / single, to=form, state="model")  # type: ignore[arg-type]
    if not has_shards:
        for path in folder.glob("*-of-*"):
            path.unlink()
    with heard() as warnings:
        found = ckpt_tools.diff(folder, saves / "later" / form)
    assert found.equal
    assert f"{single}.index.json" in warnings[0]
    assert f"not read: {single} is beside it, and transformers loads that" in warnings[0]
    assert len(doubts(folder)) == (4 if has_shards else 1)
