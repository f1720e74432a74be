"""DeepSpeed's own checkpoints, by 1 to 4 real processes: every tensor against what DeepSpeed itself gathers; names of
wrapped models, and files under other ranks' names."""

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import ckpt_tools
import fixtures
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.names import strip_wrapper_parts
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import IncompleteError
from ckpt_tools.formats.builtin import DeepSpeedFormat
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.source import Source
from fixtures import launch, recipe, zero
from fixtures.store import Fixture
from tests.support.manifests import assert_holds, gathered, groups_of
from tests.support.saved_files import change_file
from tests.support.sweep import extended, swept
from tests.support.truth import Truth, assert_same_bits

OTHER_OPTIMIZERS = [Fixture("zero2-fp32", "rmsprop", 3), Fixture("zero3-bf16", "amsgrad", 2)]
OTHER_OPTIMIZERS += [Fixture("zero2-bf16", "adagrad", 2), Fixture("zero1-fp32", "adafactor", 3)]
WANTED = [Fixture("zero3-fp16", "lion", 3), *(f for f in fixtures.CORE if f.kind.startswith("zero"))]


def read(folder: Path, tag: str | None = None) -> Manifest:
    return DeepSpeedFormat().read(Source.open(LocalStore(folder)), ReadOptions(tag=tag))


@pytest.mark.parametrize("wanted", [*swept(WANTED), *extended(*OTHER_OPTIMIZERS)])
def test_reads_what_deepspeed_holds(wanted, checkpoint):
    made = checkpoint(wanted.kind, wanted.case, wanted.world_size)
    assert_read(made.checkpoint, Truth.load(made.root), stage=int(wanted.kind[4]))


def assert_read(folder: Path, truth: Truth, *, stage: int) -> None:
    assert_holds(read(folder), folder, truth, format_name=f"zero{stage}")


def produce_elastic(folder: str) -> None:
    """Runs on every rank."""
    run = zero.Run(recipe.CASES["awkward"], zero.Flavour(2, "bf16", changes={"elastic_checkpoint": True}), seed=1)
    run.train(recipe.STEPS_BEFORE)
    run.engine.save_checkpoint(f"{folder}/checkpoint")
    truth = run.gather()
    if run.engine.global_rank == 0:
        truth.write(Path(folder))
    run.close()


@pytest.mark.extended
def test_reads_elastic_checkpoints_which_keep_no_hyperparameters(tmp_path):
    launch.pool(3).run(produce_elastic, str(tmp_path))
    manifest, truth = read(tmp_path / "checkpoint"), Truth.load(tmp_path)
    assert_same_bits(truth.tensors, gathered(tmp_path / "checkpoint", manifest))
    assert groups_of(manifest) == [group | {"options": {}} for group in truth.facts["groups"]]


# Names of parameters may have parts of wrappers that the model's state dict leaves out

PART = "_checkpoint_wrapped_module"


def wrapped(name: str) -> str:
    """As ``named_parameters()`` of torch's ``checkpoint_wrapper`` has it, and its ``state_dict()`` has not."""
    module, _, last = name.rpartition(".")
    return f"{module}.{PART}.{last}" if module else name


def changed(checkpoint: Path, made: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(checkpoint, made)
    for path in made.rglob("*_model_states.pt"):
        change_file(path, change)
    return made


def wrap(content: dict[str, Any]) -> None:
    for key in ("frozen_param_shapes", "frozen_param_fragments"):
        if content.get(key):
            content[key] = {wrapped(name): value for name, value in content[key].items()}
    content["param_shapes"] = [{wrapped(n): shape for n, shape in group.items()} for group in content["param_shapes"]]
    content["buffer_names"] = [wrapped(name) for name in content["buffer_names"]]
    content["shared_params"] = {wrapped(alias): wrapped(owner) for alias, owner in content["shared_params"].items()}


def prefix(content: dict[str, Any]) -> None:
    content["module"] = {f"hooked.{name}": value for name, value in content["module"].items()}


@pytest.mark.parametrize("kind", ["zero2-fp32", "zero3-bf16", *extended("zero1-fp32")])
def test_wrapped_modules_are_the_same_model_and_a_hook_may_put_a_prefix_before_names(kind, checkpoint, tmp_path):
    plain = checkpoint(kind, "awkward", 2).checkpoint
    made = changed(plain, tmp_path / "wrapped", wrap)
    assert ckpt_tools.diff(plain, made).equal
    assert any(PART in name for name in compared(made, strip_wrapper_parts))
    hooked = changed(plain, tmp_path / "hooked", prefix)
    assert set(ckpt_tools.open(hooked)) == {f"hooked.{name}" for name in ckpt_tools.open(plain)}
    compared(hooked, "hooked.{}".format)


def compared(folder: Path, name_of: Callable[[str], str]) -> list[str]:
    """The names of DeepSpeed's script, which finds the bits that are read under other names."""
    found, judge = ckpt_tools.open(folder), get_fp32_state_dict_from_zero_checkpoint(str(folder))
    for name, tensor in judge.items():
        ours = found[name_of(name)].torch().float()
        assert torch.equal(ours.view(torch.int32), tensor.float().view(torch.int32)), name
    return list(judge)


@pytest.mark.parametrize(
    "hooked",
    [
        pytest.param(["other_name"], id="nothing in common"),
        pytest.param(["a.{}", "b.{}"], id="two names that one could have"),
        pytest.param([f"{n}.{'a.' * 5_000}{{}}" for n in range(100)], id="very many parts, which cost no more"),
    ],
)
def test_other_names_that_a_hook_gives_are_refused(hooked, checkpoint, tmp_path):
    def change(content: dict[str, Any]) -> None:
        name = next(iter(content["param_shapes"][0]))
        value = content["module"].pop(name)
        content["module"] |= {other.format(name): value for other in hooked}

    made = changed(checkpoint("zero2-fp32", "awkward", 2).checkpoint, tmp_path / "hooked", change)
    tracemalloc.start()
    with pytest.raises(IncompleteError, match=r"in param_shapes but not in module: .* a hook of the model"):
        ckpt_tools.inspect(made)
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
