"""What goes in and what comes out, judged by the libraries that made the models: their own pipelines and transforms."""

import json
import shutil
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torchvision
import transformers
from PIL import Image

import ckpt_tools
from ckpt_tools.errors import CkptError, FormatError, UsageError
from inference.models.predictor import Predictor, TensorSpec, load_predictor
from inference.models.results import Prediction
from tests.inference.tiny_models import WORDS, save_image_model, save_text_model, save_writer
from tests.support.refusals import refusal_test

TEXTS = (
    "a good film",
    "the play was not good",
    "bad",
    "very very bad film " * 7,
    "the film was not very good a play",
    "GOOD unknown words",
)
SIZES = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
PROMPTS = ("Hello", "a much longer prompt", "ab", "Größe")


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


PROBLEMS = pytest.mark.parametrize("problem", [None, "multi_label_classification"])


@PROBLEMS
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


def assert_as_pipeline(predictor: Predictor, folder: Path) -> list[torch.Tensor]:
    """Texts get the scores of the pipeline; gives the inputs."""
    inputs = decoded(predictor, [text.encode() for text in TEXTS])
    pipeline = transformers.pipeline("text-classification", str(folder), device="cpu")
    answers = predictor.predict(inputs)
    for ours, text in zip(answers, TEXTS, strict=True):
        assert_scores(ours, predictor.labels, pipeline(text, top_k=3))
    assert len({answer.probabilities for answer in answers}) == len(TEXTS)
    return inputs


@PROBLEMS
def test_a_text_model_answers_as_its_pipeline(problem, tmp_path):
    folder = save_text_model(tmp_path / "bert", problem_type=problem)
    predictor = load_predictor(folder)
    assert predictor.inputs == (TensorSpec("text", "BYTES", (-1,)),)
    assert_company_changes_nothing(predictor, assert_as_pipeline(predictor, folder))


@pytest.mark.parametrize("changed", [{"model_input_names": ["input_ids", "token_type_ids"]}, {"pad_token": "[OWN]"}])
def test_a_text_is_not_padded_with_what_the_model_does_not_know(changed, tmp_path):
    """Without an attention mask, as of FNet's tokenizer, it would take the padding for a part of the text; and it has
    no embedding of a token that was added to the tokenizer alone."""
    folder = save_text_model(tmp_path / "bert")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | changed))
    assert_as_pipeline(load_predictor(folder), folder)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.soak)])
def test_a_writer_continues_as_its_pipeline(dtype, tmp_path):
    folder = save_writer(tmp_path / "llama", dtype=dtype)
    predictor = load_predictor(folder, max_new_tokens=12)
    assert predictor.outputs == (TensorSpec("text", "BYTES", (-1,)),)
    inputs = decoded(predictor, [prompt.encode() for prompt in PROMPTS])
    pipeline = transformers.pipeline("text-generation", str(folder), device="cpu")
    answers = predictor.predict(inputs)
    for ours, prompt in zip(answers, PROMPTS, strict=True):
        (theirs,) = pipeline(prompt, do_sample=False, max_new_tokens=12, return_full_text=False)
        assert ours == Prediction.from_outputs(text=theirs["generated_text"])
    assert len({answer.text for answer in answers}) > 1
    assert_company_changes_nothing(predictor, inputs)


@pytest.mark.extended
def test_a_torchvision_model_is_prepared_as_its_weights_say(pictures, tmp_path):
    torch.manual_seed(0)
    own = torchvision.models.resnet18(num_classes=7).eval()
    torch.save(own.state_dict(), tmp_path / "resnet.pt")
    architecture = "torchvision:resnet18?num_classes=7"
    predictor = load_predictor(tmp_path / "resnet.pt", architecture=architecture, max_batch=2)
    transforms = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    assert predictor.inputs == (TensorSpec("image", "FP32", (-1, 3, 224, 224)),)
    assert predictor.labels is None
    inputs = decoded(predictor, list(map(as_bytes, pictures)))
    with torch.no_grad():
        theirs = own(torch.stack([transforms(picture.convert("RGB")) for picture in pictures])).softmax(1)
    ours = torch.tensor([answer.probabilities for answer in predictor.predict(inputs)])
    assert ours.allclose(theirs, atol=1e-6)
    assert_company_changes_nothing(predictor, inputs)


def without(file: str, save: Callable[[Path], Path]) -> Callable[[Path], object]:
    def load(folder: Path) -> object:
        (save(folder / "model") / file).unlink()
        return load_predictor(folder / "model")

    return load


def of_chosen_code(folder: Path) -> object:
    torch.save({"weight": torch.zeros(1)}, folder / "model.pt")
    (folder / "config.json").write_text('{"architecture": "os:getcwd"}')
    return load_predictor(folder / "model.pt")


def regression(folder: Path) -> object:
    return load_predictor(save_text_model(folder / "bert", problem_type="regression"))


NO_ENCODER = "for a model that tells classes apart, and for an encoder without a head"
REFUSED: tuple[tuple[str, Callable[[Path], object], type[CkptError], str], ...] = (
    ("no processor", without("preprocessor_config.json", save_image_model), FormatError, "preparation of images"),
    ("no tokenizer", without("tokenizer.json", save_text_model), FormatError, "no usable tokenizer"),
    ("a regression", regression, FormatError, "is a regression"),
    ("code that config.json chooses", of_chosen_code, FormatError, "does not choose code"),
    ("a writer", lambda folder: load_predictor(save_writer(folder), embeddings=True), UsageError, NO_ENCODER),
)
test_what_cannot_be_answered_is_refused = refusal_test(*REFUSED)


def test_what_says_the_model_lies_beside_a_sharded_checkpoint(tmp_path):
    """In its folder, in a folder ``huggingface`` of it, or in the folder above."""
    source = save_text_model(tmp_path / "bert")
    expected = load_predictor(source)
    inputs = decoded(expected, [text.encode() for text in TEXTS])
    for place in ("{}", "{}/huggingface", "{}/.."):
        run = tmp_path / f"run{len(place)}" / "step"
        run.parent.mkdir()
        ckpt_tools.convert(source / "model.safetensors", run, to="zero3", world_size=2)
        beside = Path(place.format(run)).resolve()
        beside.mkdir(exist_ok=True)
        for file in source.glob("*.json"):
            shutil.copy(file, beside)
        found = load_predictor(run)
        assert found.identity.digest == expected.identity.digest
        assert found.predict(inputs) == expected.predict(inputs)


def test_a_remote_folder_is_read_whole(tmp_path):
    source = save_text_model(tmp_path / "bert")
    fs = fsspec.filesystem("memory")
    for file in source.iterdir():
        fs.pipe(f"/remote/bert/{file.name}", file.read_bytes())
    local, remote = load_predictor(source), load_predictor("memory://remote/bert")
    inputs = decoded(remote, [text.encode() for text in TEXTS])
    assert remote.predict(inputs) == local.predict(inputs)
    assert remote.name == "bert"


# --- embeddings of encoders without a head, judged by transformers' own forward pass of one input


def texts_of(folder: Path, model: Any) -> Path:
    """Beside the tokenizer of a small text model."""
    save_text_model(folder)
    model.save_pretrained(folder)
    return folder


def bert(folder: Path) -> Path:
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=40, initializer_range=0.2, **SIZES)
    return texts_of(folder, transformers.BertModel(config))


def distilbert(folder: Path) -> Path:
    """It does not pool, and takes no types of tokens, which the tokenizer gives."""
    config = transformers.DistilBertConfig(
        vocab_size=len(WORDS), max_position_embeddings=40, dim=24, hidden_dim=32, n_layers=2, n_heads=2
    )
    return texts_of(folder, transformers.DistilBertModel(config))


def llama(folder: Path) -> Path:
    """It has no token for padding."""
    save_writer(folder)
    transformers.LlamaForCausalLM.from_pretrained(folder).model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("make", "texts", "pools", "batch"),
    [(bert, TEXTS, True, 8), (distilbert, TEXTS, False, 8), (llama, PROMPTS, False, 1)],
)
def test_a_text_is_embedded_as_by_transformers(make, texts, pools, batch, tmp_path):
    torch.manual_seed(0)
    folder = make(tmp_path / "model")
    predictor = load_predictor(folder, embeddings=True)
    own, tokenizer = (auto.from_pretrained(folder) for auto in (transformers.AutoModel, transformers.AutoTokenizer))
    inputs, found = decoded(predictor, [text.encode() for text in texts]), []
    for text in texts:
        fields = {name: each for name, each in tokenizer(text, return_tensors="pt").items() if name != "token_type_ids"}
        with torch.no_grad():
            output = own(**fields)
        found.append(output.pooler_output[0] if pools else output.last_hidden_state[0].mean(0))
    ours = torch.tensor([answer.embedding for answer in predictor.predict(inputs)])
    assert torch.allclose(ours, torch.stack(found), atol=1e-5)
    assert len(ours.unique(dim=0)) == len(texts)
    assert (predictor.max_batch, predictor.labels) == (batch, None)
    assert predictor.outputs == (TensorSpec("embedding", "FP32", (-1, ours.shape[1])),)
    assert_company_changes_nothing(predictor, inputs)


def images_of(folder: Path, model: Any) -> Path:
    save_image_model(folder)
    model.save_pretrained(folder)
    return folder


def vit_msn(folder: Path) -> Path:
    """It does not pool."""
    return images_of(folder, transformers.ViTMSNModel(transformers.ViTMSNConfig(image_size=32, patch_size=8, **SIZES)))


def resnet(folder: Path) -> Path:
    """It pools to [n, features, 1, 1]."""
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic")
    return images_of(folder, transformers.ResNetModel(config))


def segformer(folder: Path) -> Path:
    """It does not pool, and gives a map [n, features, height, width]."""
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 12], num_attention_heads=[1, 2],
        patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2],
    )  # fmt: skip
    return images_of(folder, transformers.SegformerModel(config))


@pytest.mark.parametrize(("make", "pools"), [(vit_msn, False), (resnet, True), (segformer, False)])
def test_an_image_is_embedded_as_by_transformers(make, pools, tmp_path):
    torch.manual_seed(0)
    folder = make(tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (5, 40, 50, 3), dtype=torch.uint8, generator=generator).numpy()
    pictures = [Image.fromarray(each) for each in pixels]
    predictor = load_predictor(folder, embeddings=True)
    inputs = decoded(predictor, [as_bytes(each) for each in pictures])
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    with torch.no_grad():
        output = transformers.AutoModel.from_pretrained(folder)(**processor(pictures, return_tensors="pt"))
    hidden = output.last_hidden_state
    expected = output.pooler_output.flatten(1) if pools else hidden.mean(1 if hidden.dim() == 3 else (2, 3))
    ours = torch.tensor([answer.embedding for answer in predictor.predict(inputs)])
    assert torch.allclose(ours, expected, atol=1e-5)
    assert len(ours.unique(dim=0)) == 5
    assert_company_changes_nothing(predictor, inputs)
