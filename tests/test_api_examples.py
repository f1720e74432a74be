"""The examples in the docstrings of the public API, and those in docs/python.md, run as they are printed."""

import doctest
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.numpy import save_file

import ckpt_tools
import inference

PAGE = Path(__file__).parent.parent / "docs" / "python.md"
VERBS = [name for name in ckpt_tools.__all__ if name.islower() and not name.startswith("_")]


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """A folder with what the examples name: a file, another with one tensor changed, a run of two ranks, a recipe, an
    adapter, a state of training, a key."""
    monkeypatch.chdir(tmp_path)
    tensors = {
        "encoder.weight": np.arange(32, dtype=np.float32).reshape(4, 8),
        "encoder.bias": np.arange(4, dtype=np.float32),
    }
    save_file(tensors, "model.safetensors")
    save_file({**tensors, "encoder.bias": np.ones(4, np.float32)}, "other.safetensors")
    ckpt_tools.convert("model.safetensors", "run", to="dcp", world_size=2)
    line = (
        '{left = {"encoder.weight" = "(top:2 rest:2) W"}, right = {"encoder.top" = "top W", "encoder.rest" = "rest W"}}'
    )
    Path("halves.toml").write_text(f'left = "whole"\nright = "cut"\nothers = "same"\nmap = [{line}]\n')
    Path("adapter").mkdir()
    matrices = {"lora_A": np.ones((2, 8), np.float32), "lora_B": np.ones((4, 2), np.float32)}
    named = {f"base_model.model.encoder.{name}.weight": matrix for name, matrix in matrices.items()}
    save_file(named, "adapter/adapter_model.safetensors")
    Path("adapter/adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    torch.save({"model": {"w": torch.ones(3)}, "trainer": _foreign_object()}, "foreign.pt")
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 7}, "training.pt")
    key = ec.generate_private_key(ec.SECP256R1())
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    Path("key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    Path("key.pub").write_bytes(public)
    return tmp_path


def _foreign_object() -> object:
    """An object of a class that no other program has."""
    module = types.ModuleType("my_code")
    module.Trainer = type("Trainer", (), {"__module__": "my_code"})  # type: ignore[attr-defined]
    sys.modules["my_code"] = module
    return module.Trainer()


def run(text: str, name: str) -> None:
    """Raises AssertionError, with what doctest prints, unless there are examples and all of them pass."""
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    printed: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
    assert test.examples, f"{name} has no example"
    assert not result.failed, "".join(printed)


def docstring(name: str) -> str:
    """``formats`` is a package too, which Python puts in the place of the function."""
    from ckpt_tools import api

    found: Any = getattr(api, name, None) or getattr(ckpt_tools, name)
    return found.__doc__ or ""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", VERBS)
def test_the_example_of_a_verb_runs_and_it_says_what_it_takes_returns_and_raises(name, examples):
    text = docstring(name)
    run(text, name)
    assert re.match(r"[A-Z][^\n]*[.;:]?", text)
    wanted = ["Returns:", "Example:"] if name.startswith("list_") else ["Args:", "Returns:", "Raises:", "Example:"]
    at = [text.find(f"\n    {heading}") for heading in wanted]
    assert -1 not in at and at == sorted(at), f"{name}: {dict(zip(wanted, at, strict=True))}"


def test_the_example_of_load_model_runs(examples):
    run(inference.load_model.__doc__ or "", "load_model")


def test_the_examples_of_the_page_run(examples):
    blocks = re.findall(r"```python\n(>>>.*?)```", PAGE.read_text(), re.DOTALL)
    run("\n".join(blocks), "python.md")
