"""One input that a model or its tokenizer fails on is that input's error alone, in the batch and in the service."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from fastapi.testclient import TestClient

from inference.serving.__main__ import create_app
from tests.inference.commands import predicted
from tests.inference.tiny_models import WORDS

END = WORDS.index("[SEP]")
GOOD = ("a good film [SEP]", "bad [SEP]", "the play was [SEP] not good [SEP]", "very very bad film [SEP]")
BAD = {
    "film was bad": "the model failed on it (ValueError: Each example must contain at least one <eos> token.)",
    "alien film [SEP]": "{} has the token 14; the model knows those below 14",
    "unheard [SEP]": "{} cannot be tokenized: WordLevel error: Missing [UNK] token from the vocabulary",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """BART fails on a text without its end token, and on a batch of texts with different numbers of it. The tokenizer
    adds it to ``a`` alone, which a model is tried with when it is loaded. It fails on words that it lacks, and has a
    word, ``alien``, that the model has no embedding of."""
    folder = tmp_path_factory.mktemp("model") / "bart"
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 40}
    ends = dict.fromkeys(("eos_token_id", "decoder_start_token_id", "forced_eos_token_id"), END)
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=len(WORDS), **sizes, **heads, **ends, pad_token_id=0, num_labels=3, init_std=0.5
    )
    transformers.BartForSequenceClassification(config).save_pretrained(folder)
    known = {word: number for number, word in enumerate((*WORDS, "alien"))}
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[NONE]"))
    found.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex("^a$"), "a [SEP]")
    found.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=found, pad_token="[PAD]").save_pretrained(folder)
    return folder


def test_each_row_that_fails_is_a_row_with_its_error(model, tmp_path):
    def answers(texts: list[str], code: int) -> list[dict[str, Any]]:
        (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return predicted(model, tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--overwrite", code=code)

    texts = [GOOD[number % len(GOOD)] for number in range(40)]
    expected = answers(texts, 0)
    bad = {0: "film was bad", 7: "alien film [SEP]", 8: "unheard [SEP]", 21: "film was bad", 39: "film was bad"}
    rows = answers([bad.get(number, text) for number, text in enumerate(texts)], 6)
    assert [rows[n] for n in range(40) if n not in bad] == [expected[n] for n in range(40) if n not in bad]
    assert [rows[n]["error"] for n in bad] == [BAD[text].format(n) for n, text in bad.items()]
    assert all(rows[n]["label"] is None for n in bad)


def test_in_the_service_it_is_the_error_of_its_request(model):
    with TestClient(create_app(model), base_url="http://127.0.0.1") as client:

        def answer(text: str) -> tuple[int, Any]:
            found = client.post("/predict", files={"text": (None, text)})
            return found.status_code, found.json()

        expected = dict(zip(GOOD, map(answer, GOOD), strict=True))
        assert {status for status, _ in expected.values()} == {200}
        told = {text: (400, {"detail": reason.format("the posted text")}) for text, reason in BAD.items()}
        failed = {"detail": "the model failed on this request; the log of the service says why"}
        expected |= told | {"film was bad": (500, failed)}
        texts = [*expected] * 5
        with ThreadPoolExecutor(len(texts)) as pool:
            assert list(pool.map(answer, texts)) == [expected[text] for text in texts]
