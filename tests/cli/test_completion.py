"""Completion: what each word is offered, by click's protocol and in a real bash."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import safetensors.numpy

from ckpt_tools.cli import completion
from ckpt_tools.cli.main import group
from ckpt_tools.core.option_names import OPTION_VALUE_ALIASES
from tests.support.commands import printed

LIMIT_SECONDS = 30


def asked(line: str, shell: str = "bash") -> dict[str, str]:
    """The environment in which click's script of the shell asks what completes the last word of ``line``."""
    words = line.split(" ")
    return {"COMP_WORDS": line, "COMP_CWORD": words[-1] if shell == "fish" else str(len(words) - 1)}


def offered(line: str, shell: str = "bash") -> list[str]:
    found, items = completion._get_shell(shell, group), ()
    with patch.dict(os.environ, asked(line, shell)), suppress(Exception, SystemExit):
        items = completion._list_items(found, *found.get_completion_args())
    return "".join(f"{found.format_completion(item)}\n" for item in items).splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("complete")
    tensors = {f"layers.{number}.weight": np.zeros(2, np.float32) for number in range(3)}
    safetensors.numpy.save_file({**tensors, "head.bias": np.zeros(2, np.float32)}, folder / "checkpoint.safetensors")
    return folder


CASES = [
    ("ckpt-tools conv", ["plain,convert", "plain,convert-run"]),
    ("ckpt-tools -v resh", ["plain,reshard"]),
    ("ckpt-tools convert --dt", ["plain,--dtype"]),
    ("ckpt-tools convert a b --to f", ["plain,fsdp2"]),
    ("ckpt-tools convert a b --dtype b", ["plain,bfloat16", "plain,bf16"]),
    ("ckpt-tools convert a b --recipe mixt", ["file,mixt", "plain,mixtral"]),
    ("ckpt-tools recipes show mixt", ["file,mixt", "plain,mixtral"]),
    ("ckpt-tools convert checkpoint.safetensors b --include head", ["plain,head.bias"]),
    ("ckpt-tools diff checkpoint.safetensors b --exclude layers.1", ["plain,layers.1.weight"]),
    ("ckpt-tools convert checkpoint.safetensors b --recipe mixtral --include head", []),
    ("ckpt-tools convert no-such-file b --include head", []),
    ("ckpt-tools convert --include head", []),
    ("ckpt-tools convert a che", ["file,che"]),
    ("ckpt-tools convert a b --key-map che", ["file,che"]),
    ("ckpt-tools completion f", ["plain,fish"]),
]


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_what_is_offered(line, expected, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert offered(line) == expected


def test_aliases_are_offered_and_other_shells_are_answered():
    assert {f"plain,{alias}" for alias in OPTION_VALUE_ALIASES["to"]} <= set(offered("ckpt-tools convert a b --to "))
    assert offered("ckpt-tools convert a b --to dc", "zsh") == ["plain", "dcp", "_"]
    assert offered("ckpt-tools convert a b --to dc", "fish") == ["plain,dcp"]
    for shell in ("bash", "zsh", "fish"):
        assert f"_CKPT_TOOLS_COMPLETE={shell}_complete" in printed("completion", shell)


def test_a_store_that_does_not_answer_delays_for_seconds_alone():
    """Nothing listens at the address, and a store is asked again for a minute."""
    environment = {**os.environ, **asked("ckpt-tools convert http://127.0.0.1:9/a b --include head")}
    environment["_CKPT_TOOLS_COMPLETE"] = "bash_complete"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "ckpt_tools"], env=environment, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
    assert time.monotonic() - started < 10


def test_the_script_is_printed_without_torch():
    code = (
        "import sys; from ckpt_tools.cli.main import main\n"
        "try: main(['completion', 'fish'])\n"
        "finally: assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "_CKPT_TOOLS_COMPLETE=fish_complete" in done.stdout
    for shell in ("bash", "zsh"):
        assert f"_CKPT_TOOLS_COMPLETE={shell}_complete" in printed("completion", shell)


def typed(keys: str, until: str, folder: Path, environment: dict[str, str]) -> str:
    """What a bash on a terminal shows after the keys, until it shows ``until``."""
    process, descriptor = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
    shown, end = "", time.monotonic() + LIMIT_SECONDS
    os.write(descriptor, b'eval "$(ckpt-tools completion bash)"; echo rea""dy\n')
    is_typed = False
    try:
        while until not in shown and time.monotonic() < end:
            if select.select([descriptor], [], [], 1)[0]:
                shown += os.read(descriptor, 1 << 14).decode()
            if not is_typed and "ready" in shown:
                os.write(descriptor, keys.encode())
                is_typed, shown = True, ""
        return shown
    finally:
        os.close(descriptor)
        os.kill(process, 9)
        os.waitpid(process, 0)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_a_real_bash_completes(folder, tmp_path):
    program = tmp_path / "ckpt-tools"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ckpt_tools "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TERM": "xterm", "PS1": "$ "}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent.parent)
    assert "bfloat16" in typed("ckpt-tools convert a b --dtype bfl\t", "bfloat16", folder, environment)
