"""A small mixture of experts with fused experts, trained by torch, the same model with one tensor an expert, and the
recipe between them."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

HIDDEN, WIDTH, EXPERTS = 4, 5, 3

RECIPE = """
about  = "Fused experts to one tensor an expert"
left   = "fused"
right  = "apart"
models = ["tinymoe"]
others = "same"

[sizes]
H = "config.hidden_size"

[[map]]
left  = "{name...}gate.weight"
right = "{name...}router.weight"

[[map]]
left  = { "{prefix...}experts.gate_up" = "{expert} (gate:F up:F) H" }
right = { "{prefix...}experts.{expert}.w1.weight" = "gate H", "{prefix...}experts.{expert}.w3.weight" = "up H" }
"""


class FusedExperts(nn.Module):
    """All experts in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("bh,ewh->ebw", x, self.gate_up).chunk(2, dim=-1)
        return gate.sigmoid() * up


class Fused(nn.Module):
    """The model of the left side."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = FusedExperts()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.einsum("be,ebw->bw", self.gate(x).softmax(-1), self.experts(x))


class Expert(nn.Module):
    """One expert."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.w3 = nn.Linear(HIDDEN, WIDTH, bias=False)


class Apart(nn.Module):
    """The model of the right side."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        experts = [each.w1(x).sigmoid() * each.w3(x) for each in self.experts]  # type: ignore[operator, union-attr]
        return torch.einsum("be,ebw->bw", self.router(x).softmax(-1), torch.stack(experts))


def apart(fused: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the left side, or values of their optimizer, as the right side has them."""
    found = {"router.weight": fused["gate.weight"]}
    found |= {name: value for name, value in fused.items() if name.startswith("norm.")}
    for expert, value in enumerate(fused["experts.gate_up"]):
        found[f"experts.{expert}.w1.weight"] = value[:WIDTH]
        found[f"experts.{expert}.w3.weight"] = value[WIDTH:]
    return found


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> list[float]:
    """The losses of some steps on random data."""
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, HIDDEN)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def write(folder: Path) -> tuple[Fused, torch.optim.AdamW]:
    """A model after two steps in ``fused.pt``, its ``config.json``, and ``moe.toml``."""
    torch.manual_seed(0)
    model = Fused()
    optimizer = adamw(model)
    train(model, optimizer, 2, seed=1)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "fused.pt")
    (folder / "config.json").write_text(json.dumps({"model_type": "tinymoe", "hidden_size": HIDDEN}))
    (folder / "moe.toml").write_text(RECIPE)
    return model, optimizer
