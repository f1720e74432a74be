"""``--compile``: the same losses and names as without, and a machine that cannot compile is told at once."""

from __future__ import annotations

import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import UsageError
from tests.training.jobs import losses, result_of, tiny_config, train_each
from training.engines.blocks import build, prepare
from training.launchers.checks import check_frameworks
from training.models.losses import logits_of
from training.models.zoo import spec_of


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch asks for it, and hides the warning
def test_names_stay_and_evaluation_is_not_compiled(tmp_path, monkeypatch):
    """With a compiler that leaves the graphs as they are, and counts them."""
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    plain, compiled = (tiny_config(tmp_path, model="lm", strategy="ddp", compile=each) for each in (False, True))
    models = [build(one, spec_of(one), partial(prepare, one)).module for one in (plain, compiled)]
    assert list(models[0].state_dict()) == list(models[1].state_dict())
    words = torch.zeros(1, 8, dtype=torch.int64)
    assert torch.equal(models[0].eval()(words), models[1].eval()(words))
    assert graphs == []
    assert torch.equal(models[0].train()(words), models[1].train()(words))
    assert len(graphs) > 0


def test_a_machine_that_cannot_compile_is_told_before_any_worker(tmp_path, monkeypatch):
    asked = tiny_config(tmp_path, strategy="ddp", compile=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match=r"^--compile needs a C\+\+ compiler, and no-such-compiler is not here"):
        check_frameworks(asked)
    monkeypatch.setenv("CXX", "sh")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UsageError, match=r"^--compile needs Python's headers, and .*Python\.h is not here"):
        check_frameworks(asked)
    (tmp_path / "Python.h").touch()
    check_frameworks(asked)


SMALL = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
HUGGING_FACE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {"intermediate_size": 64, "num_key_value_heads": 2},
    "mixtral": {"intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 4},
}
"""Layers that are all alike: dense ones of two kinds, and a mixture of experts."""


def named(model: str, folder: Path) -> str:
    """As ``--model`` names it."""
    if model not in HUGGING_FACE:
        return model
    from transformers import AutoConfig

    ends = {"bos_token_id": 1, "eos_token_id": 2}
    AutoConfig.for_model(model, **SMALL, **HUGGING_FACE[model], **ends).save_pretrained(folder / model)
    return f"hf:{folder / model}"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch asks for it, and hides the warning
@pytest.mark.parametrize(
    "model", ["cnn", "llama", *(pytest.param(name, marks=pytest.mark.extended) for name in ("gpt2", "mixtral"))]
)
def test_a_block_is_one_graph_that_is_compiled_once(model, tmp_path, monkeypatch):
    """Nothing in it is left to Python, and no step compiles it again."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    asked = tiny_config(tmp_path, model=named(model, tmp_path), strategy="ddp", compile=True)
    made = build(asked, spec_of(asked), partial(prepare, asked))
    network = made.module.train()
    kinds = 2 if model == "cnn" else 1  # of blocks: those of one kind share a graph
    assert len(made.blocks) == 2
    for _ in range(2):
        inputs = torch.randn(4, 1, 28, 28) if model == "cnn" else torch.randint(256, (4, 64))
        logits_of(network(inputs)).square().mean().backward()
        counted = torch._dynamo.utils.counters
        assert (dict(counted["frames"]), dict(counted["graph_break"])) == ({"total": kinds, "ok": kinds}, {})


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["full_shard", "zero2", "ddp"])
@pytest.mark.parametrize("model", ["cnn", "lm", *HUGGING_FACE])
def test_a_compiled_run_learns_the_same_and_saves_the_same_names(model, strategy, precision, tmp_path):
    same = {"model": named(model, tmp_path), "strategy": strategy, "precision": precision, "until": 1}
    same |= {"activation_checkpointing": True} if model == "lm" else {}
    plain, compiled = (tiny_config(tmp_path / f"compile-{each}", compile=each, **same) for each in (False, True))
    train_each(plain, compiled)
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5 if precision == "fp32" else 0.01)
    names = [list(ckpt_tools.open(result_of(one).checkpoint)) for one in (plain, compiled)]
    assert names[0] == names[1]
