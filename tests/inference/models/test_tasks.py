"""What goes in and what comes out, judged by the libraries that made the models: their own pipelines and transforms."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import pytest
import torch
import torchvision
import transformers
from PIL import Image

import ckpt_tools
from ckpt_tools.errors import FormatError
from inference.models.predictor import Predictor, TensorSpec, load_predictor
from inference.models.results import Prediction
from tests.inference.tiny_models import save_image_model, save_text_model, save_writer

TEXTS = (
    "a good film",
    "the play was not good",
    "bad",
    "very very bad film " * 7,
    "the film was not very good a play",
    "GOOD unknown words",
)
PROMPTS = ("Hello", "abc", "xyz", "a much longer prompt", "ab", "The ends", "Größe")


@pytest.fixture(scope="module")
def pictures():
    """Of several sizes and modes; one lies on its side, which its EXIF data say."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, (width, height, mode) in enumerate(
        [(40, 60, "RGB"), (300, 280, "RGB"), (33, 32, "L"), (64, 90, "RGBA")]
    ):
        pixels = torch.randint(0, 256, (8, 8, 3), dtype=torch.uint8, generator=generator).numpy()
        found.append(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).convert(mode))
        if number == 1:
            found[-1].getexif()[0x0112] = 6
    return found


def as_bytes(picture: Image.Image) -> bytes:
    file = BytesIO()
    picture.save(file, "PNG", exif=picture.getexif())
    return file.getvalue()


def decoded(predictor: Predictor, things: Sequence[bytes]) -> list[torch.Tensor]:
    return [predictor.decode(data, f"thing {number}") for number, data in enumerate(things)]


def assert_company_changes_nothing(predictor: Predictor, inputs: Sequence[torch.Tensor]) -> None:
    """Each alone, all together, and all in another order, in more than one pass."""
    alone = [predictor.predict([each])[0] for each in inputs]
    assert predictor.predict(inputs) == alone
    many = [*reversed(inputs)] * 3
    assert predictor.predict(many) == [*reversed(alone)] * 3


def assert_scores(ours: Prediction, labels: tuple[str, ...] | None, theirs: list[dict[str, object]]) -> None:
    assert labels is not None
    assert ours.label is not None
    assert ours.probabilities is not None
    best = max(theirs, key=lambda each: float(str(each["score"])))
    assert labels[ours.label] == best["label"]
    assert dict(zip(labels, ours.probabilities, strict=True)) == pytest.approx(
        {each["label"]: each["score"] for each in theirs}, abs=2e-5
    )


@pytest.mark.parametrize("problem", [None, "multi_label_classification"])
def test_an_image_model_answers_as_its_pipeline(problem, pictures, tmp_path):
    folder = save_image_model(tmp_path / "vit", problem_type=problem)
    predictor = load_predictor(folder)
    assert predictor.inputs == (TensorSpec("image", "FP32", (-1, 3, 32, 32)),)
    assert predictor.labels == ("cat", "dog", "emu")
    inputs = decoded(predictor, list(map(as_bytes, pictures)))
    pipeline = transformers.pipeline("image-classification", str(folder), device="cpu")
    for ours, picture in zip(predictor.predict(inputs), pictures, strict=True):
        again = Image.open(BytesIO(as_bytes(picture)))
        again.load()
        assert_scores(ours, predictor.labels, pipeline(transformers.image_utils.load_image(again), top_k=3))
    assert_company_changes_nothing(predictor, inputs)


@pytest.mark.parametrize("problem", [None, "multi_label_classification"])
def test_a_text_model_answers_as_its_pipeline(problem, tmp_path):
    folder = save_text_model(tmp_path / "bert", problem_type=problem)
    predictor = load_predictor(folder)
    assert predictor.inputs == (TensorSpec("text", "BYTES", (-1,)),)
    inputs = decoded(predictor, [text.encode() for text in TEXTS])
    pipeline = transformers.pipeline("text-classification", str(folder), device="cpu")
    answers = predictor.predict(inputs)
    for ours, text in zip(answers, TEXTS, strict=True):
        assert_scores(ours, predictor.labels, pipeline(text, top_k=3))
    assert len({answer.probabilities for answer in answers}) == len(TEXTS)
    assert_company_changes_nothing(predictor, inputs)


@pytest.mark.parametrize("changed", [{"model_input_names": ["input_ids", "token_type_ids"]}, {"pad_token": "[OWN]"}])
def test_a_text_is_not_padded_with_what_the_model_does_not_know(changed, tmp_path):
    """Without an attention mask, as of FNet's tokenizer, it would take the padding for a part of the text; and it has
    no embedding of a token that was added to the tokenizer alone."""
    folder = save_text_model(tmp_path / "bert")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | changed))
    predictor = load_predictor(folder)
    inputs = decoded(predictor, [text.encode() for text in TEXTS])
    pipeline = transformers.pipeline("text-classification", str(folder), device="cpu")
    for ours, text in zip(predictor.predict(inputs), TEXTS, strict=True):
        assert_scores(ours, predictor.labels, pipeline(text, top_k=3))


def test_a_writer_is_not_padded_with_a_token_that_it_does_not_know(tmp_path):
    folder = save_writer(tmp_path / "llama")
    expected = load_predictor(folder, max_new_tokens=30)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "<own>"})
    tokenizer.save_pretrained(folder)
    predictor = load_predictor(folder, max_new_tokens=30)
    # Of one length, so that one of them ends before the others of its pass.
    prompts = [bytes([first, second]) for first in b"abcdefgh" for second in b"stuvwxyz"]
    found = predictor.predict(decoded(predictor, prompts))
    assert len({len(answer.text or "") for answer in found}) > 1
    assert found == expected.predict(decoded(expected, prompts))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.extended)])
def test_a_writer_continues_as_its_pipeline(dtype, tmp_path):
    folder = save_writer(tmp_path / "llama", dtype=dtype)
    predictor = load_predictor(folder, max_new_tokens=20)
    assert predictor.outputs == (TensorSpec("text", "BYTES", (-1,)),)
    inputs = decoded(predictor, [prompt.encode() for prompt in PROMPTS])
    pipeline = transformers.pipeline("text-generation", str(folder), device="cpu")
    answers = predictor.predict(inputs)
    for ours, prompt in zip(answers, PROMPTS, strict=True):
        (theirs,) = pipeline(prompt, do_sample=False, max_new_tokens=20, return_full_text=False)
        assert ours == Prediction.of(text=theirs["generated_text"])
    assert len({answer.text for answer in answers}) > 1
    assert_company_changes_nothing(predictor, inputs)


def test_a_writer_keeps_to_what_it_can_take(tmp_path):
    predictor = load_predictor(save_writer(tmp_path / "llama"))
    (answer,) = predictor.predict([predictor.decode(b"x" * 46, "prompt")])
    assert answer.text is not None
    with pytest.raises(FormatError, match=r"^prompt has 48 tokens, which is all that the model takes$"):
        predictor.decode(b"x" * 48, "prompt")
    with pytest.raises(FormatError, match=r"^prompt has 49 tokens; the model takes at most 48$"):
        predictor.decode(b"x" * 49, "prompt")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [(b"\xff\xfe", "^t is not a text in UTF-8"), (b"", "^t is an empty text$")],
)
def test_what_is_not_a_text_is_refused(data, sentence, tmp_path):
    predictor = load_predictor(save_writer(tmp_path / "llama"))
    with pytest.raises(FormatError, match=sentence):
        predictor.decode(data, "t")


def test_a_torchvision_model_is_prepared_as_its_weights_say(pictures, tmp_path):
    torch.manual_seed(0)
    own = torchvision.models.resnet18(num_classes=7).eval()
    torch.save(own.state_dict(), tmp_path / "resnet.pt")
    architecture = "torchvision:resnet18?num_classes=7"
    predictor = load_predictor(tmp_path / "resnet.pt", architecture=architecture, max_batch=4)
    transforms = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    assert predictor.inputs == (TensorSpec("image", "FP32", (-1, 3, 224, 224)),)
    assert predictor.labels is None
    inputs = decoded(predictor, list(map(as_bytes, pictures)))
    with torch.no_grad():
        theirs = own(torch.stack([transforms(picture.convert("RGB")) for picture in pictures])).softmax(1)
    ours = torch.tensor([answer.probabilities for answer in predictor.predict(inputs)])
    assert ours.allclose(theirs, atol=1e-6)
    assert_company_changes_nothing(predictor, inputs)


def test_a_torchvision_model_of_as_many_classes_has_their_names(tmp_path):
    torch.save(torchvision.models.squeezenet1_1().state_dict(), tmp_path / "net.pt")
    predictor = load_predictor(tmp_path / "net.pt", architecture="torchvision:squeezenet1_1")
    assert predictor.labels is not None
    assert predictor.labels[:2] == ("tench", "goldfish")


def test_a_folder_without_its_companions_is_refused(tmp_path):
    image, text = save_image_model(tmp_path / "vit"), save_text_model(tmp_path / "bert")
    (image / "preprocessor_config.json").unlink()
    with pytest.raises(FormatError, match="preparation of images"):
        load_predictor(image)
    (text / "tokenizer.json").unlink()
    with pytest.raises(FormatError, match="no usable tokenizer"):
        load_predictor(text)


def test_a_regression_is_refused(tmp_path):
    with pytest.raises(FormatError, match="is a regression"):
        load_predictor(save_text_model(tmp_path / "bert", problem_type="regression"))


@pytest.mark.parametrize("to", ["dcp", "zero3"])
def test_what_says_the_model_lies_beside_a_sharded_checkpoint(to, tmp_path):
    """In its folder, in a folder ``huggingface`` of it, or in the folder above."""
    source = save_text_model(tmp_path / "bert")
    expected = load_predictor(source)
    inputs = decoded(expected, [text.encode() for text in TEXTS])
    for place in ("{}", "{}/huggingface", "{}/.."):
        run = tmp_path / f"run{len(place)}" / "step"
        run.parent.mkdir()
        ckpt_tools.convert(source / "model.safetensors", run, to=to, world_size=2)  # type: ignore[arg-type]
        beside = Path(place.format(run)).resolve()
        beside.mkdir(exist_ok=True)
        for file in source.glob("*.json"):
            shutil.copy(file, beside)
        found = load_predictor(run)
        assert found.identity.digest == expected.identity.digest
        assert found.predict(inputs) == expected.predict(inputs)


def test_a_remote_folder_is_read_whole(tmp_path):
    import fsspec

    source = save_text_model(tmp_path / "bert")
    fs = fsspec.filesystem("memory")
    for file in source.iterdir():
        fs.pipe(f"/remote/bert/{file.name}", file.read_bytes())
    local, remote = load_predictor(source), load_predictor("memory://remote/bert")
    inputs = decoded(remote, [text.encode() for text in TEXTS])
    assert remote.predict(inputs) == local.predict(inputs)
    assert remote.name == "bert"


def test_a_config_does_not_choose_code(tmp_path):
    torch.save({"weight": torch.zeros(1)}, tmp_path / "model.pt")
    (tmp_path / "config.json").write_text('{"architecture": "os:getcwd"}')
    with pytest.raises(FormatError, match="does not choose code"):
        load_predictor(tmp_path / "model.pt")
