"""The commands load a checkpoint whose names are not the model's, if they are told how to name its tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from fastapi.testclient import TestClient
from safetensors.torch import save_file

from inference.batch.__main__ import main
from inference.models.predictor import load_predictor, loaded
from inference.serving import __main__ as serve

RENAMED = ("--rename=^net[.]=", "--exclude=ema.*")

RECIPE = """
drop = {left = ["ema.{name...}"]}
[[map]]
left = "net.{name...}"
right = "{name...}"
"""


@pytest.fixture(scope="module")
def wrapped(weights, tmp_path_factory):
    """The weights as attribute of another module, beside a second copy."""
    file = tmp_path_factory.mktemp("wrapped") / "model.safetensors"
    save_file({f"{prefix}.{name}": value.clone() for name, value in weights.items() for prefix in ("net", "ema")}, file)
    return file


def test_predict_renames(wrapped, forms, image_folder, tmp_path):
    def predicted(model: Path, *options: str) -> list[str]:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        words = ["--model", model, "--input", image_folder, "--output", out, "--quiet", "--threads=1", *options]
        result = CliRunner().invoke(main, list(map(str, words)))
        assert result.exit_code == 0, result.output
        return out.read_text().splitlines()

    expected = predicted(forms / "model.safetensors")
    assert predicted(wrapped, *RENAMED) == expected
    (tmp_path / "bare.toml").write_text(RECIPE)
    assert predicted(wrapped, f"--recipe={tmp_path}/bare.toml") == expected
    back = RECIPE.replace("left =", "third =").replace("right =", "left =").replace("third =", "right =")
    (tmp_path / "back.toml").write_text(back)
    assert predicted(wrapped, f"--recipe={tmp_path}/back.toml", "--inverse") == expected


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        ((), 4, "does not fit the model"),
        (("--rename=^nett[.]=",), 2, "^nett[.]"),
        (("--exclude=ema.*", "--key-map=none.json"), 3, "none.json"),
        (("--recipe=none.toml",), 3, "none.toml"),
        (("--recipe=no-recipe",), 2, "there is no recipe 'no-recipe'"),
        (("--inverse",), 2, "is for a recipe"),
    ],
)
def test_a_wrong_name_is_one_sentence(options, code, sentence, wrapped, image_folder, tmp_path):
    words = ["--model", wrapped, "--input", image_folder, "--output", tmp_path / "out.jsonl", *options]
    result = CliRunner().invoke(main, list(map(str, words)))
    notice = "nothing says what the model is, so it is taken"
    lines = [line for line in result.output.splitlines() if notice not in line or line.startswith("Error: ")]
    assert (result.exit_code, len(lines)) == (code, 1), result.output
    assert sentence in result.output


@pytest.mark.parametrize("options", [RENAMED, ("--recipe={}",)], ids=["rename", "recipe"])
def test_serve_renames(
    options,
    wrapped,
    forms,
    digits,
    tmp_path,
    monkeypatch,
):
    """The application of the command's options, in this process."""
    recipe = tmp_path / "bare.toml"
    recipe.write_text(RECIPE)
    (expected,) = load_predictor(forms / "model.safetensors").predict([digits.pixels[0]])
    given = {"name": "image", "shape": [1, 28, 28], "datatype": "UINT8", "data": digits.pixels[0].flatten().tolist()}
    taken: list[serve.Options] = []
    monkeypatch.setattr(serve, "run", taken.append)
    assert CliRunner().invoke(serve.main, [str(wrapped), *(text.format(recipe) for text in options)]).exit_code == 0
    app = serve.application(taken[0], lambda source: loaded(source.url, source.name, source.options))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        answer = client.post("/v2/models/model/infer", json={"inputs": [given]})
    assert tuple(answer.json()["outputs"][1]["data"]) == expected.probabilities
