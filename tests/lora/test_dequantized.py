"""``merge-lora --dequantize`` is dequantizing, then merging: the bits of the two steps."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import ckpt_tools


def quantized(folder: Path) -> None:
    """Two layers of fp8 in blocks, one of which has rows beyond a piece."""
    torch.manual_seed(0)
    folder.mkdir()
    weight, wide = torch.randn(128, 256), torch.randn(64, 5000)
    tensors = {
        "q.weight": weight.to(torch.float8_e4m3fn),
        "q.weight_scale_inv": torch.rand(2, 4) + 0.1,
        "w.weight": wide.to(torch.float8_e4m3fn),
        "w.weight_scale_inv": torch.rand(1, 79) + 0.1,
        "norm.weight": torch.ones(8, dtype=torch.bfloat16),
    }
    save_file(tensors, folder / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    config = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


def adapter(folder: Path, rank: int = 4) -> None:
    folder.mkdir()
    sizes = {"q": (128, 256), "w": (64, 5000)}
    tensors = {f"{name}.lora_A.weight": torch.randn(rank, columns) for name, (_, columns) in sizes.items()}
    tensors |= {f"{name}.lora_B.weight": torch.randn(rows, rank) for name, (rows, _) in sizes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "target_modules": ["q", "w"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def test_one_step_is_two(tmp_path):
    quantized(tmp_path / "base")
    adapter(tmp_path / "adapter")
    once = ckpt_tools.merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "once", dequantize=True)
    assert once.target_format == "safetensors"
    ckpt_tools.convert(tmp_path / "base", tmp_path / "plain", to="safetensors", dequantize=True)
    ckpt_tools.merge_lora(tmp_path / "plain", tmp_path / "adapter", tmp_path / "twice", memory="200MB", workers=2)
    found, wanted, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "twice", "plain"))
    assert {*found} == {*wanted} == {"q.weight", "w.weight", "norm.weight"}
    for name, tensor in found.items():
        assert tensor.dtype is torch.bfloat16
        assert torch.equal(tensor, wanted[name])
        assert torch.equal(tensor, plain[name]) is (name == "norm.weight")
    assert "quantization_config" not in json.loads((tmp_path / "once" / "config.json").read_text())
