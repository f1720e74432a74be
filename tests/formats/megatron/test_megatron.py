"""Megatron-Core's ``torch_dist``, read and written. The judge is megatron-core's own ``dist_checkpointing.load``."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckpt_tools
from ckpt_tools.core.boxes import Box
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.values import GlobalRef, Opaque
from ckpt_tools.errors import (
    IncompleteError,
    MalformedError,
    SeveralCheckpointsError,
    SourceNotFoundError,
    UnsupportedError,
)
from ckpt_tools.formats.megatron.common_state import CommonState, Group, Parameter, by_rule
from ckpt_tools.formats.megatron.names import extra_states, is_expert, num_dims, state_of
from ckpt_tools.formats.megatron.reader import boxes, piece_shape
from ckpt_tools.runs.opening import read_checkpoint
from fixtures import corpus, launch
from fixtures import megatron as mg
from fixtures.corpus.megatron import DENSE, FOLDER, MIXTURE
from fixtures.store import Fixture
from tests.end_to_end.test_matrix import assert_same_course, assert_same_state
from tests.layouts.contents import contents
from tests.support.ranks import for_ranks
from tests.support.truth import Truth

Checkpoint = Callable[[str, str, int], Fixture]

TRACKER = "latest_checkpointed_iteration.txt"


def loaded(folder: Path, job: mg.Job, grid: mg.Grid, expected: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """What Megatron loads on every rank of ``grid`` is the truth, bit for bit; the common state is returned."""
    found = launch.pool(grid.size).run(mg.load, str(folder / FOLDER), job, grid)
    truth = mg.by_key(job) if expected is None else expected
    for pieces, _ in found:
        mg.check(pieces, truth.__getitem__)
    commons = [common for _, common in found]
    return commons[0]  # type: ignore[no-any-return]


def renamed(folder: Path) -> None:
    """The checkpoint of a source without a step, which is iteration 0, as the iteration that ``loaded`` looks for."""
    (folder / "iter_0000000").rename(folder / FOLDER)
    (folder / TRACKER).write_text(str(mg.ITERATION))


def notes_of(path: Path) -> list[Note]:
    return list(read_checkpoint(path, ReadOptions())[1].notes)


class TestGeometry:
    """Tensors that are stored flattened, by hand."""

    def test_the_shape_of_a_piece(self):
        assert piece_shape((2, 3, 8), (4, 12)) == (2, 4)
        assert piece_shape((4, 1, 2, 6), (4, 3, 4)) == (1, 3, 2)
        assert piece_shape((1, 5), (5,)) == (5,)

    @pytest.mark.parametrize(
        ("stored", "shape"),
        [((2, 8), (4, 4)), ((3, 3, 8), (4, 12)), ((2, 3, 9), (4, 12)), ((0, 3, 8), (4, 12)), ((2, 3, 8, 1), (4, 12))],
    )
    def test_a_shape_that_does_not_fit(self, stored, shape):
        with pytest.raises(MalformedError, match="cannot be stored"):
            piece_shape(stored, shape)

    def test_an_interval_of_one_piece(self):
        """[4, 12] in pieces of [2, 4]: elements 3 to 7 of the piece at row 1, column 2 of the pieces."""
        found = list(boxes(Box((1, 2, 3), (2, 3, 7)), (2, 4)))
        assert found == [(Box((2, 11), (3, 12)), 0), (Box((3, 8), (4, 11)), 1)]

    def test_whole_pieces_side_by_side(self):
        found = list(boxes(Box((0, 1, 0), (1, 3, 8)), (2, 4)))
        assert found == [(Box((0, 4), (2, 8)), 0), (Box((0, 8), (2, 12)), 8)]

    def test_stacked_layers(self):
        found = list(boxes(Box((2, 1, 0), (3, 2, 2)), (1, 3)))
        assert found == [(Box((2, 3), (3, 5)), 0)]


class TestNames:
    def test_state(self):
        found = state_of("chained_1.optimizer.state.exp_avg.decoder.layers.mlp.weight")
        assert found is not None
        assert (found.name, found.slot, found.chain) == ("decoder.layers.mlp.weight", "exp_avg", 1)
        for master in ("param", "fp32_param"):
            found = state_of(f"optimizer.state.{master}.w.bias")
            assert found is not None and (found.name, found.slot, found.chain) == ("w.bias", "master", None)
        assert state_of("decoder.optimizer.state.exp_avg.w") is None
        assert state_of("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg") is None

    def test_experts_and_dims(self):
        expert = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
        assert is_expert(expert) and not is_expert("decoder.layers.mlp.shared_experts.linear_fc1.weight")
        assert num_dims(expert, 4) == num_dims("decoder.layers.mlp.linear_fc1.weight", 3) == 2
        assert num_dims("decoder.layers.7.input_layernorm.weight", 1) == num_dims("decoder.norm.weight", 1) == 1
        assert num_dims("decoder.layers.input_layernorm.weight", 2) == 1


class TestGroups:
    PARAMETERS = (
        Parameter("decoder.layers.mlp.linear_fc1.weight", 3, None),
        Parameter("decoder.layers.mlp.linear_fc1.bias", 2, None),
        Parameter("decoder.layers.self_attention.q_layernorm.weight", 2, None),
        Parameter("decoder.layers.mlp.experts.experts.linear_fc1.weight", 4, None),
    )

    def group(self, chain: int = 0, **options: Any) -> Group:
        return Group(chain, mg.group(**options))

    def test_by_rule(self):
        groups = [self.group(), self.group(wd_mult=0.0), self.group(1, is_expert_parallel=True)]
        names = [each.name for each in self.PARAMETERS]
        assert by_rule(groups, self.PARAMETERS) == [names[:1], names[1:3], names[3:]]
        assert by_rule(groups, self.PARAMETERS, decays_norms=True) == [[names[0], names[2]], names[1:2], names[3:]]

    def test_names_of_nemo(self):
        groups = [Group(0, {"pre_wd_mult": 1.0}), Group(0, {"pre_wd_mult": 0.0})]
        assert by_rule(groups, self.PARAMETERS[:2]) == [[self.PARAMETERS[0].name], [self.PARAMETERS[1].name]]

    def test_one_group_has_all(self):
        assert by_rule([self.group(lr_mult=3.0)], self.PARAMETERS) == [[each.name for each in self.PARAMETERS]]

    @pytest.mark.parametrize(
        "options", [{"lr_mult": 0.1}, {"is_decoupled_lr": True}, {}, {"wd_mult": 0.0, "is_expert_parallel": True}]
    )
    def test_other_groups_are_not_guessed(self, options):
        assert by_rule([self.group(), self.group(**options)], self.PARAMETERS) is None

    def test_what_is_not_guessed_is_said(self, tmp_path):
        """Two groups that differ in their learning rate alone, one of them without a rule."""
        run = shutil.copytree(corpus.make("megatron").folder, tmp_path / "run")
        path = run / FOLDER / "common.pt"
        common = torch.load(path, weights_only=False)
        common["optimizer"]["optimizer"]["param_groups"][1]["lr_mult"] = 0.1
        torch.save(common, path)
        manifest = read_checkpoint(run, ReadOptions())[1]
        assert [len(group.params) for group in manifest.groups] == [10, 0]
        assert any("all parameters are in the first one" in note.why for note in manifest.notes)


class TestCommonState:
    def test_args_are_a_namespace(self):
        made = Opaque(GlobalRef("argparse", "Namespace"), form="new", state={"vocab_size": 10})
        other = Opaque(GlobalRef("os", "system"), ("true",))
        assert CommonState({"args": made}, "x").args == {"vocab_size": 10}
        assert CommonState({"args": other}, "x").args == {} == CommonState({"args": 3}, "x").args

    @pytest.mark.parametrize("optimizer", [3, {}, [], [3], {0: 3}, {"param_groups": 3}, {"param_groups": [3]}])
    def test_another_optimizer_is_refused(self, optimizer):
        with pytest.raises(MalformedError, match="Megatron optimizer"):
            _ = CommonState({"optimizer": optimizer}, "common.pt").groups

    def test_forms_of_the_optimizer(self):
        plain = {"param_groups": [{"lr": 1.0}], "state": {"common_step": 7}}
        for form in (plain, {"optimizer": plain, "fp32_from_fp16_params": []}, {0: plain}, [plain]):
            state = CommonState({"optimizer": form}, "common.pt")
            (group,) = state.groups
            assert group.options == {"lr": 1.0} and state.step(group) == 7

    def test_not_a_dict(self):
        with pytest.raises(MalformedError, match="common state"):
            CommonState.of([], "common.pt")


class TestFolders:
    @pytest.fixture
    def run(self, tmp_path):
        return shutil.copytree(corpus.make("megatron-weights").folder, tmp_path / "run")

    def test_the_tracker_chooses(self, run):
        shutil.copytree(run / FOLDER, run / "iter_0000020")
        assert ckpt_tools.inspect(run).step == 10
        (run / TRACKER).write_text("20\n")
        source, _ = read_checkpoint(run, ReadOptions())
        manifest = read_checkpoint(run, ReadOptions())[1]
        assert all(path.startswith("iter_0000020/") for path in manifest.files), source

    def test_its_own_index_is_not_beside_it(self, run):
        """The only checkpoint of a run without a tracker, named by the run's folder."""
        (run / TRACKER).unlink()
        assert [note for note in notes_of(run) if note.outcome is Outcome.DROPPED] == []

    def test_release(self, run):
        (run / FOLDER).rename(run / "release")
        (run / TRACKER).write_text("release")
        assert ckpt_tools.inspect(run).format == "megatron"

    @pytest.mark.parametrize(
        ("text", "error"), [("", MalformedError), ("next", MalformedError), ("30", IncompleteError)]
    )
    def test_a_tracker_that_names_nothing(self, run, text, error):
        (run / TRACKER).write_text(text)
        with pytest.raises(error, match=TRACKER):
            ckpt_tools.inspect(run)

    def test_several_without_a_tracker(self, run):
        shutil.copytree(run / FOLDER, run / "iter_0000020")
        (run / TRACKER).unlink()
        with pytest.raises(UnsupportedError, match="several checkpoints here"):
            ckpt_tools.inspect(run)
        assert ckpt_tools.inspect(f"{run}@latest").format == "megatron"
        assert ckpt_tools.inspect(f"{run}@step=10").step == 10

    def test_the_step_of_a_common_state_without_one_is_that_of_the_folder(self, run):
        path = run / FOLDER / "common.pt"
        common = torch.load(path, weights_only=False)
        del common["iteration"]
        torch.save(common, path)
        assert ckpt_tools.inspect(run).step == 10

    @pytest.mark.parametrize("name", ["common.pt", ".metadata", "__0_0.distcp"])
    def test_a_missing_file(self, run, name):
        (run / FOLDER / name).unlink()
        with pytest.raises((IncompleteError, SourceNotFoundError)):
            ckpt_tools.inspect(run, from_="megatron")

    def test_what_lies_beside_is_named(self, run):
        (run / FOLDER / "tokenizer").mkdir()
        for name in ("run_config.yaml", "tokenizer/a.json", "tokenizer/b.json"):
            (run / FOLDER / name).write_text("{}")
        found = {(note.what, note.count) for note in notes_of(run) if note.outcome is Outcome.DROPPED}
        assert found == {(f"{FOLDER}/run_config.yaml", 1), (f"{FOLDER}/tokenizer", 2)}

    def test_how_the_optimizer_was_sharded_is_said_in_its_own_term(self, tmp_path):
        job, grid = mg.Job(mg.DENSE), mg.Grid(2, 1, 1)
        launch.pool(grid.size).run(mg.save, str(tmp_path), job, grid, "in_one_object")
        (note,) = [note for note in notes_of(tmp_path) if note.what == "optimizer state"]
        assert note.outcome is Outcome.DROPPED and "(dp_zero_gather_scatter)" in note.why

    @pytest.mark.parametrize("place", ["", FOLDER])
    def test_an_optimizer_in_layer_wise_files_alone_is_refused_by_name(self, run, place):
        for rank in range(2):
            torch.save({"state": {}}, run / place / f"layer_wise_optimizer_{rank}.pt")
        with pytest.raises(UnsupportedError, match=r"layer_wise_optimizer_0\.pt: it is the state of .*\(Muon\)"):
            ckpt_tools.inspect(run)

    def test_layer_wise_files_beside_an_optimizer_are_a_second_copy(self, tmp_path):
        made = shutil.copytree(corpus.make("megatron-experts").folder, tmp_path / "run")
        before = ckpt_tools.inspect(made)
        (made / "layer_wise_optimizer_0.pt").write_bytes(b"")
        assert ckpt_tools.inspect(made).num_tensors == before.num_tensors

    def test_a_file_of_the_legacy_format_by_itself(self):
        made = corpus.make("megatron-legacy")
        with pytest.raises(UnsupportedError, match="legacy format"):
            ckpt_tools.inspect(made.folder / FOLDER / "mp_rank_00" / "model_optim_rng.pt")

    def test_an_unknown_backend(self, run):
        (run / FOLDER / "metadata.json").write_text(json.dumps({"sharded_backend": "mystery"}))
        with pytest.raises(UnsupportedError, match="'mystery'"):
            ckpt_tools.inspect(run)


class TestHostile:
    """Nothing of it runs, and each is a named error."""

    @pytest.fixture
    def run(self, tmp_path):
        return shutil.copytree(corpus.make("megatron-weights").folder, tmp_path / "run")

    def test_a_pickle_that_calls(self, run, tmp_path):
        marker = tmp_path / "ran"
        torch.save({"args": _Calls(f"touch {marker}"), "iteration": 10}, run / FOLDER / "common.pt")
        assert not ckpt_tools.scan(run).clean
        ckpt_tools.convert(run, tmp_path / "out.safetensors")
        notes = ckpt_tools.convert(run, tmp_path / "out", to="megatron").plan.notes
        assert ("args", "it is of a class that Megatron's loader refuses") in {(note.what, note.why) for note in notes}
        assert ckpt_tools.scan(tmp_path / "out", allow_configuration=True).clean
        assert not marker.exists()

    def test_a_genuine_one_has_no_code(self):
        """Its ``_extra_state`` is configuration: TransformerEngine unpickles what it holds."""
        for name in ("megatron", "megatron-flattened", "megatron-common-item"):
            report = ckpt_tools.scan(corpus.make(name).source, allow_configuration=True)
            assert report.clean, (name, report)

    @pytest.mark.parametrize("common", [[], 3, "text"])
    def test_another_common_state(self, run, common):
        torch.save(common, run / FOLDER / "common.pt")
        with pytest.raises(MalformedError, match=r"common\.pt"):
            ckpt_tools.inspect(run)

    def test_state_without_a_weight(self, tmp_path):
        run = shutil.copytree(corpus.make("megatron").folder, tmp_path / "run")
        path = run / FOLDER / ".metadata"
        index = pickle.loads(path.read_bytes())
        del index.state_dict_metadata["output_layer.weight"]
        path.write_bytes(pickle.dumps(index))
        with pytest.raises(UnsupportedError, match=r"optimizer state of 'output_layer\.weight'"):
            ckpt_tools.inspect(run)

    @pytest.mark.parametrize("shape", [(3, 8), (0,), "text", (2, 2, 2, 2)])
    def test_another_shape_of_a_flattened_tensor(self, tmp_path, shape):
        run = shutil.copytree(corpus.make("megatron-flattened").folder, tmp_path / "run")
        key = "optimizer.state.exp_avg.output_layer.weight"
        launch.pool(1).run(mg.with_shape, str(run / FOLDER), key, shape)
        with pytest.raises(MalformedError, match=key):
            ckpt_tools.inspect(run)


class _Calls:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (self.command,)


GRIDS = [(mg.Grid(1, 2, 1), 1), (mg.Grid(1, 1, 2), 3)]
MORE_GRIDS = [(mg.Grid(2, 2, 1), 3), (mg.Grid(1, 2, 2), 4)]
"""Of four processes, each of which imports Megatron."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sizes" in metafunc.fixturenames:
        found = [*GRIDS, *MORE_GRIDS] if metafunc.config.getoption("--soak") else GRIDS
        metafunc.parametrize("sizes", found, ids=str)


class TestWritten:
    """What Megatron loads of our output."""

    def test_at_other_sizes(self, sizes, tmp_path):
        grid, ranks = sizes
        ckpt_tools.reshard(corpus.make("megatron").source, tmp_path / "out", world_size=ranks)
        common = loaded(tmp_path / "out", DENSE, grid)
        source = mg.common(DENSE)
        assert common["args"] == source["args"] and common["iteration"] == source["iteration"]
        assert common["optimizer"] == source["optimizer"]
        assert common["opt_param_scheduler"] == source["opt_param_scheduler"]

    def test_experts(self, tmp_path, pytestconfig):
        """The numbers of optimizers are no longer in the names, and the index says so."""
        grid = mg.Grid(2, 1, 2 if pytestconfig.getoption("--soak") else 1)
        for name in ("megatron-experts", "megatron-chained"):
            out = tmp_path / name
            ckpt_tools.convert(corpus.make(name).source, out, to="megatron", world_size=2)
            common = loaded(out, MIXTURE, grid)
            assert common["optimizer"] == mg.common(MIXTURE)["optimizer"]
            assert common["content_metadata"]["chained_optim_avoid_prefix"] is True

    @pytest.mark.parametrize("name", ["megatron-flattened", "megatron-common-item", "nemo-2"])
    def test_other_forms(self, name, tmp_path):
        ckpt_tools.convert(corpus.make(name).source, tmp_path / "out", to="megatron", world_size=2)
        loaded(tmp_path / "out", DENSE, mg.Grid(1, 2, 1))

    def test_through_a_dcp(self, tmp_path):
        """Weights are the masters there; Megatron loads them into its own type."""
        ckpt_tools.convert(corpus.make("megatron").source, tmp_path / "dcp", to="dcp", world_size=3)
        ckpt_tools.convert(tmp_path / "dcp", tmp_path / "out", to="megatron", world_size=2)
        common = loaded(tmp_path / "out", DENSE, mg.Grid(2, 1, 1))
        assert common["args"] == mg.common(DENSE)["args"]
        groups = common["optimizer"]["optimizer"]["param_groups"]
        for group, expected in zip(groups, (mg.DECAYS, mg.DOES_NOT), strict=True):
            assert {name: group[name] for name in expected} == expected

    def test_objects_are_kept(self, tmp_path):
        ckpt_tools.convert(corpus.make("megatron").source, tmp_path / "dcp", to="dcp")
        ckpt_tools.convert(tmp_path / "dcp", tmp_path / "out", to="megatron")
        for path in (corpus.make("megatron").source, tmp_path / "out"):
            extra = read_checkpoint(path, ReadOptions())[1].extra["megatron"]
            names = [name for name, _ in extra["objects"]]
            assert "rng_state/shard_0.0_1.2" in names and len(names) == 6

    def test_a_source_that_was_never_megatrons(self, tmp_path):
        """A file of weights: no optimizer, and a note on what cannot be made up."""
        weights = {name: tensor.contiguous() for name, tensor in mg.truth(DENSE).weights.items()}
        safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
        report = ckpt_tools.convert(tmp_path / "model.safetensors", tmp_path / "out", to="megatron")
        assert {note.what for note in report.plan.notes} == {"global_step", "Megatron's args"}
        job = mg.Job(mg.DENSE, master=None)
        renamed(tmp_path / "out")
        common = loaded(tmp_path / "out", job, mg.Grid(1, 2, 1))
        assert "optimizer" not in common

    def test_bits_of_16_bit_weights_without_masters(self, tmp_path):
        """Megatron asks for a master of each trained parameter: it is made from the weight."""
        weight, moment = torch.randn(4, 6).bfloat16(), torch.randn(4, 6)
        state = {"exp_avg": moment, "exp_avg_sq": moment.square(), "step": torch.tensor(5.0)}
        groups = [{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": ["w"]}]
        torch.save(
            {"model": {"w": weight}, "optim": {"state": {"w": state}, "param_groups": groups}}, tmp_path / "a.pt"
        )
        notes = ckpt_tools.convert(tmp_path / "a.pt", tmp_path / "out", to="megatron", state="all").plan.notes
        assert any("fp32 masters" in note.what for note in notes)
        job = mg.Job({"w": mg.Weight((4, 6))})
        renamed(tmp_path / "out")
        expected = {"w": weight, "optimizer.state.param.w": weight.float()}
        expected |= {f"optimizer.state.{slot}.w": state[slot] for slot in mg.MOMENTS}
        common = loaded(tmp_path / "out", job, mg.Grid(1, 1, 2), expected)
        group, added = common["optimizer"]["optimizer"]["param_groups"]
        assert group["wd_mult"] == 0.0 and group["lr"] == 0.1
        # Megatron looks for a group of weight decay for this matrix.
        assert added == group | {"wd_mult": 1.0}
        manifest, found = contents(tmp_path / "out")
        assert set(found) == {StateKey("w"), *(StateKey("w", slot) for slot in state)}
        assert manifest.groups[0].options == {name: value for name, value in groups[0].items() if name != "params"}


@pytest.mark.parametrize(
    ("name", "shape", "pieces"),
    [
        ("decoder.layers.mlp.linear_fc2.bias", (2, 8), ["shard_0_2", "shard_1_2"]),
        ("decoder.layers.1.mlp.linear_fc2.bias", (8,), ["shard_0_1"]),
        ("decoder.layers.mlp.experts.experts.linear_fc2.weight", (1, 2, 8, 4), ["shard_0.0_1.2", "shard_0.1_1.2"]),
        ("decoder.layers.1.mlp.experts.experts.0.linear_fc2.weight", (8, 4), ["shard_0_1"]),
        ("decoder.layers.0.mixer.in_proj.weight.z", (8, 4), ["shard_0_1"]),
        ("decoder.layers.0.mixer.A_log", (8,), []),
        ("embedding.word_embeddings.weight", (8, 4), []),
    ],
)
def test_objects_that_modules_ask_for(name, shape, pieces):
    module = re.split(r"\.(?:weight|bias)", name)[0]
    assert extra_states({name: shape}) == [f"{module}._extra_state/{piece}" for piece in pieces]


class TestResumed:
    """Through Megatron's form and on: real optimizers continue as if nothing had happened."""

    @pytest.mark.parametrize(
        ("source", "to", "kind"),
        [
            ("fsdp2", "zero3", "zero3-fp32"),
            ("fsdp2", "dcp", "fsdp2"),
            ("zero2-fp32", "universal", "universal-zero2-fp32"),
        ],
    )
    def test_losses_are_the_same(self, source, to, kind, checkpoint, resume, tmp_path):
        case = "plain" if to == "universal" else "awkward"
        made = checkpoint(source, case, 2)
        ckpt_tools.convert(made.checkpoint, tmp_path / "megatron", to="megatron", state="all", world_size=3)
        ckpt_tools.convert(tmp_path / "megatron", tmp_path / "out", to=to, **for_ranks(to, 1))
        truth, resumed = Truth.load(made.root), resume(kind, case, tmp_path / "out", 1)
        assert_same_state(truth, resumed)
        assert_same_course(truth, resumed, exactly=False)


class TestPartsOfVerl:
    """Layout 2 of verl's Megatron backend, whose file of contents is as it writes it. Genuine ones, with an optimizer,
    are in ``tests/end_to_end/test_verl_parts.py``."""

    def folder(self, root: Path, optimizer: str | None = None) -> Path:
        actor = root / "global_step_5/actor"
        shutil.copytree(corpus.make("megatron-weights").folder / FOLDER, actor / "model/dist_ckpt")
        parts = {"model": "model/dist_ckpt"}
        if optimizer is not None:
            shutil.copytree(corpus.make(optimizer).folder / FOLDER, actor / "optimizer/dist_ckpt")
            parts["optimizer"] = "optimizer/dist_ckpt"
        self.write(actor, {name: {"path": path, "format": "megatron_dist_checkpoint"} for name, path in parts.items()})
        return actor

    def write(self, actor: Path, contents: dict[str, Any]) -> None:
        about = {"schema_version": 2, "framework": "megatron", "global_step": 5, "contents": contents}
        (actor / "ckpt_contents.json").write_text(json.dumps(about))

    def test_weights_without_an_optimizer(self, tmp_path):
        actor = self.folder(tmp_path)
        found = ckpt_tools.inspect(actor.parent)
        assert (found.format, found.step) == ("megatron", 5)
        report = ckpt_tools.diff(actor, actor / "model/dist_ckpt", state="model")
        assert report.equal and report.num_tensors == 10

    def test_other_formats_are_not_looked_for(self, tmp_path):
        with pytest.raises(UnsupportedError, match="read as megatron"):
            ckpt_tools.inspect(self.folder(tmp_path), from_="dcp")

    def test_an_optimizer_with_weights_of_its_own(self, tmp_path):
        with pytest.raises(UnsupportedError, match="there are weights here and in the folder of the model"):
            ckpt_tools.inspect(self.folder(tmp_path, "megatron-experts"))

    def test_actor_and_critic(self, tmp_path):
        actor = self.folder(tmp_path)
        shutil.copytree(actor, actor.parent / "critic")
        with pytest.raises(SeveralCheckpointsError, match=r"there are several checkpoints here \(.*actor.*critic"):
            ckpt_tools.inspect(actor.parent)

    @pytest.mark.parametrize(
        ("contents", "why"),
        [
            ({"optimizer": {"path": "model/dist_ckpt"}}, "it states no weights"),
            (
                {"model": {"path": "model/dist_ckpt", "format": "zarr"}},
                "weights of the format 'zarr' are not supported",
            ),
        ],
    )
    def test_parts_that_are_not_read(self, contents, why, tmp_path):
        actor = self.folder(tmp_path)
        self.write(actor, contents)
        with pytest.raises(UnsupportedError, match=why):
            ckpt_tools.inspect(actor)

    @pytest.mark.parametrize("name", ["model/other", "../model/dist_ckpt", 3, None])
    def test_a_part_that_is_not_there(self, name, tmp_path):
        actor = self.folder(tmp_path)
        self.write(actor, {"model": {"path": name, "format": "megatron_dist_checkpoint"}})
        with pytest.raises(MalformedError, match="there is no such folder"):
            ckpt_tools.inspect(actor)

    @pytest.mark.parametrize("text", ["[]", "{", '{"contents": [1]}', '{"contents": {"model": 1}}'])
    def test_a_damaged_list(self, tmp_path, text):
        actor = self.folder(tmp_path)
        (actor / "ckpt_contents.json").write_text(text)
        with pytest.raises(MalformedError, match=r"ckpt_contents\.json"):
            ckpt_tools.inspect(actor)
