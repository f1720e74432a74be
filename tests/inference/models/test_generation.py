"""Generated texts, judged by transformers: its ``generate`` with the same seed, its chat templates, its tokenizers. Our
own language models are continued as a plain loop over the model continues a text."""

import threading
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
from fastapi.testclient import TestClient
from tokenizers import decoders
from torch import nn

import ckpt_tools
import inference
from ckpt_tools.errors import FormatError, UsageError
from inference.models.generation import EndOfTextError, Generation, GrowingText, Turns, generate, overlap
from inference.models.predictor import Predictor, load_predictor, loaded
from inference.models.texts import Tokens
from inference.serving.__main__ import Options, application
from inference.serving.settings import Settings
from tests.inference import commands
from tests.inference.conftest import save_our_texts
from tests.inference.models.test_tasks import assert_company_changes_nothing, decoded
from tests.inference.serving.helpers import wait_until
from tests.inference.tiny_models import CHAT, save_text_model, save_writer
from tests.support.refusals import refusal_test

PROMPTS = ("Hello", "abc", "The ends", "Größe")
SAMPLINGS: tuple[dict[str, float], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.5},
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
    generate(predictor.task, Generation(prompt, **asked), found.append)
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
        *(
            pytest.param(exact, dtype, marks=pytest.mark.soak)
            for exact, dtype in [("full", F32), ("buckets", F32), ("full", BF16), ("off", BF16)]
        ),
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


@pytest.mark.parametrize(
    "sampling", [*(pytest.param(each, marks=pytest.mark.soak) for each in SAMPLINGS[:-1]), SAMPLINGS[-1]]
)
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
    tokens = writer.task.tokens  # type: ignore[attr-defined]
    expected = tokenizer.apply_chat_template(list(CONVERSATION), add_generation_prompt=True)["input_ids"]
    assert tokens.of_chat(CONVERSATION)[0].tolist() == expected


@pytest.mark.extended
def test_an_export_has_the_texts_and_the_template(folder, writer, tmp_path):
    ckpt_tools.convert(folder, tmp_path / "run", to="dcp", world_size=2)
    ckpt_tools.convert(tmp_path / "run", tmp_path / "exported", like=folder)
    assert of_transformers(tmp_path / "exported", "Hello") == text(writer, "Hello")
    exported, own = (transformers.AutoTokenizer.from_pretrained(each) for each in (tmp_path / "exported", folder))
    assert exported.apply_chat_template(list(CONVERSATION)) == own.apply_chat_template(list(CONVERSATION))


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (({"role": "system", "content": "x"},), r"^the chat template does not take these messages: no system, please"),
        (({"role": "user", "content": "x" * 50},), r"^the chat has 57 tokens; the model takes at most 48$"),
        (({"role": "user", "content": "x" * 41},), r"^the chat has 48 tokens, which is all that the model takes$"),
        ("", "^text_input is an empty text$"),
        ("x" * 48, "^text_input has 48 tokens, which is all"),
    ],
)
def test_a_prompt_that_the_model_does_not_take_is_refused(prompt, sentence, writer):
    with pytest.raises(FormatError, match=sentence):
        pieces(writer, prompt)


test_models_without_a_template_or_language_say_so = refusal_test(
    (
        "no template",
        lambda folder: pieces(load_predictor(save_writer(folder / "w")), CONVERSATION),
        FormatError,
        "has no chat template, so it takes text_input",
    ),
    (
        "no language",
        lambda folder: pieces(load_predictor(save_text_model(folder / "bert")), "x"),
        FormatError,
        "the model does not generate text",
    ),
)


test_values_out_of_range_are_refused = refusal_test(
    *(
        (str(asked)[:40], lambda _, asked=asked: Generation("x", **asked), FormatError, f"^{sentence}")
        for asked, sentence in (
            ({"temperature": 1e-9}, r"temperature is 1e-09; it has to be 0 or a number from 0\.01 to 100"),
            ({"temperature": True}, "temperature is True"),
            ({"temperature": float("nan")}, "temperature is nan"),
            ({"max_tokens": 0}, "max_tokens is 0; it has to be a whole number from 1 to 1000000"),
            ({"max_tokens": 1.0}, "max_tokens is 1.0"),
            ({"top_p": 0.0, "temperature": 1}, "top_p is 0.0"),
            ({"top_k": -1, "temperature": 1}, "top_k is -1"),
            ({"seed": "1", "temperature": 1}, "seed is '1'"),
            ({"seed": 1}, "seed is for sampling, which needs a temperature too"),
            ({"repetition_penalty": 0}, "repetition_penalty is 0"),
            ({"stop": ("",)}, "stop has to be up to 16 texts"),
            ({"stop": (1,)}, "stop has to be up to 16 texts"),
            ({"stop": ("a",) * 17}, "stop has to be up to 16 texts"),
        )
    )
)


def test_a_text_ends_before_a_stop_text(writer):
    whole = text(writer, "Hello", temperature=2, seed=1)
    for stop in (whole[5], whole[3:7], whole[-3:], whole + "x", whole[:2]):
        assert text(writer, "Hello", temperature=2, seed=1, stop=(stop, "not there")) == whole.partition(stop)[0]


def test_an_error_of_the_receiver_ends_the_generation(writer):
    given: list[str] = []

    def give(piece: str) -> None:
        given.append(piece)
        if len(given) == 3:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        generate(writer.task, Generation("Hello", is_streamed=True), give)
    assert len(given) == 3
    assert predicted(writer, "Hello") == text(writer, "Hello")


def test_a_receiver_that_is_gone_costs_no_forward_pass(writer):
    def give(piece: str) -> None:
        raise KeyError("gone")

    passes: list[object] = []
    model = writer.task.model  # type: ignore[attr-defined]
    with model.register_forward_hook(lambda *found: passes.append(found)):
        with pytest.raises(KeyError, match="gone"):
            generate(writer.task, Generation("Hello"), give)
        assert not passes
        text(writer, "Hello")
        assert passes


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
    tokens = Tokens(tokenizer, ("input_ids",), None, len(tokenizer))
    draw = np.random.default_rng(0)
    num_early = 0
    for _ in range(150):
        ids = draw.choice(usual, 25).tolist()
        if 257 not in ids:  # characters of several bytes too
            ids[7:7] = [*"ä€🙂".encode()] if len(tokenizer) > 255 else []
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        at = int(draw.integers(len(whole)))
        stop = (whole[at : at + 1 + int(draw.integers(4))],) if draw.integers(2) else ()
        found = grown(tokens, ids, Generation("x", True, stop))
        assert "".join(found) == (whole.partition(stop[0])[0] if stop else whole)
        assert "".join(found) == "".join(grown(tokens, ids, Generation("x", False, stop)))
        num_early += sum(map(bool, found[:-1]))
    assert num_early > 300


def grown(tokens: Tokens, ids: Sequence[int], asked: Generation) -> list[str]:
    found: list[str] = []
    growing = tokens.growing(asked, found.append)
    try:
        for token in ids:
            growing.add(token)
    except EndOfTextError:
        pass
    growing.finish()
    return found


def test_a_tokenizer_that_takes_text_back_is_an_error():
    growing = GrowingText(Generation("x", True), lambda ids: "ab" if len(ids) == 1 else "xyz", lambda _: None)
    growing.add(1)
    with pytest.raises(RuntimeError, match="the tokenizer changed 'ab', which was given already"):
        growing.add(2)


@pytest.mark.parametrize(("end", "expected"), [("xab", 2), ("xa", 1), ("x", 0), ("abc", 0), ("", 0), ("aba", 1)])
def test_the_beginning_of_a_stop_text_is_known(end, expected):
    assert overlap(end, ("abc", "y")) == expected


def test_turns_go_round_in_the_order_of_asking():
    turns, order = Turns(), list[str]()

    def walk(name: str) -> None:
        with turns:
            for _ in range(3):
                order.append(name)
                with turns.passed_on():
                    pass

    threads = [threading.Thread(target=walk, args=(name,)) for name in "abc"]
    with turns:
        for many, thread in enumerate(threads):
            thread.start()
            wait_until(lambda many=many: len(turns._waiting) > many)
    for thread in threads:
        thread.join()
    assert order == ["a", "b", "c"] * 3


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


@pytest.mark.extended
@pytest.mark.parametrize("run", ["lm"], indirect=True)
def test_our_model_writes_as_many_bytes_as_other_models_write_tokens_and_takes_texts_alone(run):
    predictor = load_predictor(run)
    (prediction,) = predictor.predict([torch.tensor([65])])
    assert prediction.text == continued(inference.load_model(run), "A", 64)
    for data, sentence in ((b"", "^t is an empty text$"), (b"\xff", "^t is not a text in UTF-8")):
        with pytest.raises(FormatError, match=sentence):
            predictor.decode(data, "t")
    with pytest.raises(FormatError, match="has no chat template"):
        pieces(predictor, CONVERSATION)
    with pytest.raises(UsageError, match="--embeddings is for"):
        load_predictor(run, embeddings=True)


@pytest.mark.extended
@pytest.mark.parametrize("run", ["lm"], indirect=True)
def test_the_commands_continue_texts(run, tmp_path):
    lines, model = ["First Citizen:", "Speak"], inference.load_model(run)
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n")
    expected = [continued(model, line, 8) for line in lines]
    rows = commands.predicted(run, tmp_path / "in.txt", tmp_path / "x.jsonl", "--max-new-tokens", 8)
    assert [row["text"] for row in rows] == expected
    options = Options([f"{run}?max_new_tokens=8"], Settings())
    app = application(options, lambda each: loaded(each.url, each.name, each.options))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        found = [client.post("/predict", files={"text": (None, line)}).json() for line in lines]
    assert found == [{"text": each} for each in expected]


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
