"""Generated texts, judged by transformers: its ``generate`` with the same seed, its chat templates, its tokenizers. Our
own language models are continued as a plain loop over the model continues a text."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders
from torch import nn

import ckpt_tools
import inference
from ckpt_tools.errors import FormatError
from inference.models.generation import EndOfTextError, GenerationRequest, generate_text
from inference.models.predictor import Predictor, load_predictor
from inference.models.texts import ModelTokenizer
from tests.inference.conftest import save_our_texts
from tests.inference.models.test_tasks import assert_company_changes_nothing, decoded
from tests.inference.tiny_models import CHAT, save_writer
from tests.support.refusals import refusal_test

PROMPTS = ("Hello", "abc", "The ends", "Größe")
SAMPLINGS: tuple[dict[str, float], ...] = (
    {"temperature": 1.5, "top_k": 40},
    {"temperature": 2.0, "top_k": 100, "top_p": 0.9, "repetition_penalty": 1.3},
)
CONVERSATION = ({"role": "user", "content": " Hi "}, {"role": "assistant", "content": "ho<end>"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_writer(tmp_path_factory.mktemp("writer") / "llama", chat_template=CHAT)


@pytest.fixture(scope="module")
def writer(folder):
    return load_predictor(folder, max_new_tokens=20, exact="buckets")


def pieces(predictor: Predictor, prompt: Any, **asked: Any) -> list[str]:
    found: list[str] = []
    generate_text(predictor.task, GenerationRequest(prompt, **asked), found.append)
    return found


def text(predictor: Predictor, prompt: Any, **asked: Any) -> str:
    """The whole text. It is the same in pieces."""
    (*nothing, whole) = pieces(predictor, prompt, **asked)
    assert not any(nothing)
    assert "".join(pieces(predictor, prompt, is_streamed=True, **asked)) == whole
    return whole


def predicted(predictor: Predictor, prompt: str) -> str | None:
    (found,) = predictor.predict([predictor.decode(prompt.encode(), "a prompt")])
    return found.text


@cache
def read_by_transformers(folder: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def of_transformers(folder: Path, prompt: str, *, seed: int = 0, **sampling: Any) -> str:
    model, tokenizer = read_by_transformers(folder)
    encoded = tokenizer(prompt, return_tensors="pt")
    torch.manual_seed(seed)
    settings = {"max_new_tokens": 20, **sampling}
    if "temperature" in sampling:
        settings = {"do_sample": True, "top_k": 0, **settings}
    found = model.generate(**encoded, **settings)[0, encoded["input_ids"].shape[1] :]
    return str(tokenizer.decode(found, skip_special_tokens=True))


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("exact", "dtype"),
    [
        ("off", F32),
        pytest.param("buckets", BF16, marks=pytest.mark.extended),
        pytest.param("full", F32, marks=pytest.mark.soak),
    ],
)
def test_texts_are_those_of_transformers(exact, dtype, tmp_path):
    folder = save_writer(tmp_path / "w", dtype=dtype)
    predictor = load_predictor(folder, max_new_tokens=20, exact=exact)
    for prompt in PROMPTS[2:]:
        assert text(predictor, prompt) == of_transformers(folder, prompt)
        assert text(predictor, prompt, max_tokens=3) == of_transformers(folder, prompt, max_new_tokens=3)
        assert text(predictor, prompt, temperature=0, top_p=0.5, seed=3) == text(predictor, prompt)
        # That of predict has passes of more rows, which may round otherwise.
        assert exact != "off" or text(predictor, prompt) == predicted(predictor, prompt)


@pytest.mark.parametrize("sampling", [pytest.param(SAMPLINGS[0], marks=pytest.mark.soak), SAMPLINGS[1]])
def test_sampled_texts_are_those_of_transformers_with_the_seed(sampling, folder, writer):
    for seed, prompt in enumerate(PROMPTS[2:]):
        assert text(writer, prompt, seed=seed, **sampling) == of_transformers(folder, prompt, seed=seed, **sampling)


def test_a_seeded_text_does_not_depend_on_what_else_runs(writer):
    state = torch.get_rng_state()
    alone = [text(writer, prompt, temperature=2, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    expected = predicted(writer, "Hello")
    with ThreadPoolExecutor(8) as pool:
        again = [pool.submit(text, writer, prompt, temperature=2, seed=n) for n, prompt in enumerate(PROMPTS)]
        others = [pool.submit(pieces, writer, "Hello", temperature=2) for _ in range(3)]
        greedy = [pool.submit(predicted, writer, "Hello") for _ in range(3)]
    assert [each.result() for each in again] == alone
    assert {each.result() for each in greedy} == {expected}
    assert len({each.result()[-1] for each in others}) == 3
    assert torch.equal(state, torch.get_rng_state())


def test_a_chat_is_what_the_tokenizer_makes_of_it(folder, writer):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for messages in (CONVERSATION, CONVERSATION[:1]):
        prompt = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        assert text(writer, messages) == predicted(writer, prompt)
    wrapper = writer.task.tokenizer  # type: ignore[attr-defined]
    expected = tokenizer.apply_chat_template(list(CONVERSATION), add_generation_prompt=True)["input_ids"]
    assert wrapper.tokenize_chat(CONVERSATION)[0].tolist() == expected


test_values_out_of_range_are_refused = refusal_test(
    *(
        (str(asked)[:40], lambda _, asked=asked: GenerationRequest("x", **asked), FormatError, f"^{sentence}")
        for asked, sentence in (
            ({"temperature": 1e-9}, r"temperature is 1e-09; it has to be 0 or a number from 0\.01 to 100"),
            ({"top_p": 0.0, "temperature": 1}, "top_p is 0.0"),
            ({"seed": "1", "temperature": 1}, "seed is '1'"),
            ({"seed": 1}, "seed is for sampling, which needs a temperature too"),
            ({"stop": ("",)}, "stop has to be up to 16 texts"),
            ({"stop": ("a",) * 17}, "stop has to be up to 16 texts"),
        )
    )
)


def byte_fallback() -> Any:
    """A tokenizer of SentencePiece's kind: words with a space before them, and bytes for what it has no token for."""
    words = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "é": 257, "▁": 258, "n't": 259}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made), (
        *range(0xC0, 0xFF, 8),
        *[256, 257, 258, 259] * 6,
    )


def byte_level(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder), tuple(range(257))


def word_pieces(_: Path) -> Any:
    words = ["[UNK]", "a", "##b", ".", ",", "!", "'", "n", "##'", "t", "s", "n't", "'s", "do", "not"]
    made = transformers.BertTokenizer(
        vocab={word: n for n, word in enumerate(words)}, clean_up_tokenization_spaces=True
    )
    return made, tuple(range(len(words)))


@pytest.mark.parametrize("make", [byte_level, word_pieces, lambda _: byte_fallback()])
def test_pieces_join_to_the_whole_text_of_any_tokens(make, folder):
    tokenizer, usual = make(folder)
    tokens = ModelTokenizer(tokenizer, ("input_ids",), None, len(tokenizer))
    draw = np.random.default_rng(0)
    num_early = 0
    for _ in range(150):
        ids = draw.choice(usual, 25).tolist()
        if 257 not in ids:  # characters of several bytes too
            ids[7:7] = [*"ä€🙂".encode()] if len(tokenizer) > 255 else []
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        at = int(draw.integers(len(whole)))
        stop = (whole[at : at + 1 + int(draw.integers(4))],) if draw.integers(2) else ()
        found = grown(tokens, ids, GenerationRequest("x", True, stop))
        assert "".join(found) == (whole.partition(stop[0])[0] if stop else whole)
        assert "".join(found) == "".join(grown(tokens, ids, GenerationRequest("x", False, stop)))
        num_early += sum(map(bool, found[:-1]))
    assert num_early > 300


def grown(tokens: ModelTokenizer, ids: Sequence[int], asked: GenerationRequest) -> list[str]:
    found: list[str] = []
    growing = tokens.start_text(asked, found.append)
    try:
        for token in ids:
            growing.add_token(token)
    except EndOfTextError:
        pass
    growing.finish()
    return found


# --- our models

TEXTS = ("First Citizen:", "a", "Größe", "First Citizen!", "x" * 200, "y" * 100 + "x" * 64)


@pytest.fixture(scope="module", params=["lm", pytest.param("lm-moe", marks=pytest.mark.extended)])
def run(request, tmp_path_factory):
    """A sharded checkpoint with seeded weights."""
    folder = tmp_path_factory.mktemp(request.param)
    save_our_texts(folder / "model.pt", request.param)
    ckpt_tools.convert(folder / "model.pt", folder / "run", to="dcp", world_size=2)
    (folder / "run" / "config.json").write_text(f'{{"architecture": "ours:{request.param}"}}')
    return folder / "run"


@torch.no_grad()
def continued(model: nn.Module, prompt: str, many: int) -> str:
    """Alone, by its definition."""
    known = list(prompt.encode())
    for _ in range(many):
        known.append(int(model(torch.tensor([known[-64:]]))[0, -1].argmax()))
    return bytes(known[len(prompt.encode()) :]).decode(errors="replace")


def test_a_text_is_continued_as_by_our_model_itself(run):
    predictor, model = load_predictor(run, max_new_tokens=6), inference.load_model(run)
    inputs = decoded(predictor, [prompt.encode() for prompt in TEXTS])
    found = [each.text for each in predictor.predict(inputs)]
    assert found == [continued(model, prompt, 6) for prompt in TEXTS]
    assert len(set(found)) == len(TEXTS) - 1
    assert found[-1] == found[-2]
    assert_company_changes_nothing(predictor, inputs)
    assert predictor.predict([]) == []
    assert text(predictor, "Größe") == found[2]
    assert text(predictor, "x" * 200, max_tokens=1) == (found[-1] or "")[:1]
    sampled = text(predictor, "Speak", temperature=30, top_k=20, seed=5)
    assert sampled == drawn(model, "Speak", 6, 30, 20, 5)
    assert sampled != text(predictor, "Speak", temperature=30, top_k=20, seed=6)
    assert text(predictor, "Speak", repetition_penalty=50) != text(predictor, "Speak")


@torch.no_grad()
def drawn(model: torch.nn.Module, prompt: str, many: int, temperature: float, top_k: int, seed: int) -> str:
    """By its definition: of the most probable bytes one by its probability, with torch's own random numbers."""
    torch.manual_seed(seed)
    known = list(prompt.encode())
    for _ in range(many):
        logits = model(torch.tensor([known[-64:]]))[0, -1] / temperature
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
        known.append(int(torch.multinomial(logits.softmax(-1), 1)))
    return bytes(known[len(prompt.encode()) :]).decode(errors="replace")
