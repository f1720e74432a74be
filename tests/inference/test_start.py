"""Both commands before their work begins: options are checked without torch, and a missing package is one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "torchvision", "PIL", "fastapi", "uvicorn", "pyarrow", "sklearn", "rich")

PROGRAM = """
import importlib, json, sys
for name in {missing!r}:
    sys.modules[name] = None
sys.path.insert(0, {folder!r})
for words in {lines!r}:
    try:
        importlib.import_module("inference.{command}.__main__").main(words)
    except SystemExit as ended:
        found = [name for name in {heavy!r} if sys.modules.get(name)]
        print(json.dumps([ended.code, found]), flush=True)
"""


def run(
    command: str, *lines: list[str], missing: tuple[str, ...] = (), folder: str = ""
) -> tuple[list[tuple[int, list[str]]], str]:
    """The command with each of the lines of arguments in a fresh interpreter without some packages: for each the exit
    code, and what is imported of ``HEAVY``; and stderr. Modules in ``folder`` come first, also in processes that it
    starts."""
    program = PROGRAM.format(missing=missing, command=command, heavy=HEAVY, folder=folder, lines=lines)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert (done.returncode, len(found)) == (0, len(lines)), done.stderr
    return [(code, names) for code, names in found], done.stderr


@pytest.mark.parametrize(
    ("command", "codes"),
    [
        (
            "batch",
            {
                "--help": 0,
                "--model MODEL --input=digits --runner=rey --output=x.jsonl": 2,
                "--model MODEL --input=digits --output=x.jsonl --unknown": 2,
                "--model MODEL --input=digits --output=x.csv": 2,
                "--model MODEL --output=x.jsonl": 2,
                "--model MODEL --input=fashion-mnist --output=x.jsonl": 2,
                "--model none.pt --input=digits --output=x.jsonl": 3,
                "--model MODEL --input=/none --output=x.jsonl": 3,
                "--model MODEL --input=digits --output=nodir/x.jsonl": 5,
                "--model MODEL --input=digits --output=there.jsonl": 8,
            },
        ),
        (
            "serving",
            {
                "--help": 0,
                "MODEL --prot=8000": 2,
                "MODEL --port=99999": 2,
                "none.pt": 3,
                "MODEL --host=no-such-host.invalid": 5,
            },
        ),
    ],
)
def test_options_are_checked_before_torch_is_imported(command, codes, forms, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    Path("there.jsonl").touch()
    lines = [line.replace("MODEL", str(forms / "model.pt")).split() for line in codes]
    found, stderr = run(command, *lines)
    assert found == [(code, []) for code in codes.values()], stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("batch", "torch"),
        pytest.param("batch", "torchvision", marks=pytest.mark.extended),
        pytest.param("batch", "PIL", marks=pytest.mark.extended),
        ("batch", "pyarrow"),
        pytest.param("batch", "sklearn", marks=pytest.mark.extended),
        ("serving", "torch"),
        ("serving", "fastapi"),
        ("serving", "uvicorn"),
        ("serving", "python_multipart"),
    ],
)
def test_a_missing_package_is_one_sentence(command, package, forms, tmp_path, tmp_path_factory):
    # The process of the models has only what it finds in folders.
    hiding = tmp_path_factory.mktemp("hiding")
    (hiding / f"{package}.py").write_text(f"raise ModuleNotFoundError({package!r}, name={package!r})")
    out = ["--input=digits", f"--output={tmp_path / 'x.parquet'}"] if command == "batch" else ["--port=0"]
    missing = (package, "multipart") if package == "python_multipart" else (package,)
    model = ["--model"] if command == "batch" else []
    line = [*model, str(forms / "model.pt"), "--architecture=ours", *out]
    found, stderr = run(command, line, missing=missing, folder=str(hiding))
    assert found[0][0] == 2
    assert stderr == (
        f"Error: this command needs the package {package}; install it with: pip install 'ckpt-tools[serve]'\n"
    )
    assert list(tmp_path.iterdir()) == []
