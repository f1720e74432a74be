"""A run's folder: which checkpoints it holds, and which one a name behind ``@`` means."""

import re
import shutil
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import SourceNotFoundError, UnsupportedError
from ckpt_tools.formats.builtin import FORMATS
from ckpt_tools.runs.naming import resolve_in_run
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import open_source
from ckpt_tools.trainers.run_folders import find_members
from fixtures.corpus import make


def saved(folder: Path, step: int) -> Path:
    folder.mkdir(parents=True)
    torch.save({"model": {"w": torch.full((1,), float(step))}, "global_step": step}, folder / "model.pt")
    return folder


@pytest.fixture
def run(tmp_path):
    for epoch in (2, 9, 10):
        saved(tmp_path / "run" / "checkpoints" / f"epoch_{epoch}", 11 * epoch)
    for name in (".epoch_11.partial", "epoch_12.partial", "epoch_13.tmp", "tmp-checkpoint-14"):
        saved(tmp_path / "run" / "checkpoints" / name, 999)
    (tmp_path / "run" / "logs_99").mkdir()
    (tmp_path / "run" / "logs_99" / "log.txt").write_text("x")
    return tmp_path / "run"


def step_of(url: str) -> float:
    return float(ckpt_tools.open(url)["w"][0])


@pytest.mark.parametrize(
    ("name", "step"),
    [("latest", 110), ("epoch_9", 99), ("checkpoints/epoch_2", 22), ("step=22", 22), ("step=110", 110)],
)
def test_a_name_behind_an_at_sign_is_a_checkpoint_of_the_run(name, step, run):
    assert step_of(f"{run}@{name}") == step_of(f"file://{run}@{name}") == step_of(f"{run}/@{name}") == step


@pytest.mark.parametrize("name", ["epoch_1", "step=999", "epoch_12.partial", "../run", "logs_99"])
def test_other_names_are_refused_with_those_there_are(name, run):
    with pytest.raises(SourceNotFoundError, match="epoch_10, checkpoints/epoch_9, checkpoints/epoch_2"):
        ckpt_tools.inspect(f"{run}@{name}")


def test_a_file_is_named_without_its_ending(tmp_path):
    for epoch in (1, 2):
        torch.save({"w": torch.full((1,), float(epoch))}, tmp_path / f"epoch_{epoch}.pt")
    assert step_of(f"{tmp_path}@epoch_2") == step_of(f"{tmp_path}@epoch_2.pt") == 2


def test_several_of_a_step_are_told_with_the_name_of_one(tmp_path):
    for name in ("a", "b"):
        saved(tmp_path / "run" / f"{name}/step_5", 5)
    with pytest.raises(
        SourceNotFoundError,
        match=r"several checkpoints 'step=5' \(b/step_5, a/step_5\); name one of them, such as .*run@b/step_5",
    ):
        ckpt_tools.inspect(f"{tmp_path}/run@step=5")


def test_a_named_one_that_is_not_complete_is_told(run, caplog):
    (run / "checkpoints" / "epoch_9" / "IN_PROGRESS-9").touch()
    with caplog.at_level("WARNING", "ckpt_tools"):
        assert resolve_in_run(f"{run}@epoch_9", open_source) == f"{run}/checkpoints/epoch_9"
    assert caplog.messages == ["checkpoints/epoch_9 is not complete: the file IN_PROGRESS-9 marks it as unfinished"]


def test_what_is_called_so_comes_first(run):
    saved(run.parent / "run@latest", 5)
    assert step_of(f"{run}@latest") == 5


def test_tags_are_checkpoints_and_the_file_latest_says_which(tmp_path, checkpoint):
    made = checkpoint("zero3-fp32", "awkward", 2).checkpoint
    tag = (made / "latest").read_text()
    for number in (9, 10):
        shutil.copytree(made / tag, tmp_path / "run" / f"global_step{number}")
    with pytest.raises(UnsupportedError, match=r"tag=.*run@latest"):
        ckpt_tools.inspect(tmp_path / "run")
    assert ckpt_tools.inspect(f"{tmp_path}/run@step=9").source.endswith("global_step9")
    assert ckpt_tools.inspect(f"{tmp_path}/run@latest").source.endswith("global_step10")
    (tmp_path / "run" / "latest").write_text("global_step9")
    assert ckpt_tools.inspect(f"{tmp_path}/run@latest").source == f"{tmp_path}/run"


def test_the_source_is_protected_by_its_real_name(run):
    """The source is not replaced, whatever it is called."""
    there = sorted(run.rglob("*"))
    with pytest.raises(ckpt_tools.CkptError, match="is the source itself"):
        ckpt_tools.convert(f"{run}@latest", run / "checkpoints" / "epoch_10", to="torch", overwrite=True)
    assert sorted(run.rglob("*")) == there


@pytest.mark.parametrize(("files", "found"), [
    (["e_1/global_step5/mp_rank_00_model_states.pt", "e_2/global_step7/mp_rank_00_model_states.pt"], ["e_2", "e_1"]),
    (["c-5/pytorch_model_fsdp_0/.metadata", "c-5/optimizer_0/.metadata", "c-7/m.safetensors"], ["c-7", "c-5"]),
    (["t1/mp_rank_00_model_states.pt", "t1/zero/layer.0.weight/fp32.pt"], ["t1"]),
    ([".metadata", "model.pt", "notes/a.txt"], []),
])  # fmt: skip
def test_folders_of_checkpoints(files, found):
    members = find_members(Source(MemoryStore(), dict.fromkeys(files, 1)))
    assert [member.name for member in members if member.is_finished] == found


def test_urls_too(tmp_path):
    import fsspec

    store = fsspec.filesystem("memory")
    for epoch in (2, 10):
        folder = saved(tmp_path / f"epoch_{epoch}", epoch)
        store.put(str(folder / "model.pt"), f"/runs-of-test/epoch_{epoch}/model.pt")
    try:
        assert step_of("memory://runs-of-test/@latest") == 10
        assert step_of("memory://runs-of-test/@step=2") == 2
    finally:
        store.rm("/runs-of-test", recursive=True)


DOCS = Path(__file__).parent.parent.parent / "docs"
WRITTEN = [each.name for each in FORMATS.values() if each.writes and not each.asks_adapter_config]
"""A folder of PEFT is safetensors by its files."""
SHOWN = dict.fromkeys(["zero1", "zero2", "zero3"], "deepspeed")
"""The stage is in the files; ``ls`` reads names."""


@pytest.fixture
def model(tmp_path):
    torch.save({"model": torch.nn.Linear(3, 2).state_dict()}, tmp_path / "m.pt")
    return tmp_path / "m.pt"


@pytest.mark.parametrize("to", WRITTEN)
def test_a_run_lists_each_format_by_its_name_and_as_complete(to, model, tmp_path):
    saved = tmp_path / "run" / "step_1"
    ckpt_tools.convert(model, saved / f"m.{to}" if to in ("gguf", "npz") else saved, to=to)
    (listed,) = ckpt_tools.ls(tmp_path / "run").checkpoints
    assert (listed.format, listed.problem) == (SHOWN.get(to, to), None)
    names = (DOCS / "json.md").read_text().partition("The layouts of files are")[2].partition("\n\n")[0]
    assert f"`{listed.format}`" in names and "torch_dist" not in names


def test_a_megatron_checkpoint_in_a_folder_of_its_own_lacks_what_is_written_last(model, tmp_path):
    ckpt_tools.convert(model, tmp_path / "run" / "step_1", to="megatron")
    next((tmp_path / "run").rglob("metadata.json")).unlink()
    (listed,) = ckpt_tools.ls(tmp_path / "run").checkpoints
    assert listed.problem is not None and "metadata.json" in listed.problem


@pytest.mark.parametrize("to", WRITTEN)
def test_the_files_that_overwrite_replaces_are_documented(to, model, tmp_path):
    target = tmp_path / (f"x.{to}" if to in ("gguf", "npz") else to)
    ckpt_tools.convert(model, target, to=to)
    removed = ckpt_tools.convert(model, target, to=to, overwrite=True).plan.removed_files
    assert removed
    text = (DOCS / "crashes.md").read_text().partition("- DCP: `.metadata`")
    rows = re.findall(r"^- ([^:]+):", "".join(text[1:]).partition("\n\n")[0], re.MULTILINE)
    family = "DeepSpeed" if to.startswith("zero") else to
    assert any(family.lower() in row.lower() for row in rows), rows


NAMES = {
    "step_3": 3, "iter_0000010": 10, "epoch=1-step=242": 242, "12": 12, "epoch_4": None, "llama-3-8b": None,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_folder(name, tmp_path):
    run, step = tmp_path / "run", NAMES[name]
    (run / name).mkdir(parents=True)
    state = {"model": {"a.weight": torch.ones(2, 3)}, "note": "mine"}
    torch.save(state, run / name / "state.pt")
    assert ckpt_tools.inspect(run / name).step == ckpt_tools.open(run / name).step == step
    if step is not None and name != "12":
        assert [each.step for each in ckpt_tools.ls(run).checkpoints] == [step]
    ckpt_tools.convert(run / name, tmp_path / "zero", to="zero2")
    assert (tmp_path / "zero" / "latest").read_text() == f"global_step{step or 0}"
    assert ckpt_tools.inspect(tmp_path / "zero").step == (step or 0)
    assert ckpt_tools.verify(run / name, tmp_path / "zero").equal
    shutil.copytree(run / name, tmp_path / "step_99")
    assert ckpt_tools.verify(run / name, tmp_path / "step_99").equal, "a name is no content"
    assert ckpt_tools.diff(run / name, tmp_path / "step_99").equal


def test_a_file_and_what_it_says_itself(tmp_path):
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "model_step_8.pt")
    assert ckpt_tools.inspect(tmp_path / "model_step_8.pt").step == 8
    torch.save({"model": {"a.weight": torch.ones(2)}, "global_step": 5}, tmp_path / "model_step_8.pt")
    assert ckpt_tools.inspect(tmp_path / "model_step_8.pt").step == 5


@pytest.mark.extended
def test_a_step_of_orbax_without_metadata_at_the_top(tmp_path):
    """As versions before that file wrote it: the name tells Orbax that the step is finished."""
    import orbax.checkpoint as ocp

    shutil.copytree(make("orbax-manager").folder / "run", tmp_path / "run")
    step = tmp_path / "run" / "5"
    (step / "_CHECKPOINT_METADATA").unlink()
    assert ocp.path.step.is_checkpoint_finalized(step)
    found = {each.step: each.problem for each in ckpt_tools.ls(tmp_path / "run").checkpoints}
    assert found[5] is None and ckpt_tools.inspect(step).step == 5
