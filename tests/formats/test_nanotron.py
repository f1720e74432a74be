"""nanotron's boxes and intervals, and what is refused by name. The corpus compares whole checkpoints."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

import ckpt_tools
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.nanotron.geometry import NanotronTensorPart
from fixtures import corpus
from fixtures.corpus.nanotron import EMBEDDING
from tests.layouts.contents import contents, of_tensor
from tests.support.damage import Harm, changed, swap, unlink, updated
from tests.support.refusals import refusal_test

CORPUS = Path(__file__).parents[1] / "corpus" / "trainers"
RANKS = "pp-rank-0-of-2_tp-rank-0-of-2"


@pytest.fixture
def step(tmp_path):
    return shutil.copytree(corpus.make("nanotron").folder, tmp_path / "run/3")


def embedding(folder: Path) -> Path:
    return folder.joinpath("model", *EMBEDDING.split(".")[:-1], f"model_weight_{RANKS}.safetensors")


def rewritten(path: Path, **metadata: str) -> None:
    with safetensors.safe_open(path, "pt") as file:
        data, found = file.get_tensor("data"), dict(file.metadata())
    safetensors.torch.save_file({"data": data}, path, metadata=found | metadata)


@pytest.mark.parametrize("name", ["nanotron_fp32", "nanotron_tied"])
def test_genuine_checkpoints_are_read_bit_for_bit(name, tmp_path):
    """nanotron's own code wrote them (tests/corpus/trainers/README.md), and torch's AdamW alone the truth."""
    with zipfile.ZipFile(CORPUS / f"{name}.zip") as archive:
        archive.extractall(tmp_path)
    _, found = contents(tmp_path / "2")
    truth = {
        StateKey(fqn, slot): of_tensor(each)
        for fqn, slots in torch.load(tmp_path / "truth.pt").items()
        for slot, each in slots.items()
    }
    assert found == truth


class TestGeometry:
    @pytest.mark.parametrize(
        ("pairs", "error"),
        [
            ("0,4,2|None,None,None#0,2,None|None,None,None", UnsupportedError),
            ("0,5,None|None,None,None#0,5,None|None,None,None", MalformedError),
            ("0,2,None|None,None,None#0,3,None|None,None,None", MalformedError),
            ("0,2,None#0,2,None", MalformedError),
            ("", MalformedError),
            ("a,b,c|None,None,None#0,2,None|None,None,None", MalformedError),
        ],
    )
    def test_slices_that_are_no_boxes(self, pairs, error):
        with pytest.raises(error):
            NanotronTensorPart.parse(pairs, (8, 2), (4, 2))


class TestFolders:
    def test_latest_txt_chooses(self, step):
        shutil.copytree(step, step.parent / "10")
        with pytest.raises(UnsupportedError, match="several checkpoints here"):
            ckpt_tools.inspect(step.parent)
        (step.parent / "latest.txt").write_text("3\n")
        found = ckpt_tools.inspect(step.parent)
        assert (found.format, found.step, found.world_size) == ("nanotron", 2, 8)
        (step.parent / "latest.txt").write_text("4")
        with pytest.raises(IncompleteError, match=r"latest\.txt: it names '4'"):
            ckpt_tools.inspect(step.parent)


def refused(harm: Harm) -> Callable[[Path], object]:
    def call(folder: Path) -> object:
        step = Path(shutil.copytree(corpus.make("nanotron").folder, folder / "run/3"))
        harm(step)
        return ckpt_tools.inspect(step)

    return call


def other_intervals(step: Path) -> None:
    path = step / "optimizer/optimizer_config.json"
    config = json.loads(path.read_text())
    config["configs"]["param_name_to_dp_rank_offsets"][EMBEDDING]["0"] = ["0", "13"]
    path.write_text(json.dumps(config))


def exchanged(step: Path) -> None:
    one = embedding(step)
    swap(one.name, one.name.replace("tp-rank-0", "tp-rank-1"))(one.parent)


OPTIMIZER = "optimizer/optimizer_pp-{}-of-2_dp-{}-of-2_tp-0-of-2_exp-0-of-1.pt"
FIRST = OPTIMIZER.format(0, 0)
test_refused = refusal_test(
    *((f"version {version}", refused(lambda step, to=version: rewritten(embedding(step), version=to)), UnsupportedError,
        f"version '{version}' of nanotron's format") for version in ("1.1", "1.6", "2")),
    ("another version of the checkpoint",
        refused(lambda step: (step / "checkpoint_metadata.json").write_text('{"version": "1.0"}')), UnsupportedError,
        r"checkpoint_metadata\.json: it has version '1\.0'"),
    ("a missing rank", refused(lambda step: embedding(step).unlink()), MalformedError, EMBEDDING),
    ("ranks in another order", refused(exchanged), MalformedError, "not in the order of the ranks"),
    ("a missing file of the optimizer", refused(unlink(OPTIMIZER.format(1, 1))), IncompleteError,
        "it has 7 of the 8 files of the optimizer's ranks"),
    ("intervals of another rule", refused(other_intervals), UnsupportedError,
        r"its interval .* is \['0', '13'\], and by nanotron's rule"),
    ("a name too few", refused(changed(FIRST, lambda own: own["names"].pop(0))), MalformedError, "optimizer_pp-0"),
    ("a short moment", refused(changed(FIRST, lambda own: own["state"][0].update(exp_avg=torch.zeros(3)))),
        MalformedError, "optimizer_pp-0"),
    ("a scaler", refused(updated(FIRST, grad_scaler={})), UnsupportedError, "optimizer_pp-0"),
)  # fmt: skip
