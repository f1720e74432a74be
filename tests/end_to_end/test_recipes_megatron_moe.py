"""Mixtures of experts, latent attention and gated delta nets that megatron-core trains, converted to the hub's names
and back. The judges are `from_pretrained` of transformers, its layers of multi-token prediction, and
`dist_checkpointing.load` and the optimizer of megatron-core."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from fixtures import launch
from fixtures import megatron_models as mm
from fixtures.megatron_moe_models import MIXTURES, twins
from fixtures.truth import raw_bytes

pytestmark = pytest.mark.extended

BOUND = 2e-6
"""Megatron and transformers add in another order: experts, query, key and value, steps of a gated delta net."""

ROUNDED = 2.0**-7
"""The same where a norm is stored minus 1 in Megatron: with 1 added, its weight in bfloat16 is rounded by 2^-9."""

OF_FP32 = 2.0**-23
"""What adding 1 in fp32 and taking it off again changes in such a norm."""

RECIPES = {
    "deepseek_v2": "deepseek_v3",
    "deepseek_v3-no-lora": "deepseek_v3",
    "glm4_moe_lite": "deepseek_v3",
    "qwen3_moe-dense": "qwen3_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
}
SAMPLE = (
    ("qwen3_moe", "stacked", "fp32"),
    ("deepseek_v3", "single", "bf16"),
    ("gpt_oss", "stacked", "bf16"),
    ("qwen3_next", "layers", "fp32"),
    ("qwen3_5_moe_text", "layers", "bf16"),
)
NORM = "self_attention.out_norm.weight"
BIAS = ".e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class Trained:
    """A family, its folder as `mm.produce` fills it, and the losses of the steps after the checkpoint."""

    name: str
    dtype: str
    folder: Path
    losses: list[float]

    @property
    def recipe(self) -> str:
        return f"megatron_{RECIPES.get(self.name, self.name)}"

    @property
    def adds(self) -> bool:
        return "qwen3_next" in self.name or "qwen3_5" in self.name

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def hub(self, out: Path) -> Path:
        # Logits are those of the weights of 16 bits, and not of their masters.
        dtype = "bfloat16" if self.dtype == "bf16" else None
        options: dict[str, Any] = {"to": "safetensors", "config": self.folder / "config", "dtype": dtype}
        ckpt_tools.convert(self.run, out, recipe=self.recipe, **options)
        return out

    @property
    def bound(self) -> float:
        return ROUNDED if self.adds and self.dtype == "bf16" else BOUND


def on_rank(function: Any, *arguments: Any) -> Any:
    (found,) = launch.pool(1).run(function, *arguments)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "trained" in metafunc.fixturenames:
        is_soak = metafunc.config.getoption("--soak")
        every = [(name, form, dtype) for name in MIXTURES for form in mm.FORMS for dtype in mm.DTYPES]
        cases = [*SAMPLE, *every] if is_soak else SAMPLE
        metafunc.parametrize("trained", cases, ids="-".join, indirect=True, scope="module")


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    name, form, dtype = request.param
    folder = tmp_path_factory.mktemp("megatron")
    return Trained(name, dtype, folder, on_rank(mm.produce, name, {}, dtype, form, "", folder))


def test_transformers_computes_the_same_logits(trained, tmp_path):
    hub = trained.hub(tmp_path / "hub")
    logits, more, wrong = on_rank(twins, hub)
    assert not wrong
    wanted, wanted_more = torch.load(trained.folder / "logits.pt"), torch.load(trained.folder / "mtp.pt")
    assert len(more) == len(wanted_more)
    for found, whole in zip([logits, *more], [wanted, *wanted_more], strict=True):
        expected = whole[:, : found.shape[1]]
        assert (found - expected).abs().max() <= trained.bound * expected.abs().max()
    biases = [each for name, each in load_file(hub / "model.safetensors").items() if name.endswith(BIAS)]
    assert all(each.dtype is torch.float32 for each in biases)
    # And Megatron those of the hub's weights.
    ckpt_tools.convert(hub, tmp_path / "back", to="megatron", recipe=trained.recipe, inverse=True)
    back = on_rank(mm.load_weights, trained.name, {}, trained.dtype, tmp_path / "back")
    assert (back - wanted).abs().max() <= (trained.bound * wanted.abs().max() if trained.adds else 0.0)


def test_all_of_the_state_there_and_back(trained, tmp_path):
    """Sizes come from the arguments in the common state."""
    ckpt_tools.convert(trained.run, tmp_path / "renamed", to="dcp", recipe=trained.recipe)
    back = tmp_path / "back"
    ckpt_tools.convert(tmp_path / "renamed", back, to="megatron", recipe=trained.recipe, inverse=True)
    losses = on_rank(mm.resume, trained.name, {}, trained.dtype, back, tmp_path / "state.pt")
    assert losses == pytest.approx(trained.losses, rel=ROUNDED if trained.adds else 0.0)
    wanted, found = torch.load(trained.folder / "state.pt"), torch.load(tmp_path / "state.pt")
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        rows = slice(mm.VOCABULARY) if "word_embeddings" in name or "output_layer" in name else slice(None)
        if NORM in name and "exp_avg" not in name:
            # A weight of 16 bits may be the next one.
            bound = OF_FP32 if tensor.dtype is torch.float32 else 2.0**-8 * wanted[name].float().abs().max()
            assert (tensor.float() - wanted[name].float()).abs().max() <= bound
        else:
            assert raw_bytes(tensor[rows]) == raw_bytes(wanted[name][rows]), name
