"""``hf://`` as source and destination, by huggingface_hub's own client against a hub on loopback."""

import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import load, save_file

import ckpt_tools
from ckpt_tools import CkptError, DestinationExistsError, SourceNotFoundError, StoreError, UsageError
from tests.support.hub_server import Hub, files_in, running_hub

# Of huggingface_hub 2.4, where it uploads by LFS.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

MODEL = "org/model"


def tensors(first: float) -> dict[str, Any]:
    return {f"layers.{n}.weight": np.full((8, 16), first + n, np.float32) for n in range(4)}


def written(folder: Path, first: float) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors(first), folder / "model.safetensors")
    return folder


@pytest.fixture(autouse=True)
def without_xet(monkeypatch):
    """As HF_HUB_DISABLE_XET=1 says, which the client reads once: uploads are by LFS."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@pytest.fixture
def hub(tmp_path):
    written(tmp_path / "hub" / MODEL, 1)
    (tmp_path / "hub/org/empty").mkdir()
    (tmp_path / "hub/org/empty/.gitattributes").write_text("*.safetensors filter=lfs\n")
    written(tmp_path / "hub/buckets/org/bucket/run", 5)
    with running_hub(tmp_path / "hub") as running:
        yield running


def options(hub: Hub) -> dict[str, Any]:
    return {"endpoint": hub.endpoint, "token": False}


def convert(hub: Hub, source: str | Path, out: str | Path, **more: Any) -> None:
    ckpt_tools.convert(source, out, storage_options=options(hub), **more)


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("url", "first"),
    [
        pytest.param("hf://org/model", 1, marks=pytest.mark.extended),
        ("hf://org/model@main/model.safetensors", 1),
        pytest.param("hf://models/org/model", 1, marks=pytest.mark.extended),
        pytest.param("hf://buckets/org/bucket/run", 5, marks=pytest.mark.extended),
        ("hf://buckets/org/bucket/run/model.safetensors", 5),
    ],
)
def test_a_source(url, first, hub, tmp_path):
    convert(hub, url, tmp_path / "out.safetensors")
    assert same(load((tmp_path / "out.safetensors").read_bytes()), tensors(first))


def test_a_branch_that_moves_does_not_mix_two_versions(hub, tmp_path):
    checkpoint = ckpt_tools.open(f"hf://{MODEL}", storage_options=options(hub))
    hub.push(MODEL, files_in(written(tmp_path / "new", 50)))
    again = ckpt_tools.open(f"hf://{MODEL}", storage_options=options(hub))
    for opened, first in ((checkpoint, 1), (again, 50)):
        assert same({name: opened[name].numpy() for name in tensors(1)}, tensors(first))


def test_a_tensor_is_read_by_its_range(hub, tmp_path):
    big = {"a": np.arange(3 << 20, dtype=np.float32), "b": np.arange(4, dtype=np.float32)}
    (tmp_path / "big").mkdir()
    save_file(big, tmp_path / "big" / "model.safetensors")
    hub.push(MODEL, files_in(tmp_path / "big"))
    found = ckpt_tools.open(f"hf://{MODEL}", storage_options=options(hub))
    hub.ranges.clear()
    assert np.array_equal(found["b"].numpy(), big["b"])
    assert sum(stop - start for start, stop in hub.ranges) < 2 << 20


def test_a_file_is_written_below_a_folder_of_a_branch(hub, tmp_path):
    url = "hf://org/empty@main/step_5/model.safetensors"
    convert(hub, tmp_path / "hub" / MODEL, url, checksum=True)
    assert same(load(hub.files("org/empty")["step_5/model.safetensors"]), tensors(1))
    assert ckpt_tools.verify(url, storage_options=options(hub)).equal


def test_an_old_checkpoint_is_replaced_in_one_commit(hub, tmp_path):
    url, source = f"hf://{MODEL}", written(tmp_path / "new", 9)
    hub.push(MODEL, {**hub.files(MODEL), "README.md": b"a model"})
    with pytest.raises(DestinationExistsError, match="exists; choose another"):
        convert(hub, source, url, to="dcp", world_size=1)
    convert(hub, source, url, to="dcp", world_size=1, overwrite=True)
    assert len(hub.commits(MODEL)) == 3
    assert "model.safetensors" not in hub.files(MODEL) and {"README.md", ".metadata"} < hub.files(MODEL).keys()


def test_a_commit_of_another_program_is_not_overwritten(hub, tmp_path):
    """It comes between the look at the place and the commit: while the large file is sent."""
    (tmp_path / "hub" / MODEL).rename(tmp_path / "source")

    class Blobs(dict[str, bytes]):
        def __setitem__(self, key: str, value: bytes) -> None:
            super().__setitem__(key, value)
            hub.push("org/empty", {"theirs": b"1"})

    hub.blobs = Blobs()
    with pytest.raises(DestinationExistsError, match="a new commit of another program; nothing was replaced"):
        convert(hub, tmp_path / "source", "hf://org/empty", to="safetensors")
    assert hub.files("org/empty") == {"theirs": b"1"}


def refusal(hub: Hub, source: str | Path, destination: str | Path) -> CkptError:
    with pytest.raises(CkptError) as found:
        convert(hub, source, destination, to="safetensors")
    assert "\n" not in str(found.value)
    return found.value


@pytest.mark.parametrize(
    ("status", "code", "kind", "sentence"),
    [
        (401, "RepoNotFound", StoreError, "hf auth login"),
        (403, "GatedRepo", StoreError, "ask for access on its page"),
        (404, "RepoNotFound", SourceNotFoundError, "there is no file or folder hf://org/model"),
    ],
)
def test_a_repository_that_cannot_be_read(status, code, kind, sentence, hub, tmp_path):
    hub.refused[MODEL] = status, code
    token = "hf_" + "abcdefgh" * 4
    with pytest.raises(kind, match=sentence) as found:
        ckpt_tools.convert(f"hf://{MODEL}", tmp_path / "out.pt", storage_options={**options(hub), "token": token})
    error = found.value
    assert "\n" not in str(error) and token not in "".join(traceback.format_exception(error))
    assert error.exit_code == (3 if kind is SourceNotFoundError else 5)


@pytest.mark.parametrize("url", ["hf://org/model@none", "hf://org/model/none", "hf://buckets/org/none"])
def test_what_is_not_there(url, hub, tmp_path):
    assert type(refusal(hub, url, tmp_path / "out")) is SourceNotFoundError


@pytest.mark.extended
def test_a_busy_hub_is_asked_again(hub, tmp_path):
    hub.busy = 1
    convert(hub, f"hf://{MODEL}", tmp_path / "out.safetensors")
    assert hub.busy == 0


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("hf://buckets/org/bucket/out", "hf buckets sync FOLDER hf://buckets/org/bucket/out"),
        ("hf://org/none", "hf repos create"),
        ("hf://org", "write hf://ORG/NAME"),
        ("hf://org/ignoring/out", "remove .gitignore"),
    ],
)
def test_a_destination_that_is_refused(url, sentence, hub, tmp_path):
    hub.push("org/ignoring", {".gitignore": b"*.safetensors"})
    error = refusal(hub, tmp_path / "hub" / MODEL, url)
    assert isinstance(error, UsageError) and sentence in str(error)


def test_a_failed_conversion_leaves_nothing(hub, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "bad").mkdir()
    data = (tmp_path / "hub" / MODEL / "model.safetensors").read_bytes()
    (tmp_path / "bad" / "model.safetensors").write_bytes(data[:-1])
    refusal(hub, tmp_path / "bad", "hf://org/empty")
    assert len(hub.commits("org/empty")) == 1 and not list((tmp_path / "tmp").iterdir())


@pytest.mark.extended
def test_a_run_is_listed_and_not_pruned(hub, tmp_path):
    for step in (1, 2):
        folder = tmp_path / "run" / f"step_{step}"
        ckpt_tools.convert(tmp_path / "hub" / MODEL, folder, to="dcp", world_size=1)
    hub.push("org/empty", files_in(tmp_path / "run"))
    assert len(ckpt_tools.ls("hf://org/empty", storage_options=options(hub)).checkpoints) == 2
    with pytest.raises(UsageError, match="hf repos delete-files"):
        ckpt_tools.prune("hf://org/empty", keep_last=1, yes=True, storage_options=options(hub))
    assert len(hub.commits("org/empty")) == 1
