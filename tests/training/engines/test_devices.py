"""What a GPU would meet, by fakes of it: nccl refuses tensors on the CPU, as the group that stands for it here does;
sharded weights stay where the framework put them; offloaded state is updated by the kernel that GPUs use. And
``--compile``: the same losses and names as without.
"""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed import fake_pg

import ckpt_tools
from fixtures.launch import pool
from tests.training.jobs import forget_groups, losses, result_of, tiny_config, train, train_each
from training.checkpoints.collectives import any_rank_has, gather_values, leader_first
from training.engines import create_engine
from training.engines.blocks import build_in_blocks, prepare_block
from training.engines.optimizers import make_warmup_schedule, scale_gradients, total_norm
from training.engines.parallel import build_parallel_model, make_meshes
from training.launchers.devices import choose_backend
from training.models.losses import get_logits
from training.models.zoo import make_spec

CPU = torch.device("cpu")
NCCL = fake_pg.__name__ and "fake"  # importing the module registers torch's backend of this name


@pytest.fixture
def group(tmp_path, monkeypatch, request):
    """The process group of a GPU, with nccl replaced, of this process alone."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # init_device_mesh would select that GPU
    backend = request.param.replace("nccl", NCCL)
    torch.distributed.init_process_group(backend, init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def offloaded(values: torch.Tensor, placement: Placement) -> DTensor:
    """A gradient of ``--cpu-offload`` on a GPU: its mesh has GPUs, and its shard is on the CPU."""
    mesh = init_device_mesh("cuda", (1,))
    spec = DTensorSpec(mesh, (placement,), tensor_meta=TensorMeta(values.shape, values.stride(), values.dtype))
    return DTensor(values, spec, requires_grad=False)


def norm_of_offloaded() -> None:
    gradients = [offloaded(torch.tensor([3.0]), Shard(0)), offloaded(torch.tensor([[4.0]]), Replicate())]
    norm = total_norm(gradients)
    scale_gradients(gradients, 1 / norm)
    assert (float(norm), norm.device) == (5.0, CPU)
    assert torch.cat([each.to_local().flatten() for each in gradients]).tolist() == pytest.approx([0.6, 0.8])


def agree() -> None:
    assert any_rank_has(True, False) == (True, False)
    assert gather_values(1.0, 2.0) == [[1.0], [2.0]]


def tell() -> None:
    """As the random states of all ranks, names of a pipeline's stages, and where a converted copy is."""
    found, told = [None], ["a"]
    torch.distributed.all_gather_object(found, "b")
    torch.distributed.broadcast_object_list(told)
    torch.distributed.barrier()
    assert (found, told) == (["b"], ["a"])


@pytest.mark.parametrize("group", [choose_backend("cuda")], indirect=True)
@pytest.mark.parametrize("use", [norm_of_offloaded, agree, tell])
def test_tensors_on_the_cpu_never_go_over_the_group_of_gpus(group, use):
    use()


@pytest.mark.parametrize("group", ["cuda:nccl"], indirect=True)
@pytest.mark.parametrize("use", [norm_of_offloaded, agree, tell])
def test_a_group_of_gpus_alone_refuses_them(group, use):
    """As nccl does: the fake above could have failed."""
    with pytest.raises(RuntimeError, match=r"No backend type associated with device type cpu|Found no NVIDIA driver"):
        use()


def test_the_others_wait_for_the_leader(tmp_path):
    assert pool(2).run(found_by_leader, tmp_path / "made") == [True, True]


def found_by_leader(path: Path) -> bool:
    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())
    with leader_first() as leads:
        if leads:
            time.sleep(0.5)
            path.touch()
        return path.exists()


@pytest.mark.parametrize("model", ["vit", "lm", "lm-moe", "resnet18"])
def test_a_sharded_model_is_not_moved(model, alone, tmp_path, monkeypatch):
    """``to(device)`` would take what ``CPUOffloadPolicy`` keeps on the CPU to the GPU."""
    apply = nn.Module._apply

    def checked(module: nn.Module, *args: Any, **keywords: Any) -> nn.Module:
        assert not any(isinstance(each, DTensor) for each in module.parameters())
        return apply(module, *args, **keywords)

    monkeypatch.setattr(nn.Module, "_apply", checked)
    config = tiny_config(tmp_path, model=model, strategy="full_shard", cpu_offload=True, num_workers=1)
    sharded = build_parallel_model(config, make_spec(config), make_meshes(config, CPU), CPU).module
    assert all(isinstance(each, DTensor) for each in sharded.parameters())
    with pytest.raises(AssertionError):
        sharded.to(CPU)


FUSED = {"full_shard": False, "ddp": False, "zero2": False, "zero1_offload": True, "zero3_offload": True}


def engine_of(out: Path, **values: Any) -> Any:
    config = tiny_config(out, **({"model": "cnn", "num_workers": 1} | values))
    return create_engine(config, make_warmup_schedule(10, 0.1), CPU)


def fused_after_resuming(out: Path, others: list[dict[str, Any]]) -> list[bool]:
    """Whether the optimizers of other runs are fused after they resumed that of a whole run."""
    found = []
    train(tiny_config(out, model="cnn", strategy="full_shard", until=1))
    for values in others:
        engine = engine_of(out, num_workers=2, **values)
        engine.resume(out / "checkpoints/epoch_0001")
        owner = engine._engine if hasattr(engine, "_engine") else engine
        [fused] = [group["fused"] for group in owner.optimizer.param_groups]
        found.append(fused)
        engine.close()
    forget_groups()
    return found


@pytest.mark.extended
def test_offloaded_state_has_the_fused_adam_also_after_a_run_that_had_not(tmp_path):
    cases = [*({"strategy": name} for name in FUSED), {"strategy": "full_shard", "cpu_offload": True}]
    assert pool(2).run(fused_after_resuming, tmp_path, cases) == [[*FUSED.values(), True]] * 2


def test_the_precision_of_products_and_determinism_are_those_of_the_run(alone, tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for values, expected in (
        ({"matmul_precision": "high", "deterministic": True}, ("high", True, True, ":4096:8")),
        ({}, ("highest", False, False, None)),
    ):
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        engine_of(tmp_path, strategy="full_shard", **values).close()
        cublas = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        found = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        assert (*found, torch.are_deterministic_algorithms_enabled(), cublas) == expected


@pytest.mark.extended
def test_gradients_are_reduced_in_the_dtype_that_is_asked_for(tmp_path):
    same = {"model": "cnn", "strategy": "full_shard", "precision": "fp16"}
    wide, narrow = (tiny_config(tmp_path / dtype, reduce_dtype=dtype, **same) for dtype in ("fp32", "fp16"))
    train_each(wide, narrow)
    assert losses(narrow) != losses(wide)
    assert losses(narrow) == pytest.approx(losses(wide), rel=1e-2)
    assert not ckpt_tools.diff(result_of(wide).checkpoint, result_of(narrow).checkpoint).equal


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch asks for it, and hides the warning
def test_names_stay_and_evaluation_is_not_compiled(tmp_path, monkeypatch):
    """With a compiler that leaves the graphs as they are, and counts them."""
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    plain, compiled = (tiny_config(tmp_path, model="lm", strategy="ddp", compile=each) for each in (False, True))
    models = [build_in_blocks(one, make_spec(one), partial(prepare_block, one)).module for one in (plain, compiled)]
    assert list(models[0].state_dict()) == list(models[1].state_dict())
    words = torch.zeros(1, 8, dtype=torch.int64)
    assert torch.equal(models[0].eval()(words), models[1].eval()(words))
    assert graphs == []
    assert torch.equal(models[0].train()(words), models[1].train()(words))
    assert len(graphs) > 0


SMALL = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
HUGGING_FACE: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 64, "num_key_value_heads": 2},
    "mixtral": {"intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 4},
}
"""Layers that are all alike: dense ones, and a mixture of experts."""


def named(model: str, folder: Path) -> str:
    """As ``--model`` names it."""
    if model not in HUGGING_FACE:
        return model
    from transformers import AutoConfig

    ends = {"bos_token_id": 1, "eos_token_id": 2}
    AutoConfig.for_model(model, **SMALL, **HUGGING_FACE[model], **ends).save_pretrained(folder / model)
    return f"hf:{folder / model}"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch asks for it, and hides the warning
@pytest.mark.parametrize("model", ["cnn", "llama", pytest.param("mixtral", marks=pytest.mark.extended)])
def test_a_block_is_one_graph_that_is_compiled_once(model, tmp_path, monkeypatch):
    """Nothing in it is left to Python, and no step compiles it again."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    asked = tiny_config(tmp_path, model=named(model, tmp_path), strategy="ddp", compile=True)
    made = build_in_blocks(asked, make_spec(asked), partial(prepare_block, asked))
    network = made.module.train()
    kinds = 2 if model == "cnn" else 1  # of blocks: those of one kind share a graph
    assert len(made.blocks) == 2
    for _ in range(2):
        inputs = torch.randn(4, 1, 28, 28) if model == "cnn" else torch.randint(256, (4, 64))
        get_logits(network(inputs)).square().mean().backward()
        counted = torch._dynamo.utils.counters
        assert (dict(counted["frames"]), dict(counted["graph_break"])) == ({"total": kinds, "ok": kinds}, {})


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["full_shard", "zero2"])
@pytest.mark.parametrize("model", ["lm", *HUGGING_FACE])
def test_a_compiled_run_learns_the_same_and_saves_the_same_names(model, strategy, precision, tmp_path):
    same = {"model": named(model, tmp_path), "strategy": strategy, "precision": precision, "until": 1}
    same |= {"activation_checkpointing": True} if model == "lm" else {}
    plain, compiled = (tiny_config(tmp_path / f"compile-{each}", compile=each, **same) for each in (False, True))
    train_each(plain, compiled)
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5 if precision == "fp32" else 0.01)
    names = [list(ckpt_tools.open(result_of(one).checkpoint)) for one in (plain, compiled)]
    assert names[0] == names[1]
