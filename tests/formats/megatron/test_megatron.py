"""Megatron-Core's ``torch_dist``, read and written. The judge is megatron-core's own ``dist_checkpointing.load``."""

import json
import os
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
from ckpt_tools.core.notes import Outcome
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import IncompleteError, MalformedError, SeveralCheckpointsError, UnsupportedError
from ckpt_tools.formats.megatron.common_state import CommonState, StoredGroup, TrainedParameter, assign_members_by_rule
from ckpt_tools.formats.megatron.reader import find_piece_shape, split_into_boxes
from ckpt_tools.formats.megatron.tensor_names import count_dims, is_expert, list_extra_states, parse_state_name
from ckpt_tools.runs.opening import open_checkpoint
from fixtures import corpus, launch
from fixtures import megatron as mg
from fixtures.corpus.megatron import DENSE, FOLDER, MIXTURE
from tests.end_to_end.test_matrix import assert_same_course, assert_same_state
from tests.layouts.contents import contents
from tests.support.damage import Harm, unlink
from tests.support.ranks import for_ranks
from tests.support.refusals import refusal_test
from tests.support.saved_files import change_file
from tests.support.sweep import extended
from tests.support.truth import Truth

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


class TestGeometry:
    """Tensors that are stored flattened, by hand."""

    def test_the_shape_of_a_piece(self):
        assert find_piece_shape((2, 3, 8), (4, 12)) == (2, 4)
        assert find_piece_shape((4, 1, 2, 6), (4, 3, 4)) == (1, 3, 2)
        assert find_piece_shape((1, 5), (5,)) == (5,)

    @pytest.mark.parametrize(
        ("stored", "shape"),
        [((2, 8), (4, 4)), ((3, 3, 8), (4, 12)), ((2, 3, 9), (4, 12)), ((0, 3, 8), (4, 12)), ((2, 3, 8, 1), (4, 12))],
    )
    def test_a_shape_that_does_not_fit(self, stored, shape):
        with pytest.raises(MalformedError, match="cannot be stored"):
            find_piece_shape(stored, shape)

    @pytest.mark.parametrize(
        ("stored", "piece", "expected"),
        [
            # [4, 12] in pieces of [2, 4]: elements 3 to 7 of the piece at row 1, column 2 of the pieces.
            (Box((1, 2, 3), (2, 3, 7)), (2, 4), [(Box((2, 11), (3, 12)), 0), (Box((3, 8), (4, 11)), 1)]),
            (Box((0, 1, 0), (1, 3, 8)), (2, 4), [(Box((0, 4), (2, 8)), 0), (Box((0, 8), (2, 12)), 8)]),
            (Box((2, 1, 0), (3, 2, 2)), (1, 3), [(Box((2, 3), (3, 5)), 0)]),
        ],
        ids=["an interval of one piece", "whole pieces side by side", "stacked layers"],
    )
    def test_where_elements_lie(self, stored, piece, expected):
        assert list(split_into_boxes(stored, piece)) == expected


class TestNames:
    def test_state(self):
        found = parse_state_name("chained_1.optimizer.state.exp_avg.decoder.layers.mlp.weight")
        assert found is not None
        assert (found.name, found.slot, found.optimizer_number) == ("decoder.layers.mlp.weight", "exp_avg", 1)
        for master in ("param", "fp32_param"):
            found = parse_state_name(f"optimizer.state.{master}.w.bias")
            assert found is not None and (found.name, found.slot, found.optimizer_number) == ("w.bias", "master", None)
        assert parse_state_name("decoder.optimizer.state.exp_avg.w") is None
        assert parse_state_name("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg") is None

    def test_experts_and_dims(self):
        expert = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
        assert is_expert(expert) and not is_expert("decoder.layers.mlp.shared_experts.linear_fc1.weight")
        assert count_dims(expert, 4) == count_dims("decoder.layers.mlp.linear_fc1.weight", 3) == 2
        assert count_dims("decoder.layers.7.input_layernorm.weight", 1) == count_dims("decoder.norm.weight", 1) == 1
        assert count_dims("decoder.layers.input_layernorm.weight", 2) == 1


class TestGroups:
    PARAMETERS = (
        TrainedParameter("decoder.layers.mlp.linear_fc1.weight", 3, None),
        TrainedParameter("decoder.layers.mlp.linear_fc1.bias", 2, None),
        TrainedParameter("decoder.layers.self_attention.q_layernorm.weight", 2, None),
        TrainedParameter("decoder.layers.mlp.experts.experts.linear_fc1.weight", 4, None),
    )

    def group(self, chain: int = 0, **options: Any) -> StoredGroup:
        return StoredGroup(chain, mg.group(**options))

    def test_by_rule(self):
        groups = [self.group(), self.group(wd_mult=0.0), self.group(1, is_expert_parallel=True)]
        names = [each.name for each in self.PARAMETERS]
        assert assign_members_by_rule(groups, self.PARAMETERS) == [names[:1], names[1:3], names[3:]]
        assert assign_members_by_rule(groups, self.PARAMETERS, decays_norms=True) == [
            [names[0], names[2]],
            names[1:2],
            names[3:],
        ]
        assert assign_members_by_rule([self.group(lr_mult=3.0)], self.PARAMETERS) == [names], "one group has all"
        of_nemo = [StoredGroup(0, {"pre_wd_mult": 1.0}), StoredGroup(0, {"pre_wd_mult": 0.0})]
        assert assign_members_by_rule(of_nemo, self.PARAMETERS[:2]) == [names[:1], names[1:2]]

    @pytest.mark.parametrize(
        "options", [{"lr_mult": 0.1}, {"is_decoupled_lr": True}, {}, {"wd_mult": 0.0, "is_expert_parallel": True}]
    )
    def test_other_groups_are_not_guessed(self, options):
        assert assign_members_by_rule([self.group(), self.group(**options)], self.PARAMETERS) is None


class TestCommonState:
    @pytest.mark.parametrize("optimizer", [3, {}, [], [3], {0: 3}, {"param_groups": 3}, {"param_groups": [3]}])
    def test_another_state_is_refused(self, optimizer):
        with pytest.raises(MalformedError, match="Megatron optimizer"):
            _ = CommonState({"optimizer": optimizer}, "common.pt").groups
        with pytest.raises(MalformedError, match="common state"):
            CommonState.of([], "common.pt")

    def test_forms_of_the_optimizer(self):
        plain = {"param_groups": [{"lr": 1.0}], "state": {"common_step": 7}}
        for form in (plain, {"optimizer": plain, "fp32_from_fp16_params": []}, {0: plain}, [plain]):
            state = CommonState({"optimizer": form}, "common.pt")
            (group,) = state.groups
            assert group.options == {"lr": 1.0} and state.get_step(group) == 7


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(corpus.make("megatron").folder, tmp_path / "run")


def refused(*harms: Harm, layout: str = "megatron", **options: Any) -> Callable[[Path], object]:
    """A call that does this to a copy of a layout, and reads it."""

    def call(folder: Path) -> object:
        made = Path(shutil.copytree(corpus.make(layout).folder, folder / "run"))
        for harm in harms:
            harm(made)
        return ckpt_tools.inspect(made, **options)

    return call


def written(name: str, text: str) -> Harm:
    return lambda run: (run / name).write_text(text)


def twice(run: Path) -> None:
    shutil.copytree(run / FOLDER, run / "iter_0000020")


def saved(name: str, value: Any) -> Harm:
    return lambda run: torch.save(value, run / name)


def without_output(run: Path) -> None:
    path = run / FOLDER / ".metadata"
    index = pickle.loads(path.read_bytes())
    del index.state_dict_metadata["output_layer.weight"]
    path.write_bytes(pickle.dumps(index))


COMMON, MYSTERY = f"{FOLDER}/common.pt", '{"sharded_backend": "mystery"}'
test_refused = refusal_test(
    ("an empty tracker", refused(written(TRACKER, "")), MalformedError, TRACKER),
    ("a tracker without a number", refused(written(TRACKER, "next")), MalformedError, TRACKER),
    ("a tracker that names nothing", refused(written(TRACKER, "30")), IncompleteError, TRACKER),
    ("no tracker", refused(twice, unlink(TRACKER)), SeveralCheckpointsError, "several checkpoints here"),
    ("no common state", refused(unlink(COMMON), from_="megatron"), IncompleteError, "common"),
    ("no index", refused(unlink(f"{FOLDER}/.metadata"), from_="megatron"), IncompleteError, r"\.metadata"),
    ("no data", refused(unlink(f"{FOLDER}/__0_0.distcp"), from_="megatron"), IncompleteError, "__0_0"),
    (
        "a file of the legacy format",
        lambda _: ckpt_tools.inspect(corpus.make("megatron-legacy").folder / FOLDER / "mp_rank_00/model_optim_rng.pt"),
        UnsupportedError,
        "legacy format",
    ),
    ("an unknown backend", refused(written(f"{FOLDER}/metadata.json", MYSTERY)), UnsupportedError, "'mystery'"),
    *((f"common {each!r}", refused(saved(COMMON, each)), MalformedError, "common") for each in ([], 3, "text")),
    ("no weight", refused(without_output), UnsupportedError, r"optimizer state of 'output_layer\.weight'"),
)


MUON = r"layer_wise_optimizer_0\.pt: it is the state of .*\(Muon\)"
test_an_optimizer_in_layer_wise_files_alone_is_refused_by_name = pytest.mark.extended(
    refusal_test(
        *((name, refused(saved(name, {}), layout="megatron-weights"), UnsupportedError,
            MUON) for name in ("layer_wise_optimizer_0.pt", f"{FOLDER}/layer_wise_optimizer_0.pt")),
    ),
)  # fmt: skip


class TestFolders:
    def test_the_tracker_chooses(self, run):
        twice(run)
        assert ckpt_tools.inspect(run).step == 10
        (run / TRACKER).write_text("20\n")
        manifest = open_checkpoint(run, ReadOptions()).manifest
        assert {path.partition("/")[0] for path in manifest.files - manifest.literals.keys()} == {"iter_0000020"}
        (run / TRACKER).unlink()
        assert ckpt_tools.inspect(f"{run}@latest").format == "megatron"
        assert ckpt_tools.inspect(f"{run}@step=10").step == 10

    def test_names_of_folders(self, run):
        """The only checkpoint of a run without a tracker, whose index is not beside it; and one without a number."""
        change_file(run / COMMON, lambda common: common.pop("iteration"))
        assert ckpt_tools.inspect(run).step == 10
        (run / TRACKER).unlink()
        assert [
            note for note in open_checkpoint(run, ReadOptions()).manifest.notes if note.outcome is Outcome.DROPPED
        ] == []
        (run / FOLDER).rename(run / "release")
        (run / TRACKER).write_text("release")
        assert ckpt_tools.inspect(run).format == "megatron"


class TestHostile:
    """Nothing of it runs, and each is a named error."""

    def test_a_pickle_that_calls(self, run, tmp_path):
        marker = tmp_path / "ran"
        change_file(run / COMMON, lambda common: common.update(args=_Calls(f"touch {marker}")))
        assert not ckpt_tools.scan(run).clean
        ckpt_tools.convert(run, tmp_path / "out.safetensors")
        notes = ckpt_tools.convert(run, tmp_path / "out", to="megatron").plan.notes
        assert ("args", "it is of a class that Megatron's loader refuses") in {(note.what, note.why) for note in notes}
        assert ckpt_tools.scan(tmp_path / "out", allow_configuration=True).clean
        assert not marker.exists()

    @pytest.mark.extended
    @pytest.mark.parametrize("shape", [(3, 8), (0,), "text", (2, 2, 2, 2)])
    def test_another_shape_of_a_flattened_tensor(self, tmp_path, shape):
        run = Path(shutil.copytree(corpus.make("megatron-flattened").folder, tmp_path / "run"))
        key = "optimizer.state.exp_avg.output_layer.weight"
        launch.pool(1).run(mg.with_shape, run / FOLDER / ".metadata", key, shape)
        with pytest.raises(MalformedError, match=key):
            ckpt_tools.inspect(run)


class _Calls:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


ALONE = mg.Grid(1, 1, 1)
GRIDS = [(mg.Grid(1, 2, 1), 1), (mg.Grid(1, 1, 2), 3)]
MORE_GRIDS = [(mg.Grid(2, 2, 1), 3), (mg.Grid(1, 2, 2), 4)]
"""Of two and four processes, each of which imports Megatron."""
SIZES = [(ALONE, 3), *extended(*GRIDS), *(pytest.param(*each, marks=pytest.mark.soak) for each in MORE_GRIDS)]


@pytest.mark.judges
class TestWritten:
    """What Megatron loads of our output."""

    @pytest.mark.parametrize(("grid", "ranks"), SIZES)
    def test_at_other_sizes(self, grid, ranks, tmp_path):
        ckpt_tools.reshard(corpus.make("megatron").source, tmp_path / "out", world_size=ranks)
        common = loaded(tmp_path / "out", DENSE, grid)
        source = mg.common(DENSE)
        assert common["args"] == source["args"] and common["iteration"] == source["iteration"]
        assert common["optimizer"] == source["optimizer"]
        assert common["opt_param_scheduler"] == source["opt_param_scheduler"]

    @pytest.mark.extended
    def test_experts(self, tmp_path, pytestconfig):
        """The numbers of optimizers are no longer in the names, and the index says so."""
        grid = mg.Grid(2, 1, 2 if pytestconfig.getoption("--soak") else 1)
        for name in ("megatron-experts", "megatron-chained"):
            out = tmp_path / name
            ckpt_tools.convert(corpus.make(name).source, out, to="megatron", world_size=2)
            common = loaded(out, MIXTURE, grid)
            assert common["optimizer"] == mg.common(MIXTURE)["optimizer"]
            assert common["content_metadata"]["chained_optim_avoid_prefix"] is True

    @pytest.mark.extended
    @pytest.mark.parametrize("name", ["megatron-flattened", "megatron-common-item", "nemo-2"])
    def test_other_forms(self, name, tmp_path):
        ckpt_tools.convert(corpus.make(name).source, tmp_path / "out", to="megatron", world_size=2)
        loaded(tmp_path / "out", DENSE, mg.Grid(1, 2, 1))

    def test_objects_are_kept(self, tmp_path):
        ckpt_tools.convert(corpus.make("megatron").source, tmp_path / "dcp", to="dcp")
        ckpt_tools.convert(tmp_path / "dcp", tmp_path / "out", to="megatron")
        for path in (corpus.make("megatron").source, tmp_path / "out"):
            extra = open_checkpoint(path, ReadOptions()).manifest.extra["megatron"]
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
        common = loaded(tmp_path / "out", job, ALONE)
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
        common = loaded(tmp_path / "out", job, ALONE, expected)
        group, added = common["optimizer"]["optimizer"]["param_groups"]
        assert group["wd_mult"] == 0.0 and group["lr"] == 0.1
        # Megatron looks for a group of weight decay for this matrix.
        assert added == group | {"wd_mult": 1.0}
        manifest, found = contents(tmp_path / "out")
        assert set(found) == {StateKey("w"), *(StateKey("w", slot) for slot in state)}
        assert manifest.groups[0].options == {name: value for name, value in groups[0].items() if name != "params"}


def test_groups_that_are_by_megatrons_rule_are_all_that_it_gets(tmp_path):
    model, state = {"w": torch.randn(4, 6), "w.bias": torch.randn(4)}, {}
    for name, tensor in model.items():
        state[name] = {"exp_avg": tensor, "exp_avg_sq": tensor.square(), "step": torch.tensor(5.0)}
    groups = [
        {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": decay, "params": [name]}
        for name, decay in (("w", 0.1), ("w.bias", 0.0))
    ]
    torch.save({"model": model, "optim": {"state": state, "param_groups": groups}}, tmp_path / "a.pt")
    ckpt_tools.convert(tmp_path / "a.pt", tmp_path / "out", to="megatron", state="all")
    (common,) = (tmp_path / "out").rglob("common.pt")
    found = torch.load(common, weights_only=False)["optimizer"]["optimizer"]["param_groups"]
    assert [(group["wd_mult"], group["weight_decay"]) for group in found] == [(1.0, 0.1), (0.0, 0.0)]


@pytest.mark.parametrize(
    ("name", "shape", "pieces"),
    [
        ("decoder.layers.mlp.linear_fc2.bias", (2, 8), ["shard_0_2", "shard_1_2"]),
        ("decoder.layers.mlp.experts.experts.linear_fc2.weight", (1, 2, 8, 4), ["shard_0.0_1.2", "shard_0.1_1.2"]),
        ("decoder.layers.1.mlp.experts.experts.0.linear_fc2.weight", (8, 4), ["shard_0_1"]),
        ("decoder.layers.0.mixer.in_proj.weight.z", (8, 4), ["shard_0_1"]),
    ],
)
def test_objects_that_modules_ask_for(name, shape, pieces):
    module = re.split(r"\.(?:weight|bias)", name)[0]
    assert list_extra_states({name: shape}) == [f"{module}._extra_state/{piece}" for piece in pieces]


class TestResumed:
    """Through Megatron's form and on: real optimizers continue as if nothing had happened."""

    @pytest.mark.parametrize(
        ("source", "to", "kind"),
        [
            ("fsdp2", "zero3", "zero3-fp32"),
            *extended(("fsdp2", "dcp", "fsdp2"), ("zero2-fp32", "universal", "universal-zero2-fp32")),
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


def verl_parts(root: Path, model: str = "model/dist_ckpt", optimizer: str | None = None, **more: str) -> Path:
    """Layout 2 of verl's Megatron backend, whose file of contents is as it writes it. Genuine ones are in
    ``tests/end_to_end/test_verl_parts.py``."""
    actor = root / "global_step_5/actor"
    shutil.copytree(corpus.make("megatron").folder / FOLDER, actor / "model/dist_ckpt")
    stated = {"model": {"path": model, "format": "megatron_dist_checkpoint", **more}}
    if optimizer is not None:
        shutil.copytree(corpus.make("megatron").folder / FOLDER, actor / optimizer)
        stated["optimizer"] = {"path": optimizer, "format": "megatron_dist_checkpoint"}
    about = {"schema_version": 2, "framework": "megatron", "global_step": 5, "contents": stated}
    (actor / "ckpt_contents.json").write_text(json.dumps(about))
    return actor


def damaged_list(folder: Path, text: str) -> object:
    actor = verl_parts(folder)
    (actor / "ckpt_contents.json").write_text(text)
    return ckpt_tools.inspect(actor)


NO_WEIGHTS = '{"schema_version": 2, "framework": "megatron", "contents": {"optimizer": {"path": "model/dist_ckpt"}}}'
test_parts_of_verl_that_do_not_fit_are_refused = refusal_test(
    ("another format", lambda folder: ckpt_tools.inspect(verl_parts(folder), from_="dcp"), UnsupportedError,
        "read as megatron"),
    ("weights in both", lambda folder: ckpt_tools.inspect(verl_parts(folder, optimizer="optimizer/dist_ckpt")),
        UnsupportedError, "there are weights here and in the folder of the model"),
    ("zarr", lambda folder: ckpt_tools.inspect(verl_parts(folder, format="zarr")), UnsupportedError,
        "the format 'zarr' are not"),
    *((f"the folder {path!r}", lambda folder, path=path: ckpt_tools.inspect(verl_parts(folder, path)), MalformedError,
        "there is no such folder") for path in ("model/other", "../model/dist_ckpt", 3)),
    ("no weights", lambda folder: damaged_list(folder, NO_WEIGHTS), UnsupportedError, "it states no weights"),
    *((f"the list {text}", lambda folder, text=text: damaged_list(folder, text), MalformedError,
        r"ckpt_contents\.json") for text in ("[]", "{", '{"contents": [1]}', '{"contents": {"model": 1}}')),
)  # fmt: skip
