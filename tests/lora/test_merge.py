"""``merge-lora`` against PEFT's ``merge_and_unload``, on models of transformers."""

import json
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpt_tools
from tests.cli.test_costs import peak_bytes, sparse_safetensors
from tests.lora import models
from tests.lora.models import CASES, adapted, made
from tests.support.pages import ROOT, check_commands
from tests.support.ranks import for_ranks
from tests.support.sweep import tiered

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def recipe_of(case: models.Case) -> Mapping[str, Any]:
    """transformers saves experts one by one, and PEFT's parameters are those of the model in memory."""
    return {"recipe": "qwen3_moe", "inverse": True} if case.model is models.qwen3_moe else {}


def is_equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(BITS[one.dtype]), other.view(BITS[other.dtype]))


def largest_terms(case: models.Case, folder: Path) -> dict[str, float]:
    """For each weight that an adapter is added to, the largest of its elements and of ``scale * |B| |A|``: PEFT's own
    merge of a model whose elements are all positive."""
    for name in ("base/model.safetensors", "adapter/adapter_model.safetensors"):
        tensors = {key: tensor.abs().float() for key, tensor in load_file(folder / name).items()}
        (folder / "positive" / name).parent.mkdir(parents=True)
        save_file(tensors, folder / "positive" / name, metadata={"format": "pt"})
        for config in (folder / name).parent.glob("*.json"):
            (folder / "positive" / config.relative_to(folder)).write_bytes(config.read_bytes())
    merged = models.merged_by_peft(folder / "positive", torch.float32)
    return {name: float(tensor.abs().max()) for name, tensor in merged.items()}


CELLS = {f"{name} {dtype}": (name, dtype) for name in models.CASES for dtype in BITS}
IN_TEST = {f"{name} {[*BITS][number % 2]}" for number, name in enumerate(models.CASES)}


@pytest.mark.parametrize("cell", tiered(CELLS, test=IN_TEST, extended=CELLS.keys() - IN_TEST))
def test_the_model_is_the_one_that_peft_merges(cell, tmp_path):
    """To the last bit where BLAS adds up in the order of torch's, else within one unit in the last place of the terms:
    numpy's BLAS has another order. PEFT rounds what it adds to embeddings and experts of 16 bits once more."""
    name, dtype = CELLS[cell]
    case = models.CASES[name]
    wanted = models.made(case, tmp_path, dtype)
    ckpt_tools.merge_lora(
        tmp_path / "base", tmp_path / "adapter", tmp_path / "out", to="safetensors", **recipe_of(case)
    )
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {*wanted} - {*found} <= {"lm_head.weight"}
    assert {*found} <= {*wanted}
    bounds = largest_terms(case, tmp_path)
    changed = 0
    for key, tensor in found.items():
        off = (tensor.double() - wanted[key].double()).abs().max()
        assert tensor.dtype == wanted[key].dtype
        assert off <= torch.finfo(dtype).eps * bounds[key], key
        assert dtype is torch.bfloat16 or (tensor == wanted[key]).float().mean() > 0.75, key
        changed += not is_equal(tensor, load_base(tmp_path, case)[key])
    assert changed


def test_layers_of_convolutions(tmp_path):
    torch.manual_seed(0)
    model = models.Convolutions()
    torch.save(model.state_dict(), tmp_path / "base.pt")
    config = LoraConfig(r=4, target_modules=["line", "dot", "square", "cube"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    wanted = adapted.merge_and_unload().state_dict()
    ckpt_tools.merge_lora(tmp_path / "base.pt", tmp_path / "adapter", tmp_path / "out.safetensors")
    found, before = load_file(tmp_path / "out.safetensors"), torch.load(tmp_path / "base.pt")
    assert {*found} == {*wanted}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=2**-22)
        assert name.endswith("bias") is torch.equal(tensor, before[name])


@pytest.mark.parametrize(
    "to", tiered(("dcp", "zero3", "megatron", "torch", "universal"), test=("zero3",), extended=("torch",))
)
def test_any_format_is_written_and_read(to, tmp_path):
    case = models.CASES["linear"]
    models.made(case, tmp_path)
    options: dict[str, Any] = {"to": to, **for_ranks(to, 2)}
    ckpt_tools.merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "once.safetensors")
    ckpt_tools.merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", **options)
    assert ckpt_tools.verify(tmp_path / "out", tmp_path / "once.safetensors").equal
    ckpt_tools.convert(tmp_path / "base", tmp_path / "other", **options)
    ckpt_tools.convert(tmp_path / "adapter" / "adapter_model.safetensors", tmp_path / "adapter.pt")
    ckpt_tools.merge_lora(
        tmp_path / "other", tmp_path / "adapter.pt", tmp_path / "again.safetensors", config=tmp_path / "adapter"
    )
    assert ckpt_tools.verify(tmp_path / "again.safetensors", tmp_path / "once.safetensors").equal


@pytest.mark.parametrize("options", [{"memory": "127MB", "workers": 1}, {"workers": 3, "max_shard_size": "50KB"}])
def test_elements_do_not_depend_on_how_the_work_is_cut(options, tmp_path):
    """A tensor of several tiles, and one whose rows are longer than a tile."""
    torch.manual_seed(0)
    sizes = {"wide": (3, 300_000), "tall": (40_000, 30), "odd": (1031, 517)}
    base = {f"{name}.weight": torch.randn(size) for name, size in sizes.items()}
    adapter: dict[str, Tensor] = {}
    for name, (rows, columns) in sizes.items():
        adapter |= {f"{name}.lora_A.weight": torch.randn(11, columns), f"{name}.lora_B.weight": torch.randn(rows, 11)}
    write(tmp_path, base, adapter, r=11)
    merge(tmp_path, "plain")
    merge(tmp_path, "cut", to="safetensors", **options)
    assert ckpt_tools.verify(tmp_path / "cut", tmp_path / "plain.safetensors").equal
    found = load_file(tmp_path / "plain.safetensors")
    for name in sizes:
        b, a = (adapter[f"{name}.lora_{part}.weight"].double() for part in "BA")
        wanted = base[f"{name}.weight"].double() + b @ a * (8 / 11)
        bound = 2**-21 * (b.abs() @ a.abs() + base[f"{name}.weight"].abs())
        assert bool(((found[f"{name}.weight"].double() - wanted).abs() <= bound).all())


def test_a_dtype_is_cast_to_once(tmp_path):
    """The sum is rounded, and not first the weight."""
    base = {"a.weight": torch.full((2, 2), 1 + 2**-8)}
    matrices = {"a.lora_A.weight": torch.full((1, 2), 2.0**-8), "a.lora_B.weight": torch.ones(2, 1)}
    write(tmp_path, base, matrices, r=1, lora_alpha=1)
    merge(tmp_path, "out", dtype="bfloat16")
    assert load_file(tmp_path / "out.safetensors")["a.weight"].tolist() == [[1 + 2**-7] * 2] * 2


def write(folder: Path, base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], **settings: Any) -> None:
    """A base model of any tensors, and the folder of an adapter."""
    save_file(dict(base), folder / "base.safetensors")
    (folder / "adapter").mkdir(exist_ok=True)
    named = {f"base_model.model.{name}": tensor for name, tensor in adapter.items()}
    save_file(named, folder / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "lora_alpha": 8, **settings}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))


def merge(folder: Path, name: str, **options: Any) -> None:
    out = folder / (name if "to" in options else f"{name}.safetensors")
    ckpt_tools.merge_lora(folder / "base.safetensors", folder / "adapter", out, **options)


def load_base(folder: Path, case: models.Case) -> dict[str, Tensor]:
    if not (folder / "live.safetensors").exists():
        ckpt_tools.convert(folder / "base", folder / "live.safetensors", **recipe_of(case))
    return load_file(folder / "live.safetensors")


def test_memory_is_what_the_plan_says_and_not_the_models_size(tmp_path):
    """A model of 400 MB in a file of holes, and matrices of 3 MB."""
    rows, columns, rank = 8192, 4096, 64
    adapter = {f"layers.{n}.lora_A.weight": torch.ones(rank, columns) for n in range(3)}
    adapter |= {f"layers.{n}.lora_B.weight": torch.ones(rows, rank) for n in range(3)}
    write(tmp_path, {"a": torch.ones(1)}, adapter, r=rank)
    sparse_safetensors(tmp_path / "base.safetensors", 3, rows, columns)
    words = ["merge-lora", tmp_path / "base.safetensors", tmp_path / "adapter", "--memory", "80MB", "--workers", "1"]
    command = [sys.executable, "-m", "ckpt_tools", *words, tmp_path / "out.safetensors", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    planned = report["plan"]["peak_memory_bytes"]
    measured = peak_bytes(*words, tmp_path / "again.safetensors")
    assert measured <= planned <= min(1.5 * measured, 80e6)


def test_one_step_is_two(tmp_path):
    """A layer of fp8 in blocks, with rows beyond a piece, is dequantized and added to at once."""
    torch.manual_seed(0)
    matrices = {"w.lora_A.weight": torch.randn(4, 5000), "w.lora_B.weight": torch.randn(64, 4)}
    norm = torch.ones(8, dtype=torch.bfloat16)
    write(tmp_path, {"norm.weight": norm}, matrices, r=4, target_modules=["w"])
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    weight, scales = torch.randn(64, 5000).to(torch.float8_e4m3fn), torch.rand(1, 79) + 0.1
    tensors = {"w.weight": weight, "w.weight_scale_inv": scales, "norm.weight": norm}
    save_file(tensors, base / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    config = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": quantization}
    (base / "config.json").write_text(json.dumps(config))
    ckpt_tools.merge_lora(base, adapter, tmp_path / "once", dequantize=True)
    ckpt_tools.convert(base, tmp_path / "plain", to="safetensors", dequantize=True)
    ckpt_tools.merge_lora(tmp_path / "plain", adapter, tmp_path / "twice", memory="200MB", workers=2)
    found, wanted, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "twice", "plain"))
    assert {*found} == {*wanted} == {"w.weight", "norm.weight"}
    assert found["w.weight"].dtype is torch.bfloat16 and torch.equal(found["w.weight"], wanted["w.weight"])
    assert [name for name in found if torch.equal(found[name], plain[name])] == ["norm.weight"]
    assert "quantization_config" not in json.loads((tmp_path / "once" / "config.json").read_text())


@pytest.mark.extended
def test_every_command_prints_what_the_page_says(tmp_path):
    made(CASES["experts"], tmp_path)
    (tmp_path / "base").rename(tmp_path / "moe")
    (tmp_path / "adapter").rename(tmp_path / "moe-adapter")
    with warnings.catch_warnings(action="ignore"):
        model = adapted(CASES["linear"], tmp_path)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
        tokens = torch.arange(16)[None]
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        model.save_pretrained(str(tmp_path / "adapter"))
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "run", no_dist=True)
    settings = (tmp_path / "adapter" / "adapter_config.json").read_bytes()
    (tmp_path / "run" / "adapter_config.json").write_bytes(settings)
    check_commands(ROOT / "docs" / "lora.md", tmp_path)
