"""Which layouts of the corpus run in which tier: named, so that each differs from the others in kind.

Another layout costs the run that makes it, and seconds in each test of all layouts.
"""

from typing import Any

from fixtures.corpus import layouts
from tests.support.sweep import tiered


def words(text: str) -> list[str]:
    return text.split()


OPENED = [name for name, layout in layouts().items() if layout.opens_as is not None]
REFUSED = [name for name, layout in layouts().items() if layout.refusal is not None]

TEST = words(
    """
dcp dcp-hf-pieces dcp-unflattened accelerate-fsdp2 verl hf-trainer torch-whole quantized-nf4
deepspeed-zero1-fp32 deepspeed-zero3-bf16 deepspeed-universal megatron nanotron gguf npz mlx
dcp-unflattened-fsdp2-cut torch-nested optimizer-alone deepspeed-nvme megatron-zarr gguf-quantized zarr
"""
)
"""Opened, and in the last line refused, by ``make test``."""

KINDS = words(
    """
dcp-flattened dcp-zstd dcp-alone dcp-tied torch-legacy safetensors-shards bin-shards
hf-peft-lora hf-pretrained-sharded accelerate-ddp-safetensors accelerate-fsdp1-full lightning-ckpt
transformers-fsdp2 lightning-fsdp torchtitan torchtitan-hf composer composer-monolithic olmo-core automodel
accelerate-ranks torch-save-tp torch-checkpointing
deepspeed-zero2-bf16 deepspeed-stage0-numbers deepspeed-muon-zero2-bf16 deepspeed-zero1-excluded
deepspeed-autoep-bf16 deepspeed-moe-zero2-fp32 deepspeed-moe-fp32 deepspeed-tp-zero1-bf16 deepspeed-tags
deepspeed-pipeline-zero1-bf16 deepspeed-pipeline-fp32 deepspeed-pipeline-tp-zero1-fp32
quantized-fp8 megatron-flattened megatron-fsdp-weights gguf-split mlx-npz orbax-manager orbax-zarr orbax-items
"""
)
"""Beside those of ``make test``, one of each kind, which every test of ``make test-all`` takes."""

COSTLY = words(
    """
deepspeed-autoep-zero2-fp32 deepspeed-autoep-zero3-bf16 deepspeed-autoep-universal-2 deepspeed-autoep-universal-3
deepspeed-moe-zero1-bf16-accumulated deepspeed-pipeline-zero1-bf16-accumulated
deepspeed-zero3-hpz deepspeed-tp-zero3-bf16 verl-hsdp torch-save-hsdp deepspeed-pipeline-tp-fp32
"""
)
"""Runs of their own for one more of a kind, which ``make soak`` makes."""


def opened() -> list[Any]:
    """Every layout that is opened, as a parameter: one of each kind in ``make test-all``."""
    return tiered(OPENED, test=(), extended=[name for name in OPENED if name in {*TEST, *KINDS}])
