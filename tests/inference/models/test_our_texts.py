"""The language models of the training package, continued as a plain loop over the model continues a text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from click.testing import CliRunner
from fastapi.testclient import TestClient
from torch import nn

import ckpt_tools
import inference
from ckpt_tools.errors import FormatError, UsageError
from inference.batch.__main__ import main
from inference.models.predictor import Predictor, load_predictor, loaded
from inference.serving.__main__ import Options, application
from inference.serving.settings import Settings
from tests.inference.batch.test_batch_inputs import rows_of
from tests.inference.models.test_tasks import assert_company_changes_nothing, decoded
from training.models.zoo import our_model

TEXTS = ("First Citizen:", "Speak, speak.", "a", "Größe", "First Citizen!", "x" * 200, "y" * 100 + "x" * 64)


@pytest.fixture(scope="module", params=["lm", pytest.param("lm-moe", marks=pytest.mark.extended)])
def run(request, tmp_path_factory):
    """A sharded checkpoint with seeded weights, large enough that texts go on in different ways."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = our_model(request.param)
    nn.init.normal_(model.embed.weight, std=1.0)  # type: ignore[arg-type, union-attr]
    torch.save(model.state_dict(), folder / "model.pt")
    ckpt_tools.convert(folder / "model.pt", folder / "run", to="dcp", world_size=2)
    (folder / "run" / "config.json").write_text(f'{{"architecture": "ours:{request.param}"}}')
    return folder / "run"


@torch.no_grad()
def continued(model: nn.Module, text: str, many: int) -> str:
    """Alone, by its definition."""
    known = list(text.encode())
    for _ in range(many):
        known.append(int(model(torch.tensor([known[-64:]]))[0, -1].argmax()))
    return bytes(known[len(text.encode()) :]).decode(errors="replace")


def answers(predictor: Predictor, texts: Sequence[str]) -> list[str | None]:
    return [each.text for each in predictor.predict(decoded(predictor, [text.encode() for text in texts]))]


def test_a_text_is_continued_as_by_the_model_itself(run):
    predictor = load_predictor(run, max_new_tokens=10)
    model = inference.load_model(run)
    found = answers(predictor, TEXTS)
    assert found == [continued(model, text, 10) for text in TEXTS]
    assert len(set(found)) == len(TEXTS) - 1
    assert found[-1] == found[-2]
    assert_company_changes_nothing(predictor, decoded(predictor, [text.encode() for text in TEXTS]))
    assert predictor.predict([]) == []


def test_it_writes_as_many_bytes_as_other_models_write_tokens(run):
    (prediction,) = load_predictor(run).predict([torch.tensor([65])])
    model = inference.load_model(run)
    assert prediction.text == continued(model, "A", 64)


@pytest.mark.parametrize(("data", "sentence"), [(b"", "^t is an empty text$"), (b"\xff", "^t is not a text in UTF-8")])
def test_what_is_not_a_text_is_refused(run, data, sentence):
    with pytest.raises(FormatError, match=sentence):
        load_predictor(run).decode(data, "t")
    with pytest.raises(UsageError, match="--embeddings is for"):
        load_predictor(run, embeddings=True)


def test_the_commands_continue_texts(run, tmp_path):
    lines, out = ["First Citizen:", "Speak"], tmp_path / "x.jsonl"
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n")
    words = ["--model", run, "--input", tmp_path / "in.txt", "--output", out, "--quiet", "--max-new-tokens", 8]
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == 0, result.output
    expected = answers(load_predictor(run, max_new_tokens=8), lines)
    assert [row["text"] for row in rows_of(out)] == expected
    app = application(
        Options([f"{run}?max_new_tokens=8"], Settings()), lambda each: loaded(each.url, each.name, each.options)
    )
    with TestClient(app, base_url="http://127.0.0.1") as client:
        found = [client.post("/predict", files={"text": (None, line)}).json() for line in lines]
    assert found == [{"text": text} for text in expected]
