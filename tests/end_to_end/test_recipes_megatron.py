"""Dense models, mixtures of experts, and models with latent attention or gated delta nets, which megatron-core trains,
converted to the hub's names and back. The judges are `from_pretrained` of transformers, its layers of multi-token
prediction, and `dist_checkpointing.load` and the optimizer of megatron-core."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from transformers import LlamaForCausalLM

import ckpt_tools
from fixtures import launch
from fixtures import megatron_models as mm
from fixtures.megatron_moe_models import MIXTURES, twins
from fixtures.truth import raw_bytes
from tests.support.sweep import tiered

pytestmark = pytest.mark.extended

BOUND, BOUND_OF_MIXTURES = 1e-6, 2e-6
"""Megatron multiplies by query, key and value at once, which transformers does one by one. In mixtures they add in
another order: experts, steps of a gated delta net."""
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
JUDGES = ["transformers", "megatron-core"]
NORM = "self_attention.out_norm.weight"


@dataclass(frozen=True, slots=True)
class Case:
    """A family of `fixtures.megatron_models` or a mixture, with changes of its `config.json`, and how Megatron stores
    it."""

    family: str
    dtype: str = "bf16"
    form: str = "stacked"
    prefix: str = ""
    changes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join(filter(None, [self.family, self.dtype, self.form, self.prefix, *self.changes]))

    @property
    def recipe(self) -> str:
        return f"megatron_{RECIPES.get(self.family, self.family)}"

    @property
    def is_mixture(self) -> bool:
        return self.family in MIXTURES

    @property
    def adds(self) -> bool:
        """Whether its norms are stored minus 1."""
        return self.is_mixture and ("qwen3_next" in self.family or "qwen3_5" in self.family)

    @property
    def bound(self) -> float:
        """Of logits, in bf16."""
        return (ROUNDED if self.adds else BOUND_OF_MIXTURES) if self.is_mixture else BOUND


TIED, UNPADDED = {"tie_word_embeddings": True}, {"vocab_size": 128}
CASES = [
    Case("llama", changes=UNPADDED),
    Case("mistral", prefix="module.module."),
    Case("gemma3_text", prefix="model0."),
    *(Case(name, changes=TIED) for name in ("llama", "mistral", "qwen2", "qwen3")),
    Case("qwen3", form="layers", changes=TIED),
    *(Case(name, dtype, form) for name in (*mm.FAMILIES, *MIXTURES) for dtype in mm.DTYPES for form in mm.FORMS),
]
SAMPLE = ["llama-bf16-stacked-vocab_size", "gpt2-fp32-single", "deepseek_v3-bf16-single", "qwen3_next-fp32-layers"]
"""Each of another kind of attention and form; a test of its own has tied embeddings."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A case, its folder as `mm.produce` fills it, and the losses of the steps after the checkpoint."""

    case: Case
    folder: Path
    losses: list[float]

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def options(self) -> dict[str, Any]:
        return {"recipe": self.case.recipe, **({"strip": "auto"} if self.case.prefix else {})}

    @property
    def state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = torch.load(self.folder / "state.pt")
        return found

    def hub(self, out: Path) -> Path:
        # Logits are those of the weights of 16 bits, and not of their masters.
        dtype = "bfloat16" if self.case.dtype == "bf16" else None
        ckpt_tools.convert(self.run, out, to="safetensors", config=self.folder / "config", dtype=dtype, **self.options)
        return out


def on_rank(function: Any, *arguments: Any) -> Any:
    (found,) = launch.pool(1).run(function, *arguments)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "trained" in metafunc.fixturenames:
        metafunc.parametrize("trained", tiered(CASES, test=(), extended=SAMPLE), indirect=True, scope="module")


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    case, folder = request.param, tmp_path_factory.mktemp("megatron")
    losses = on_rank(mm.produce, case.family, case.changes, case.dtype, case.form, case.prefix, folder)
    return Trained(case, folder, losses)


def test_transformers_computes_the_same_logits(trained, card, tmp_path):
    case, hub = trained.case, trained.hub(tmp_path / "hub")
    logits, *more, wrong = on_rank(twins if case.is_mixture else mm.twin, hub)
    assert not wrong
    wanted = torch.load(trained.folder / "logits.pt")
    bound = case.bound if case.dtype == "bf16" or not case.adds else BOUND_OF_MIXTURES
    predicted = torch.load(trained.folder / "mtp.pt") if case.is_mixture else []
    for found, whole in zip([logits, *(more[0] if more else [])], [wanted, *predicted], strict=True):
        expected = whole[:, : found.shape[1]] if case.is_mixture else whole
        assert (found - expected).abs().max() <= bound * expected.abs().max()
    tensors = load_file(hub / "model.safetensors")
    assert all(tensors[name].dtype is torch.float32 for name in tensors if name.endswith(".e_score_correction_bias"))
    # And Megatron those of the hub's weights.
    ckpt_tools.convert(hub, tmp_path / "back", to="megatron", recipe=case.recipe, inverse=True)
    back = on_rank(mm.load_weights, case.family, case.changes, case.dtype, tmp_path / "back")
    assert (back - wanted).abs().max() <= (bound * wanted.abs().max() if case.adds else 0.0)
    card(case.recipe, JUDGES, f"tiny {case.family}", "logits", bound=case.bound, way="both")


def test_all_of_the_state_there_and_back(trained, card, tmp_path):
    """Sizes come from the arguments in the common state."""
    case, back = trained.case, tmp_path / "back"
    ckpt_tools.convert(trained.run, tmp_path / "renamed", to="dcp", **trained.options)
    ckpt_tools.convert(tmp_path / "renamed", back, to="megatron", recipe=case.recipe, inverse=True)
    losses = on_rank(mm.resume, case.family, case.changes, case.dtype, back, tmp_path / "state.pt")
    assert losses == pytest.approx(trained.losses, rel=ROUNDED if case.adds else 0.0)
    wanted, found = trained.state, torch.load(tmp_path / "state.pt")
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        is_padded = "embedding" in name or "output_layer" in name
        rows = slice(mm.VOCABULARY) if is_padded and case.changes != UNPADDED else slice(None)
        if case.is_mixture and NORM in name and "exp_avg" not in name:
            # A weight of 16 bits may be the next one.
            bound = OF_FP32 if tensor.dtype is torch.float32 else 2.0**-8 * wanted[name].float().abs().max()
            assert (tensor.float() - wanted[name].float()).abs().max() <= bound
        else:
            assert raw_bytes(tensor[rows]) == raw_bytes(wanted[name][rows]), name
    if case.changes == UNPADDED and case.form == "stacked":
        assert not ckpt_tools.diff(trained.run, back).differences
    told, bound = (f"tiny {case.family}", "the next losses, and all state"), ROUNDED if case.adds else 0.0
    card(case.recipe, JUDGES[1:], *told, bound=bound, way="both", optimizer=True)


@pytest.fixture(scope="module")
def from_torch(tmp_path_factory):
    """transformers' model, trained by torch's AdamW with one group, under the names of the hub."""
    folder = tmp_path_factory.mktemp("hub")
    config = mm.hub_config(mm.FAMILIES["llama"])
    config.save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002, betas=(0.8, 0.9), weight_decay=0.05)
    for _ in range(2):
        model(mm.tokens(), labels=mm.tokens()).loss.backward()
        optimizer.step()
    optim = get_optimizer_state_dict(model, optimizer)
    torch.save({"model": get_model_state_dict(model), "optim": optim}, folder / "state.pt")
    return folder


def test_another_trainers_state_is_loaded_by_megatron_and_comes_back(from_torch, tmp_path):
    options: dict[str, Any] = {"state": "all", "recipe": "megatron_llama"}
    report = ckpt_tools.convert(from_torch / "state.pt", tmp_path / "out", to="megatron", inverse=True, **options)
    (note,) = (note for note in report.plan.notes if "hyperparameters" in note.what)
    assert note.what == "hyperparameters of 3 parameters" and "no weight decay for biases" in note.why
    assert len(on_rank(mm.resume, "llama", {}, "fp32", tmp_path / "out", tmp_path / "state.pt")) == 1
    state, source = torch.load(tmp_path / "state.pt"), torch.load(from_torch / "state.pt")
    name = "optimizer.state.exp_avg.decoder.final_layernorm.weight at (0,)"
    assert torch.equal(state[name], source["optim"]["state"]["model.norm.weight"]["exp_avg"])
    rates = on_rank(mm.groups_of, "llama", {}, "fp32", tmp_path / "out")
    found = [(group["lr"], group["weight_decay"], group["betas"]) for group in rates]
    assert found == [(0.002, 0.05, (0.8, 0.9)), (0.002, 0.0, (0.8, 0.9))]
    ckpt_tools.convert(tmp_path / "out", tmp_path / "back.pt", config=from_torch, **options)
    assert not ckpt_tools.diff(from_torch / "state.pt", tmp_path / "back.pt").differences
