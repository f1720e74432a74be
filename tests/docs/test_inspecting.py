"""docs/inspecting.md: every command prints what the page shows under it."""

import doctest
import re
import shlex

import pytest
import torch
from click.testing import CliRunner

import ckpt_tools
from ckpt_tools.cli import output
from ckpt_tools.cli.main import group
from tests.support.pages import ROOT, blocks, commands

pytestmark = pytest.mark.extended

PAGE = ROOT / "docs/inspecting.md"
COLUMNS = 100


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        self.self_attn = torch.nn.ModuleDict({name: torch.nn.Linear(width, width, bias=False) for name in names})
        self.mlp = torch.nn.ModuleDict(
            {"up": torch.nn.Linear(width, 2 * width), "down": torch.nn.Linear(2 * width, width)}
        )


def language_model() -> torch.nn.Module:
    """Four layers with numbers that are the same on every machine, and a head that is tied to the embedding."""
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(32, 8), "layers": torch.nn.ModuleList(Block(8) for _ in range(4))}
    )
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_((torch.arange(parameter.numel()).reshape(parameter.shape) - 10 * number) / 64)
    model["head"] = torch.nn.Linear(8, 32, bias=False)
    model["head"].weight = model["embed"].weight
    return model


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].fill_(500)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 500}, "m.pt")
    for step in (400, 500):
        ckpt_tools.convert("m.pt", f"run/step-{step}", to="zero3", world_size=2, dtype="bfloat16")
    return tmp_path


def test_the_page_is_what_is_printed(folder, monkeypatch):
    monkeypatch.setattr(output, "get_terminal_width", lambda _: COLUMNS)
    monkeypatch.setattr("ckpt_tools.cli.inspect.get_terminal_width", lambda _: COLUMNS)
    for command in (command for block in blocks(PAGE, "console") for command in commands(block)):
        first, *words = shlex.split(command.text)
        assert first == "ckpt-tools"
        done = CliRunner().invoke(group, words)
        assert normal(done.stdout) == normal(command.output), f"$ {command.text}\n{done.output}"


def normal(text: str) -> list[str]:
    """Lines without the time at which a file was written."""
    return [re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "TIME", line.rstrip()) for line in text.strip().split("\n")]


def test_the_python_of_the_page_runs(folder):
    text = "\n".join(blocks(PAGE, "python"))
    test = doctest.DocTestParser().get_doctest(text, {}, "inspecting.md", None, 0)
    printed: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
    assert result.attempted and not result.failed, "".join(printed)
