"""``check``: each rule finds a fault of training or saving that was really made, and healthy checkpoints pass."""

import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.errors import DifferenceError, UsageError
from ckpt_tools.verification.health.numbering import find_missing_parts
from tests.support.commands import run_command

WIDTH, LAYERS, EXPERTS = 8, 5, 4


class Block(torch.nn.Module):
    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.mlp = torch.nn.ModuleDict({"up": torch.nn.Linear(WIDTH, 16), "down": torch.nn.Linear(16, WIDTH)})
        if is_sparse:
            self.router = torch.nn.Linear(WIDTH, EXPERTS)
            self.experts = torch.nn.ModuleList(
                torch.nn.ModuleDict({"w1": torch.nn.Linear(WIDTH, 4), "w2": torch.nn.Linear(4, WIDTH)})
                for _ in range(EXPERTS)
            )

    def forward(self, x: torch.Tensor, dead: int | None) -> torch.Tensor:
        x = x + self.mlp["down"](torch.relu(self.mlp["up"](self.norm(x))))
        if hasattr(self, "experts"):
            shares = self.router(x).softmax(-1)
            used = [number for number in range(EXPERTS) if number != dead]
            x = x + sum(shares[..., [n]] * self.experts[n]["w2"](self.experts[n]["w1"](x)) for n in used)
        return x


class Model(torch.nn.Module):
    def __init__(self, *, is_sparse: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, WIDTH)
        self.layers = torch.nn.ModuleList(Block(is_sparse=is_sparse) for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, 11)


class Run:
    """A model that is trained, and saved as a loop of torch saves it."""

    def __init__(self, folder: Path, **shape: Any) -> None:
        torch.manual_seed(3)
        self.folder, self.step = folder, 0
        self.model = Model(**shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.0)

    def train(self, num_steps: int, *, lr: float = 1e-3, dead: int | None = None, frozen: str = "") -> None:
        for _ in range(num_steps):
            self.step += 1
            self.optimizer.param_groups[0]["lr"] = lr
            tokens = torch.randint(0, 11, (4, 6))
            x = self.model.embed(tokens)
            for layer in self.model.layers:
                x = layer(x, dead)
            loss = torch.nn.functional.cross_entropy(self.model.head(x).flatten(0, 1), tokens.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            for name, parameter in self.model.named_parameters():
                if frozen and name.startswith(frozen):
                    parameter.grad = None
            self.optimizer.step()

    def save(self, name: str = "step.pt", *, without: str = "") -> Path:
        state = {key: value for key, value in self.model.state_dict().items() if not without or without not in key}
        torch.save({"model": state, "optimizer": self.optimizer.state_dict(), "step": self.step}, self.folder / name)
        return self.folder / name

    def save_weights(self, name: str, *, without: str = "", **config: Any) -> Path:
        """A folder as the hub has it."""
        folder = self.folder / name
        folder.mkdir()
        save_file({k: v for k, v in self.model.state_dict().items() if not without or without not in k},
                  folder / "model.safetensors")  # fmt: skip
        if config:
            (folder / "config.json").write_text(json.dumps({"model_type": "own", **config}))
        return folder


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    run.train(3)
    return run


@pytest.fixture
def sparse_run(tmp_path):
    run = Run(tmp_path, is_sparse=True)
    run.train(3)
    return run


def found(src: Path, **options: Any) -> dict[str, list[str]]:
    """Names by rule."""
    names: dict[str, list[str]] = {}
    for each in ckpt_tools.check(src, **options).findings:
        names.setdefault(each.rule.value, []).append(each.name if each.slot == "weight" else f"{each.name}/{each.slot}")
    return names


def test_a_training_that_works_is_healthy(run, sparse_run):
    for each in (run, sparse_run):
        before = each.save("before.pt")
        each.train(3)
        assert found(each.save("after.pt"), against=before) == {}
        assert found(each.save("after.pt"), against=before, sample=True) == {}


def test_the_first_steps_of_a_training_are_healthy(tmp_path):
    run = Run(tmp_path)
    untrained = run.save("0.pt")
    assert found(untrained) == {}
    run.train(1)
    assert found(run.save("1.pt"), against=untrained) == {}


def test_a_step_of_an_absurd_rate_is_found(run):
    before = run.save("before.pt")
    run.train(1, lr=1e38)
    src = run.save()
    report = ckpt_tools.check(src, against=before)
    assert {"jump", "non-finite"} == {each.rule.value for each in report.findings}
    assert "whose square is infinite in float32" in ckpt_tools.check(src).findings[0].what
    run.train(1)
    src = run.save()
    exact = {name: int((~value.isfinite()).sum()) for name, value in run.model.state_dict().items()}
    counted = {
        f.name: f.value for f in ckpt_tools.check(src).findings if f.rule.value == "non-finite" and f.slot == "weight"
    }
    assert {name: counted[name] for name, number in exact.items() if number} == {n: c for n, c in exact.items() if c}
    assert sum(exact.values()) > 0
    jumped = {each.name for each in ckpt_tools.check(src, against=before).findings if each.rule.value == "jump"}
    assert jumped == {name for name, number in exact.items() if not number}


def test_one_nan_of_any_payload_and_infinities_are_counted(run):
    weight = run.model.layers[2].mlp["up"].weight
    with torch.no_grad():
        weight.view(torch.int32)[3, 1] = 0x7F80_0001
        weight[0, 0], weight[0, 1] = math.inf, -math.inf
    (finding,) = ckpt_tools.check(run.save()).findings
    assert (finding.rule.value, finding.name) == ("non-finite", "layers.2.mlp.up.weight")
    assert (finding.what, finding.value) == ("1 NaN and 2 Inf of 128 elements", 3)


def test_masks_and_the_best_loss_may_be_infinite_and_not_nan(tmp_path, run):
    state = {**run.model.state_dict(), "attn_mask": torch.full((3, 3), -math.inf)}
    torch.save(
        {"model": state, "optimizer": run.optimizer.state_dict(), "best": torch.tensor(math.inf)}, tmp_path / "m.pt"
    )
    assert found(tmp_path / "m.pt") == {}
    state["attn_mask"][0, 0] = math.nan
    torch.save(
        {"model": state, "optimizer": run.optimizer.state_dict(), "best": torch.tensor(math.nan)}, tmp_path / "m.pt"
    )
    assert [*found(tmp_path / "m.pt")] == ["non-finite"]
    assert len(found(tmp_path / "m.pt")["non-finite"]) == 2


def test_weights_that_were_never_loaded_are_found(run):
    """``to_empty`` and no weights on this rank; a loader that skips what it does not know leaves such modules."""
    block = run.model.layers[1]
    block.to("meta").to_empty(device="cpu")
    for parameter in block.parameters():
        torch.nn.init.zeros_(parameter)
    torch.nn.init.constant_(run.model.layers[3].mlp["up"].weight, 0.02)
    src = run.save_weights("weights")
    zero, constant = ["layers.1.mlp.down.weight", "layers.1.mlp.up.weight"], ["layers.3.mlp.up.weight"]
    assert {rule: sorted(names) for rule, names in found(src).items()} == {"zero": zero, "constant": constant}


def test_what_is_constant_for_a_reason_is_healthy(tmp_path):
    weights = {
        "norm.weight": torch.ones(8),
        "attn.q_norm.weight": torch.ones(4, 8),
        "bias": torch.zeros(8),
        "cls_token": torch.zeros(1, 1, 8),
        "w.weight_scale_inv": torch.full((2, 2), 0.5),
        "q.lora_A.weight": torch.rand(2, 8),
        "q.lora_B.weight": torch.zeros(8, 2),
        "positions": torch.zeros(4, 4, dtype=torch.int64),
    }
    save_file(weights, tmp_path / "m.safetensors")
    assert found(tmp_path / "m.safetensors") == {}


def test_a_layer_dropped_on_save_is_found(run):
    src = run.save_weights("weights", without="layers.2.")
    assert found(src) == {"missing-layer": ["layers"]}
    last = run.save_weights("last", without="layers.4.")
    assert found(last) == {}
    assert [note.what for note in ckpt_tools.check(last).notes] == ["the number of layers"]
    told = run.save_weights("told", without="layers.4.", num_hidden_layers=LAYERS)
    (finding,) = ckpt_tools.check(told).findings
    assert finding.what == "layer 4 is missing of the 5 that config.json says"
    assert found(run.save_weights("whole", num_hidden_layers=LAYERS)) == {}


def test_a_tensor_dropped_on_save_is_found(run):
    src = run.save_weights("weights", without="layers.2.mlp.up.weight")
    assert found(src) == {"missing-tensor": ["layers.2"]}
    edge = run.save_weights("edge", without="layers.0.mlp.up.weight")
    assert found(edge) == {}
    assert found(edge, against=run.save()) == {"missing-tensor": ["layers.0.mlp.up.weight"], "frozen": ["embed.weight"]}


def test_experts_dropped_on_save_are_found(sparse_run):
    src = sparse_run.save_weights("one", without="layers.2.experts.1.")
    assert found(src) == {"missing-expert": ["layers.2.experts"]}
    assert found(sparse_run.save_weights("last", without="layers.2.experts.3.")) == {
        "missing-expert": ["layers.2.experts"]
    }
    assert found(sparse_run.save_weights("all", without="experts.3.")) == {}
    told = sparse_run.save_weights("told", without="experts.3.", num_experts=EXPERTS)
    assert len(found(told)["missing-expert"]) == LAYERS
    part = sparse_run.save_weights("part", without="layers.1.experts.2.w2.weight")
    assert found(part) == {"missing-expert": ["layers.1.experts.2"]}


def test_an_expert_without_tokens_is_found(sparse_run):
    before = sparse_run.save_weights("before")
    sparse_run.train(2, dead=2)
    assert found(sparse_run.save_weights("after"), against=before) == {
        "dead-expert": [f"layers.{layer}.experts.2" for layer in range(LAYERS)]
    }


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_fused_expert_without_tokens_is_found(decay, tmp_path):
    """All experts in one tensor, whose gradient is zero for the one that no token reached."""
    torch.manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(3, 4, 5))
    other = torch.nn.Parameter(torch.randn(4, 4))
    optimizer = torch.optim.AdamW([weight, other], lr=1e-2, weight_decay=decay)

    def save(name: str, step: int) -> Path:
        model = OrderedDict({"layers.0.mlp.experts.up_proj": weight.detach(), "other.weight": other.detach()})
        torch.save({"model": model, "optimizer": optimizer.state_dict(), "step": step}, tmp_path / name)
        return tmp_path / name

    before = save("0.pt", 0)
    for _ in range(3):
        optimizer.zero_grad()
        ((weight[[0, 2]] ** 2).sum() + (other**2).sum()).backward()
        optimizer.step()
    src = save("3.pt", 3)
    dead = ["layers.0.mlp.experts.1/exp_avg"]
    assert found(src) == {"dead-expert": dead}
    unchanged = ["layers.0.mlp.experts.1"] if not decay else []
    assert found(src, against=before) == {"dead-expert": [*dead, *unchanged]}


def test_an_optimizer_state_zeroed_on_resume_is_found(run):
    for state in run.optimizer.state.values():
        state["exp_avg"].zero_()
    names = {f"{name}/exp_avg" for name, _ in run.model.named_parameters()}
    assert {rule: set(each) for rule, each in found(run.save()).items()} == {"zero-moment": names}


def test_moments_that_were_swapped_on_resume_are_found(run):
    for state in run.optimizer.state.values():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]
    exact = {
        f"{name}/exp_avg_sq"
        for name, p in run.model.named_parameters()
        if (run.optimizer.state[p]["exp_avg_sq"] < 0).any()
    }
    assert exact and {rule: set(each) for rule, each in found(run.save()).items()} == {"negative-moment": exact}


def test_a_state_restored_in_part_is_found(run):
    """A resume that knows half of the parameters, by name, begins anew with the others."""
    before = run.save("before.pt")
    lost = run.model.head.weight
    del run.optimizer.state[lost]
    assert found(run.save("lost.pt")) == {"missing-moment": ["head.weight"]}
    run.train(1)
    (finding,) = ckpt_tools.check(run.save("anew.pt"), against=before).findings
    assert (finding.rule.value, finding.name, finding.value) == ("step", "head.weight", 1)
    assert finding.what.startswith("step 1; step 4 of ")


def test_a_module_that_is_not_trained_is_found(run):
    before = run.save("before.pt")
    run.train(2, frozen="layers.3.")
    frozen = found(run.save(), against=before)
    assert {name.split(".mlp")[0].split(".norm")[0] for name in frozen["frozen"]} == {"layers.3"}
    assert frozen.keys() == {"frozen", "step"}
    assert found(run.save(), against=before, ignore=["frozen", "step"]) == {}


def test_what_the_optimizer_does_not_have_may_be_frozen(tmp_path, run):
    run.optimizer = torch.optim.AdamW(run.model.head.parameters(), lr=1e-3)
    order = tmp_path / "order"
    order.write_text("head.weight\nhead.bias\n")
    run.train(2)
    before = run.save("before.pt")
    run.train(2)
    after = run.save("after.pt")
    assert found(after, against=before, param_order=order) == {}
    assert found(after, against=run.save_weights("weights"), param_order=order).keys() == {"frozen"}
    report = ckpt_tools.check(after, against=before)
    assert report.healthy and "optimizer state" in [note.what for note in report.notes]


def test_a_run_that_does_not_train_at_all_is_found(run):
    before = run.save("before.pt")
    assert found(run.save("copy.pt"), against=before) == {}
    run.step += 1
    (finding,) = ckpt_tools.check(run.save("next.pt"), against=before).findings
    assert (finding.rule.value, finding.what) == (
        "frozen",
        f"none of {len(run.model.state_dict())} weights has changed",
    )


def test_an_adapter_without_its_other_half_is_found(tmp_path):
    matrices = {f"base_model.model.layers.{n}.q.lora_{part}.weight": torch.rand(4, 4) for n in (1, 3) for part in "AB"}
    save_file(matrices, tmp_path / "m.safetensors")
    assert found(tmp_path / "m.safetensors") == {}
    trained = {name: matrix for name, matrix in matrices.items() if "lora_B" not in name or "3" in name}
    save_file(trained, tmp_path / "m.safetensors")
    assert found(tmp_path / "m.safetensors") == {"lora-pair": ["base_model.model.layers.1.q.lora_A.weight"]}


@pytest.mark.parametrize("to", ["dcp", "zero1", "zero3", "universal", "megatron", "safetensors", "torch"])
def test_every_format_shows_the_same(to, run):
    before = run.save("before.pt")
    run.train(2)
    options: dict[str, Any] = {"to": to, "state": "all"}
    if to not in ("safetensors", "torch", "universal"):
        options["world_size"] = 2
    healthy = run.folder / "healthy"
    ckpt_tools.convert(run.save(), healthy, **options)
    assert found(healthy) == {}
    assert found(healthy, against=before) == {}
    with torch.no_grad():
        run.model.layers[1].norm.bias[0] = math.nan
    ckpt_tools.convert(run.save(), run.folder / "nan", **options)
    assert {name.partition("/")[0] for name in found(run.folder / "nan")["non-finite"]} == {"layers.1.norm.bias"}


@pytest.mark.parametrize("kind", ["fsdp2", "zero1-fp32", "zero2-bf16", "zero3-fp32"])
def test_checkpoints_of_the_frameworks_are_healthy(kind, checkpoint):
    """The user's own tensors there have every bit pattern, NaN among them."""
    src = checkpoint(kind, "plain", 2).checkpoint
    assert found(src, exclude=["keepsakes.*"]) == {}
    assert found(src).keys() == {"non-finite"}


def names_of(num_layers: int, *rests: str) -> dict[str, tuple[int, ...]]:
    return {f"m.layers.{n}.{rest}": (2, 2) for n in range(num_layers) for rest in rests}


@pytest.mark.parametrize(
    ("shapes", "config"),
    [
        ({f"layers.{n}.{part}": (2, 2) for n in (0, 2, 4) for part in ("weight", "bias")}, {"num_layers": 3}),
        (names_of(6, "attn.w", "mlp.w") | {"m.layers.0.pos.w": (2, 2)}, {"num_hidden_layers": 6}),
        ({k: v for k, v in names_of(6, "attn.w", "norm.w").items() if k != "m.layers.0.norm.w"}, {}),
        ({**names_of(6, "attn.w"), **{f"m.layers.{n}.experts.{e}.w": (2, 2) for n in (1, 2, 5) for e in (0, 1)}}, {}),
        ({f"layers.{n}.{'conv' if n % 3 else 'block.0'}.w": (2, 2) for n in (0, 1, 3, 4, 6)}, {}),
        (names_of(3, "bn.running_mean", "bn.w") | {"m.layers.5.bn.w": (2, 2)}, {"num_layers": 64}),
        (names_of(6, "attn.w"), {"num_hidden_layers": 9, "text_config": {"num_hidden_layers": 6}}),
        (names_of(2, "attn.w") | {"vision.layers.0.mlp.experts.w": (2, 4, 4)}, {"num_experts": 4}),
        (names_of(6, "attn.w") | {"visual.blocks.0.attn.w": (2, 2)}, {"text_config": {"num_hidden_layers": 6}}),
        ({f"model.encoder.layers.{n}.a.w": (2, 2) for n in range(6)} | {"model.decoder.layers.0.a.w": (2, 2)},
            {"num_hidden_layers": 6, "is_encoder_decoder": True}),
        (names_of(7, "attn.w"), {"num_hidden_layers": 6}),
        ({"decoder.layers.attn.w": (6, 2, 2)}, {"num_hidden_layers": 6}),
    ],
    ids=["sequential", "first has more", "first has less", "first is dense", "audio codec", "convolutions",
        "sum of towers", "experts of images", "vision", "encoder", "mtp", "stacked"],
)  # fmt: skip
def test_models_that_are_whole(shapes, config):
    assert [*find_missing_parts(shapes, config)] == []


@pytest.mark.parametrize("number", range(8))
def test_any_lost_layer_is_found_with_a_config(number):
    shapes = {name: shape for name, shape in names_of(8, "attn.w", "mlp.w").items() if f".{number}." not in name}
    shapes |= {f"vision.blocks.{n}.attn.w": (2, 2) for n in range(30)}
    (finding,) = find_missing_parts(shapes, {"text_config": {"num_hidden_layers": 8}})
    assert (finding.name, finding.value) == ("m.layers", 1) and f"layer {number} is" in finding.what


def test_norms_are_those_of_numpy(run):
    before = run.save("before.pt")
    with torch.no_grad():
        run.model.head.weight.mul_(-100)
    (finding,) = ckpt_tools.check(run.save(), against=before, ignore=["frozen"]).findings
    exact = [np.linalg.norm(ckpt_tools.open(src)["head.weight"][:].astype(np.float64)) for src in (before, run.save())]
    assert finding.rule.value == "jump" and finding.value == pytest.approx(exact[1] / exact[0], rel=1e-12)
    assert finding.what == f"its norm was {exact[0]:.6g} and is {exact[1]:.6g}, 100 times as much"


def test_the_command_ends_with_6_and_says_what(run, monkeypatch):
    monkeypatch.chdir(run.folder)
    run.save("good.pt")
    healthy = run_command("check", "good.pt")
    assert (healthy.code, healthy.err) == (0, "")
    assert healthy.out.splitlines()[0].endswith(" read: healthy")
    with torch.no_grad():
        run.model.head.bias[0] = math.nan
    run.save("bad.pt")
    bad = run_command("check", "bad.pt", "--against", "good.pt", "--ignore", "frozen")
    assert bad.code == 6
    assert bad.out.splitlines()[:2] == ["rule\ttensor\tfinding", "non-finite\thead.bias\t1 NaN of 11 elements"]
    assert "bad.pt is not healthy: 1 finding" in bad.err
    assert run_command("check", "bad.pt", "--exclude", "head.bias").code == 0
    assert json.loads(run_command("check", "bad.pt", "--json").out)["findings"][0]["value"] == 1
    refused = run_command("check", "bad.pt", "--ignore", "zeros")
    assert refused.code == 2 and "--ignore zeros is not a rule; the nearest are zero" in refused.err


def test_another_model_is_refused(run, tmp_path):
    save_file({"w": torch.ones(2, 3)}, tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match=r"other.safetensors has no weight with the name of one in "):
        ckpt_tools.check(run.save(), against=tmp_path / "other.safetensors")


def save_run(run: Run, good: int, bad: int) -> Path:
    for number in range(good + bad):
        run.train(1, lr=1e38 if number >= good else 1e-3)
        if number >= good:
            run.train(1)
        run.save(f"step_{number + 1}.pt")
    return run.folder


def test_prune_keeps_the_last_good_checkpoint(run):
    folder = save_run(run, good=3, bad=2)
    assert [each.stays for each in ckpt_tools.prune(folder, keep_last=1).checkpoints] == [True, *[False] * 4]
    report = ckpt_tools.prune(folder, keep_last=1, healthy=True, yes=True)
    assert [(each.name, each.stays) for each in report.checkpoints if each.stays] == [
        ("step_5.pt", True),
        ("step_3.pt", True),
    ]
    assert report.checkpoints[2].reason == "the newest whose values are all finite"
    assert sorted(each.name for each in folder.iterdir()) == ["step_3.pt", "step_5.pt"]


def test_prune_removes_nothing_where_no_checkpoint_is_finite(run):
    folder = save_run(run, good=0, bad=3)
    with pytest.raises(DifferenceError, match=r"nothing was removed; leave out healthy=True"):
        ckpt_tools.prune(folder, keep_last=1, healthy=True, yes=True)
    assert len([*folder.iterdir()]) == 3
