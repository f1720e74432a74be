"""What a job calls the entries of a checkpoint, found by matching."""

import pytest

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.errors import UsageError
from ckpt_tools.state_tree.build import choose_tree, entries_of
from ckpt_tools.torch.name_matching import JobNameMatcher

pytestmark = pytest.mark.quick


def scalar(kind: Kind) -> TensorEntry:
    shard = Shard(Box.whole(()), ByteRange("data", 0, 4))
    return TensorEntry((), DType.FLOAT32, kind, ShardTable.build((), DType.FLOAT32, [shard]))


def job_names(*fqns: str, model_key: str | None = None, optim_key: str | None = None) -> JobNameMatcher:
    """Names for a checkpoint of these weights, with state of each, one group, a tie of the first, and an epoch."""
    tensors = {StateKey(fqn): scalar(Kind.PARAMETER) for fqn in fqns}
    tensors |= {StateKey(fqn, "step"): scalar(Kind.STATE) for fqn in fqns}
    found = Manifest(
        "deepspeed",
        tensors,
        aliases={"tie": fqns[0]},
        groups=(ParamGroup(fqns, {"lr": 0.5}),),
        extra={"client_state": {"epoch": 2}},
    )
    tree = choose_tree(found, model_key=None, optim_key=None)
    return JobNameMatcher.of(found, entries_of(found, tree), tree, model_key=model_key, optim_key=optim_key)


@pytest.mark.parametrize("prefix", ["app.model.", "model.", "", "some.where.else."])
def test_weights_are_found_whatever_stands_before_them(prefix):
    names = job_names("blocks.0.up", "norm")
    for own, entry in {
        "blocks.0.up": "app.model.blocks.0.up",
        "norm": "app.model.norm",
        "tie": "app.model.tie",
    }.items():
        match = names.find_match(prefix + own)
        assert match is not None
        assert (match.entry, match.prefix) == (entry, prefix)


@pytest.mark.parametrize(("name", "entry"), [
    ("optimizer.state.w.step", "app.optim.state.w.step"),
    ("app.optim.param_groups.0.lr", "app.optim.param_groups.0.lr"),
    ("optimizer.param_groups.w.lr", "app.optim.param_groups.0.lr"),
    ("app.epoch", "app.epoch"),
    ("epoch", "app.epoch"),
])  # fmt: skip
def test_state_options_and_entries(name, entry):
    match = job_names("w").find_match(name)
    assert match is not None and match.entry == entry


def test_two_models_need_a_choice():
    names = job_names("w", "v")
    with pytest.raises(UsageError, match="job_model_key"):
        names.check_prefixes(["app.model.w", "app.ema.v"])
    chosen = job_names("w", "v", model_key="app.model")
    chosen.check_prefixes(["app.model.w", "app.ema.v"])
    assert chosen.find_match("app.ema.v") is None


def test_two_optimizers_need_a_choice():
    with pytest.raises(UsageError, match="job_optim_key"):
        job_names("w").check_prefixes(["g.state.w.step", "d.state.w.step"])
    assert job_names("w", optim_key="g").find_match("d.state.w.step") is None


def test_an_entry_elsewhere_is_not_the_one_beside_the_model():
    with pytest.raises(UsageError, match=r"no entry 'app\.trainer\.epoch'"):
        job_names("w").check_prefixes(["app.model.w", "app.trainer.epoch"])


def test_marks_of_wrappers_are_passed_over():
    match = job_names("blocks.0.up").find_match("model._orig_mod.blocks.0._checkpoint_wrapped_module.up")
    assert match is not None and (match.entry, match.prefix) == ("app.model.blocks.0.up", "model.")
