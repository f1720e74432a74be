"""Writes tests/corpus/trainers/nanotron_*.zip: checkpoints of nanotron's own modules, optimizers and functions.

``python scripts/nanotron_checkpoints.py FOLDER NAME`` with nanotron (2411b02 of 2026-04) and dacite installed. Each
process is a rank of gloo on the CPU. nanotron imports libraries for GPUs that nothing here calls, and empty modules
stand for them. Weights and gradients are drawn by the name of the parameter, so that ``truth.pt`` has what torch's
AdamW makes of the whole tensors, without nanotron.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HIDDEN, INNER, VOCABULARY, QUERY, KEY, LAYERS, STEPS = 8, 12, 20, 8, 4, 3, 2
EMBEDDING = "model.token_position_embeddings.pp_block.token_embedding.weight"
HEAD = "model.lm_head.pp_block.weight"
ABSENT = ("flash_attn", "grouped_gemm", "ring_flash_attn", "datasets", "wandb", "datatrove", "boto3")


@dataclass(frozen=True)
class Case:
    """Numbers of ranks, with ZeRO-1. If ``is_accumulated``, weights are bfloat16, and masters and gradients fp32."""

    tp: int
    pp: int
    dp: int
    is_accumulated: bool
    is_tied: bool


CASES = {"nanotron_tied": Case(2, 2, 2, True, True), "nanotron_fp32": Case(1, 1, 3, False, False)}


class Empty(ModuleType):
    __path__: list[str] = []  # noqa: RUF012
    __version__ = "2.5.9"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Absent:
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        is_absent = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def drawn(name: str, kind: str, shape: Any) -> Tensor:
    seed = int(hashlib.md5((name + kind).encode(), usedforsecurity=False).hexdigest()[:8], 16)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def adam(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.01, betas=(0.9, 0.95), foreach=False)


class Rank:
    """A rank of the job that ``case`` says."""

    def __init__(self, case: Case) -> None:
        sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        from nanotron import distributed
        from nanotron.parallel import ParallelContext

        ParallelContext.set_device = lambda self: None
        distributed.initialize_torch_distributed = lambda: torch.distributed.init_process_group("gloo")
        OnCpu().__enter__()
        self.case, self.dtype = case, torch.bfloat16 if case.is_accumulated else torch.float32
        self.ranks = ParallelContext(
            tensor_parallel_size=case.tp, pipeline_parallel_size=case.pp, data_parallel_size=case.dp
        )
        self.stage, self.dp = distributed.get_rank(self.ranks.pp_pg), distributed.get_rank(self.ranks.dp_pg)
        self.model = self.built()
        self.named = [(self.owner(name), each) for name, each in self.model.named_parameters()]

    def owner(self, name: str) -> str:
        return EMBEDDING if self.case.is_tied and name == HEAD else name

    def built(self) -> nn.Module:
        from nanotron.parallel.parameters import NanotronParameter
        from nanotron.parallel.tensor_parallel.nn import (
            TensorParallelColumnLinear,
            TensorParallelEmbedding,
            TensorParallelLinearMode,
            TensorParallelRowLinear,
        )
        from nanotron.parallel.tied_parameters import tie_parameters

        tp, mode, dtype = self.ranks.tp_pg, TensorParallelLinearMode.ALL_REDUCE, self.dtype

        def tree(**modules: nn.Module) -> nn.Module:
            made = nn.Module()
            for name, each in modules.items():
                made.add_module(name, each)
            return made

        def norm() -> nn.Module:
            made = nn.Module()
            made.weight = NanotronParameter(tensor=torch.ones(HIDDEN, dtype=dtype))
            return made

        def columns(rows: int, *chunks: int) -> nn.Module:
            more = {"contiguous_chunks": chunks} if chunks else {}
            found: nn.Module = TensorParallelColumnLinear(HIDDEN, rows, tp, mode, bias=False, dtype=dtype, **more)
            return found

        def rows(width: int) -> nn.Module:
            return TensorParallelRowLinear(width, HIDDEN, tp, mode, bias=False, dtype=dtype)

        def layer() -> nn.Module:
            attention = tree(qkv_proj=columns(QUERY + 2 * KEY, QUERY, KEY, KEY), o_proj=rows(QUERY))
            mlp = tree(gate_up_proj=columns(2 * INNER, INNER, INNER), down_proj=rows(INNER))
            return tree(pp_block=tree(attn=attention, mlp=mlp, input_layernorm=norm()))

        own = [number for number in range(LAYERS) if number * self.case.pp // LAYERS == self.stage]
        parts: dict[str, nn.Module] = {"decoder": nn.ModuleDict({str(number): layer() for number in own})}
        if self.stage == 0:
            embedding = TensorParallelEmbedding(VOCABULARY, HIDDEN, pg=tp, mode=mode, dtype=dtype)
            parts["token_position_embeddings"] = tree(pp_block=tree(token_embedding=embedding))
        if self.stage == self.case.pp - 1:
            parts["final_layer_norm"] = tree(pp_block=norm())
            parts["lm_head"] = tree(pp_block=columns(VOCABULARY))
        root = tree(model=tree(**parts))
        if self.case.is_tied:
            for dp in range(self.case.dp):
                for at in range(self.case.tp):
                    places = {"ep_rank": 0, "dp_rank": dp, "cp_rank": 0, "tp_rank": at}
                    first, last = (
                        self.ranks.get_global_rank(pp_rank=stage, **places) for stage in (0, self.case.pp - 1)
                    )
                    self.tie(tie_parameters, root, [(EMBEDDING, (first,)), (HEAD, (last,))])
        every = tuple(sorted(torch.distributed.get_process_group_ranks(tp)))
        for name, each in root.named_parameters():
            if not each.is_sharded:
                self.tie(tie_parameters, root, [(name, every)])
            with torch.no_grad():
                each.copy_(self.local(self.owner(name), each, "weight"))
        return root

    def tie(self, tie_parameters: Any, root: nn.Module, ties: Any) -> None:
        add = torch.distributed.ReduceOp.SUM
        tie_parameters(root_module=root, ties=ties, parallel_context=self.ranks, reduce_op=add)

    def local(self, name: str, parameter: Any, kind: str) -> Tensor:
        if not parameter.is_sharded:
            return drawn(name, kind, parameter.shape)
        about = parameter.get_sharded_info()
        whole, found = drawn(name, kind, tuple(about.unsharded_shape)), torch.empty(parameter.shape)
        for pair in about.local_global_slices_pairs:
            found[pair.local_slices] = whole[pair.global_slices]
        return found

    def optimizer(self) -> tuple[Any, Any]:
        from nanotron.optim.gradient_accumulator import FP32GradientAccumulator
        from nanotron.optim.named_optimizer import NamedOptimizer
        from nanotron.optim.optimizer_from_gradient_accumulator import OptimizerFromGradientAccumulator
        from nanotron.optim.zero import ZeroDistributedOptimizer

        accumulators: list[Any] = []

        def plain(groups: Any) -> Any:
            return NamedOptimizer(named_params_or_groups=groups, optimizer_builder=adam)

        def accumulated(groups: Any) -> Any:
            made = OptimizerFromGradientAccumulator(
                gradient_accumulator_builder=lambda own: FP32GradientAccumulator(
                    named_parameters=own, grad_buckets_named_params=self.named
                ),
                named_params_or_groups=groups,
                optimizer_builder=plain,
            )
            accumulators.append(made.gradient_accumulator)
            return made

        groups = [
            {"named_params": [each for each in self.named if each[1].ndim > 1], "weight_decay": 0.1},
            {"named_params": [each for each in self.named if each[1].ndim == 1], "weight_decay": 0.0},
        ]
        build = accumulated if self.case.is_accumulated else plain
        found = ZeroDistributedOptimizer(named_params_or_groups=groups, optimizer_builder=build, dp_pg=self.ranks.dp_pg)
        found._all_gather_params = lambda: self.gather(found)
        for each in accumulators:
            each.assign_param_offsets(dp_rank=self.dp, param_name_to_offsets=found.param_name_to_dp_rank_offsets)
        return found, next(iter(accumulators), None)

    @torch.no_grad()
    def gather(self, optimizer: Any) -> None:
        """Gathers the parts of all ranks, as nanotron does with a collective that gloo lacks."""
        from nanotron import distributed

        for name, parameter in self.named:
            flat = parameter.view(-1)
            for dp, offsets in optimizer.param_name_to_dp_rank_offsets[name].items():
                start, stop = map(int, offsets)
                part = flat[start:stop].clone()
                source = distributed.get_global_rank(self.ranks.dp_pg, dp)
                torch.distributed.broadcast(part, source, group=self.ranks.dp_pg)
                flat[start:stop] = part

    def train(self, optimizer: Any, accumulator: Any) -> None:
        for step in range(STEPS):
            for name, parameter in self.named:
                gradient = self.local(name, parameter, f"gradient {step}")
                if accumulator is None:
                    parameter.grad = gradient.to(parameter.dtype)
                elif name in accumulator.parameters:
                    start, stop = map(int, accumulator.param_name_to_offsets[name])
                    accumulator.parameters[name]["fp32"].grad = gradient.view(-1)[start:stop].clone()
            optimizer.step()
            optimizer.zero_grad()

    def save(self, folder: Path, optimizer: Any) -> None:
        from nanotron.serialize.metadata import DataStageMetadata, TrainingMetadata, save_meta
        from nanotron.serialize.optimizer import save_optimizer
        from nanotron.serialize.weights import save_weights

        save_weights(self.model, self.ranks, folder)
        save_optimizer(optimizer, self.ranks, folder)
        about = TrainingMetadata(
            consumed_train_samples=8,
            last_train_step=STEPS,
            last_stage_idx=0,
            data_stages=[DataStageMetadata("a", 1, 8, 4, {"x": 32})],
            consumed_tokens_total=32,
        )
        save_meta(self.ranks, folder, about)

    def truth(self) -> dict[str, dict[str, Tensor]]:
        own = {
            name: tuple(each.get_sharded_info().unsharded_shape if each.is_sharded else each.shape)
            for name, each in self.named
        }
        every: list[Any] = [None] * self.ranks.world_pg.size()
        torch.distributed.all_gather_object(every, own)
        shapes = {name: shape for each in every for name, shape in each.items()}
        return {name: self.whole(name, shape) for name, shape in shapes.items()}

    def whole(self, name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
        parameter = nn.Parameter(drawn(name, "weight", shape).to(self.dtype).float())
        optimizer = adam([{"params": [parameter], "weight_decay": 0.1 if len(shape) > 1 else 0.0}])
        for step in range(STEPS):
            parameter.grad = drawn(name, f"gradient {step}", shape)
            optimizer.step()
        master = {"master": parameter.data.clone()} if self.case.is_accumulated else {}
        return {"weight": parameter.data.to(self.dtype), **optimizer.state[parameter], **master}


def write(name: str, target: Path) -> None:
    case = CASES[name]
    world = case.tp * case.pp * case.dp
    with TemporaryDirectory() as folder:
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731", "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, folder, name],
                env={**os.environ, **at, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(world)
        ]
        codes = [rank.wait() for rank in ranks]
        assert not any(codes), "a rank failed"
        with zipfile.ZipFile(target / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for path in sorted(each for each in Path(folder).rglob("*") if each.is_file()):
                archive.write(path, path.relative_to(folder))


def save_rank(folder: Path, name: str) -> None:
    rank = Rank(CASES[name])
    optimizer, accumulator = rank.optimizer()
    rank.train(optimizer, accumulator)
    rank.save(folder / "2", optimizer)
    truth = rank.truth()
    if torch.distributed.get_rank() == 0:
        torch.save(truth, folder / "truth.pt")
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    (save_rank if "RANK" in os.environ else lambda folder, name: write(name, folder))(Path(sys.argv[1]), sys.argv[2])
