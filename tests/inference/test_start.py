"""Both commands before their work begins: options are checked without torch, and a missing package is one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "torchvision", "PIL", "fastapi", "uvicorn", "pyarrow", "sklearn", "rich")

PROGRAM = """
import importlib, sys
for name in {missing!r}:
    sys.modules[name] = None
sys.path.insert(0, {folder!r})
try:
    importlib.import_module("inference.{command}.__main__").main(sys.argv[1:])
finally:
    print(*[name for name in {heavy!r} if sys.modules.get(name)])
"""


def run(
    command: str, *args: object, missing: tuple[str, ...] = (), folder: str = ""
) -> subprocess.CompletedProcess[str]:
    """The command in a fresh interpreter without some packages; the last line is what was imported of ``HEAVY``.
    Modules in ``folder`` come first, also in processes that it starts."""
    program = PROGRAM.format(missing=missing, command=command, heavy=HEAVY, folder=folder)
    words = [sys.executable, "-c", program, *map(str, args)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(
    ("command", "args", "code"),
    [
        ("batch", ["--help"], 0),
        ("batch", ["--model", "MODEL", "--input=digits", "--runner=rey", "--output=x.jsonl"], 2),
        ("batch", ["--model", "MODEL", "--input=digits", "--output=x.jsonl", "--unknown"], 2),
        ("batch", ["--model", "MODEL", "--input=digits", "--output=x.csv"], 2),
        ("batch", ["--model", "MODEL", "--output=x.jsonl"], 2),
        ("batch", ["--model", "MODEL", "--input=fashion-mnist", "--output=x.jsonl"], 2),
        ("batch", ["--model", "none.pt", "--input=digits", "--output=x.jsonl"], 3),
        ("batch", ["--model", "MODEL", "--input=/none", "--output=x.jsonl"], 3),
        ("batch", ["--model", "MODEL", "--input=digits", "--output=nodir/x.jsonl"], 5),
        ("batch", ["--model", "MODEL", "--input=digits", "--output=there.jsonl"], 8),
        ("serving", ["--help"], 0),
        ("serving", ["MODEL", "--prot=8000"], 2),
        ("serving", ["MODEL", "--port=99999"], 2),
        ("serving", ["none.pt"], 3),
        ("serving", ["MODEL", "--host=no-such-host.invalid"], 5),
    ],
)
def test_options_are_checked_before_torch_is_imported(
    command: str, args: list[str], code: int, forms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    Path("there.jsonl").touch()
    done = run(command, *(forms / "model.pt" if arg == "MODEL" else arg for arg in args))
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-1] == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("batch", "torch"),
        ("batch", "torchvision"),
        ("batch", "PIL"),
        ("batch", "pyarrow"),
        ("batch", "sklearn"),
        ("serving", "torch"),
        ("serving", "fastapi"),
        ("serving", "uvicorn"),
        ("serving", "python_multipart"),
    ],
)
def test_a_missing_package_is_one_sentence(
    command: str, package: str, forms: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # The process of the models has only what it finds in folders.
    hiding = tmp_path_factory.mktemp("hiding")
    (hiding / f"{package}.py").write_text(f"raise ModuleNotFoundError({package!r}, name={package!r})")
    out = ["--input=digits", f"--output={tmp_path / 'x.parquet'}"] if command == "batch" else ["--port=0"]
    missing = (package, "multipart") if package == "python_multipart" else (package,)
    model = ["--model"] if command == "batch" else []
    done = run(command, *model, forms / "model.pt", "--architecture=ours", *out, missing=missing, folder=str(hiding))
    assert done.returncode == 2
    assert done.stderr == (
        f"Error: this command needs the package {package}; install it with: pip install 'ckpt-tools[serve]'\n"
    )
    assert list(tmp_path.iterdir()) == []
