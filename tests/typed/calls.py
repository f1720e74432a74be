"""Calls that a type checker must accept or refuse. mypy reads this file and nothing runs it.

A call that should be refused has a comment that ignores the error; mypy reports a comment that ignores nothing.
"""

from __future__ import annotations

import numpy as np
import torch

import ckpt_tools


def accepted() -> None:
    ckpt_tools.convert("a", "b", to="safetensors", from_="deepspeed", dtype="bfloat16", state="all", runner="ray")
    ckpt_tools.convert("a", "b", dtype=torch.bfloat16, weights="model")
    ckpt_tools.verify("a", "b", dtype=np.float16)
    ckpt_tools.plan("a", "b", to="hf", from_="fsdp2", dtype="bf16")
    ckpt_tools.reshard("a", "b", world_size=2, dtype=np.dtype("float32"))
    ckpt_tools.convert("a", "b", recipe="mixtral", inverse=True, config="c")
    checked: ckpt_tools.RecipeMap = ckpt_tools.check_recipe("r.toml", "a", inverse=True, state="model")
    print([name for tensor in checked.tensors for name in tensor.sources], checked.recipe.after)
    report: ckpt_tools.PlanReport = ckpt_tools.plan("a", "b")
    print(report)
    converted: ckpt_tools.ConvertReport = ckpt_tools.convert("a", "b")
    names: list[str] = [converted.target_format, *(note.what for note in converted.notes), *converted.files]
    numbers: list[int] = [converted.num_tensors, converted.num_bytes]
    print(names, numbers)


def refused() -> None:
    ckpt_tools.convert("a", "b", to="safetensor")  # type: ignore[arg-type]
    ckpt_tools.plan("a", "b", from_="zero")  # type: ignore[arg-type]
    ckpt_tools.consolidate("a", "b", dtype="bf17")  # type: ignore[arg-type]
    ckpt_tools.verify("a", "b", weights="masters")  # type: ignore[arg-type]
    ckpt_tools.diff("a", "b", state="weights")  # type: ignore[arg-type]
    ckpt_tools.convert("a", "b", runner="dask")  # type: ignore[arg-type]
    ckpt_tools.diff("a", "b", recipe=1)  # type: ignore[arg-type]
    ckpt_tools.storage_reader("a", weights="fp32")  # type: ignore[arg-type]
    ckpt_tools.convert("a", "b", dtypes="bfloat16")  # type: ignore[call-arg]
    ckpt_tools.diff("a", "b", dtype="bfloat16")  # type: ignore[call-arg]
    ckpt_tools.convrt("a", "b")  # type: ignore[attr-defined]
