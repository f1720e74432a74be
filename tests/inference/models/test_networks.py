"""Networks by tensors in and out, judged bit for bit by the network itself, called with a pass of the same size."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from torch.export import Dim

from ckpt_tools.errors import FormatError, UsageError
from inference.models.predictor import Prediction, Predictor, TensorSpec, load_predictor
from tests.inference.commands import predicted

GENERATOR = np.random.default_rng(0)

Row = tuple[np.ndarray, ...]


def in_full_passes(network: Callable[..., Any], rows: Sequence[Row], full: int) -> list[Any]:
    """What the network gives for each of the rows, which have one shape, in passes filled with copies of the last."""
    found = []
    for start in range(0, len(rows), full):
        chunk = rows[start : start + full]
        padded = [*chunk, *[chunk[-1]] * (full - len(chunk))]
        with torch.no_grad():
            answer = network(*(torch.from_numpy(np.stack(each)) for each in zip(*padded, strict=True)))
        found += [{name: each[number] for name, each in answer.items()} for number in range(len(chunk))]
    return found


def assert_same_bits(ours: Sequence[Prediction], theirs: Sequence[dict[str, Tensor]]) -> None:
    for found, expected in zip(ours, theirs, strict=True):
        assert set(found.columns) == set(expected)
        for name, each in expected.items():
            assert (found[name].shape, found[name].tobytes()) == (tuple(each.shape), each.numpy().tobytes())


def floats(*shape: int) -> np.ndarray:
    return GENERATOR.standard_normal(shape).astype(np.float32)


def masks(size: int) -> np.ndarray:
    return GENERATOR.integers(2, size=size).astype(bool)


class Pair(nn.Module):
    """Two inputs, a number, and outputs in a dictionary and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, values: Tensor, mask: Tensor, scale: int = 2) -> dict[str, Any]:
        found = self.linear(values) * scale
        return {"logits": found, "pair": (found.softmax(1), mask.to(torch.int32))}


def flat(answer: dict[str, Any]) -> dict[str, Tensor]:
    return {"logits": answer["logits"], "pair_0": answer["pair"][0], "pair_1": answer["pair"][1]}


def scaled(pair: Pair) -> Callable[..., dict[str, Tensor]]:
    return lambda *given: flat(pair(*given, scale=3))


@pytest.fixture
def pair():
    torch.manual_seed(0)
    return Pair().eval()


# --- programs


def exported(file: Path, pair: Pair, num_rows: int, shapes: object = None) -> Path:
    """A program that multiplies by 3."""
    given = (torch.randn(num_rows, 4), torch.ones(num_rows, 5, dtype=torch.bool))
    torch.export.save(torch.export.export(pair, given, {"scale": 3}, dynamic_shapes=shapes), file)
    return file


def written(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's, in the way of imports."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))


def test_a_program_says_itself_what_it_takes_and_gives(pair, tmp_path):
    batch, length = Dim("batch", min=1, max=6), Dim("length", min=2, max=9)
    shapes = {"values": {0: batch}, "mask": {0: batch, 1: length}, "scale": None}
    file = exported(tmp_path / "pair.pt2", pair, 3, shapes)
    predictor = load_predictor(file, architecture="torch.export")
    assert predictor.inputs == (TensorSpec("values", "FP32", (-1, 4)), TensorSpec("mask", "BOOL", (-1, -1)))
    assert predictor.outputs == (
        TensorSpec("logits", "FP32", (-1, 3)),
        TensorSpec("pair_0", "FP32", (-1, 3)),
        TensorSpec("pair_1", "INT32", (-1, -1)),
    )
    assert (predictor.max_batch, predictor.is_exact, predictor.identity.format) == (6, True, "torch.export")
    rows = [(floats(4), masks(5 if number % 3 else 3)) for number in range(13)]
    by_length: dict[int, list[int]] = {}
    for number, (_, mask) in enumerate(rows):
        by_length.setdefault(len(mask), []).append(number)
    ours = predictor.predict(rows)
    for numbers in by_length.values():
        theirs = in_full_passes(scaled(pair), [rows[n] for n in numbers], 6)
        assert_same_bits([ours[number] for number in numbers], theirs)
    for mask in (masks(1), masks(10)):
        with pytest.raises(FormatError, match=r"dimension 1 of mask has the size .*; the program takes 2 to 9"):
            predictor.predict([(floats(4), mask)])


@pytest.mark.parametrize("exact", ["full", "buckets"])
def test_a_program_of_a_fixed_batch_gets_it(exact, pair, tmp_path):
    file = exported(tmp_path / "pair.pt2", pair, 4)
    predictor = load_predictor(file, architecture="torch.export", exact=exact)
    assert predictor.max_batch == 4
    rows = [(floats(4), masks(5)) for _ in range(6)]
    assert_same_bits(predictor.predict(rows), in_full_passes(scaled(pair), rows, 4))


def test_a_program_that_was_made_for_two_rows_or_more_gets_no_single_one(pair, tmp_path):
    """torch may have assumed that no size is 1."""
    dynamic = {0: Dim.DYNAMIC}
    file = exported(tmp_path / "x.pt2", pair, 3, {"values": dynamic, "mask": dynamic, "scale": None})
    predictor = load_predictor(file, architecture="torch.export", exact="buckets")
    assert min(predictor.batch_sizes["4, 5"]) >= 2
    rows = [(floats(4), masks(5))]
    assert_same_bits(predictor.predict(rows), in_full_passes(scaled(pair), rows, 8))


def test_a_program_without_a_batch_is_refused(tmp_path):
    class Sum(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return values.sum()

    torch.export.save(torch.export.export(Sum(), (torch.ones(3, 4),)), tmp_path / "x.pt2")
    with pytest.raises(UsageError, match=r"the program's output is \[\]; the first dimension of every"):
        load_predictor(tmp_path / "x.pt2", architecture="torch.export")
    with pytest.raises(UsageError, match="has its own names and dtypes; leave out rename"):
        load_predictor(tmp_path / "x.pt2", architecture="torch.export", rename=["a=b"])


def test_a_script_is_described_by_a_module(pair, tmp_path, monkeypatch):
    with pytest.warns(FutureWarning, match="deprecated"):
        torch.jit.script(nn.Sequential(pair.linear, nn.ReLU())).save(tmp_path / "script.pt")
    with pytest.raises(UsageError, match=r"does not say the shapes of its inputs; write torchscript:MODULE.* inputs ="):
        load_predictor(tmp_path / "script.pt", architecture="torchscript")
    written(tmp_path, "of_script", 'inputs = {"x": ("FP32", [-1, 4])}\noutputs = {"y": ("FP32", [-1, 3])}', monkeypatch)
    predictor = load_predictor(tmp_path / "script.pt", architecture="torchscript:of_script")
    rows = [(floats(4),) for _ in range(3)]
    theirs = in_full_passes(lambda given: {"y": pair.linear(given).relu()}, rows, 8)
    assert_same_bits(predictor.predict([row[0] for row in rows]), theirs)


# --- functions of the user's

NETWORK = """
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x):
        y = self.linear(x)
        {returned}

{more}
"""

INPUTS = 'inputs = {"x": ("FP32", [-1, 3])}'


def own_network(folder: Path, returned: str, more: str = INPUTS, **options: Any) -> tuple[Predictor, nn.Linear]:
    torch.manual_seed(0)
    linear = nn.Linear(3, 2)
    save_file({f"linear.{name}": each for name, each in linear.state_dict().items()}, folder / "x.safetensors")
    (folder / "own.py").write_text(f"import torch\n{NETWORK.format(returned=returned, more=more)}")
    return load_predictor(folder / "x.safetensors", architecture=f"{folder}/own.py:Network", **options), linear


NAMED = f'{INPUTS}\noutputs = {{"up": ("FP32", [-1, 2]), "down": ("FP32", [-1, -1])}}'
AGAIN = """if not hasattr(self, "memory"):
            self.memory = torch.empty(8, 2)
        return self.memory[:len(y)].copy_(y)"""


@pytest.mark.parametrize(
    ("returned", "more", "network"),
    [
        ("return y", INPUTS, lambda y: {"output": y}),
        ("return y, [-y, y]", INPUTS, lambda y: {"output_0": y, "output_1_0": -y, "output_1_1": y}),
        ('return {"a": y, "b": {"c": -y, "d": None}}', INPUTS, lambda y: {"a": y, "b_c": -y}),
        (
            'return __import__("dataclasses").make_dataclass("D", ["p", "q"])(y, -y)',
            *(INPUTS, lambda y: {"p": y, "q": -y}),
        ),
        ("return y, -y", NAMED, lambda y: {"up": y, "down": -y}),
        (AGAIN, INPUTS, lambda y: {"output": y}),
    ],
    ids=["one", "nested", "dictionary", "dataclass", "the user's names", "the same memory again"],
)
def test_outputs_are_named_by_their_keys(returned, more, network, tmp_path):
    predictor, linear = own_network(tmp_path, returned, more)
    rows = [(floats(3),) for _ in range(20)]
    theirs = in_full_passes(lambda x: network(linear(x)), rows, 8)
    shapes = {name: (-1, -1) if name == "down" else (-1, 2) for name in theirs[0]}
    assert predictor.outputs == tuple(TensorSpec(name, "FP32", shape) for name, shape in shapes.items())
    assert_same_bits(predictor.predict([row[0] for row in rows]), theirs)


@pytest.mark.parametrize(
    ("returned", "more", "sentence"),
    [
        ("return y", "", r'does not say what its network takes; add a line such as inputs = \{"image": \("FP32"'),
        ("return y", 'inputs = {"x": ("float", [-1, 3])}', "it is a datatype .* and a shape that begins with -1"),
        ("return y", 'inputs = {"x": ("FP32", [1, 3])}', "a shape that begins with -1"),
        ("return y", 'inputs = {"x": ("FP32", [-1, 5])}', r"does not answer random values \(x FP32 \[5\]\): "),
        ("return y", INPUTS + "\ndecode = 3", "decode of .* is a int, not a function"),
        ("return y", INPUTS + '\noutputs = {"y": ("FP32", [-1, 3])}', r"outputs says that y is .*; the network gives"),
        ("return y.sum()", INPUTS, r"the output output has the shape \[\] for 8 rows; its first dimension has to be"),
        ("return y, 3", INPUTS, "the output output_1 is of int; outputs are tensors"),
        ('return {"a_b": y, "a": {"b": y}}', INPUTS, "two outputs named a_b"),
    ],
)
def test_what_is_not_described_well_is_one_sentence(returned, more, sentence, tmp_path):
    with pytest.raises(UsageError, match=sentence):
        own_network(tmp_path, returned, more)


def test_rows_that_depend_on_each_other_are_answered_one_at_a_time(tmp_path):
    predictor, linear = own_network(tmp_path, "return y - y.mean(0), y @ y.T")
    assert predictor.max_batch == 1
    rows = [floats(3) for _ in range(3)]
    for row, found in zip(rows, predictor.predict(rows), strict=True):
        with torch.no_grad():
            one = linear(torch.from_numpy(row)[None])
        assert found["output_0"].tolist() == [0.0, 0.0]
        assert found["output_1"].tobytes() == (one @ one.T)[0].numpy().tobytes()


FUNCTIONS = """
inputs = {"x": ("FP32", [-1, 3])}

def decode(data):
    import numpy
    return numpy.array([float(each) for each in data.split()], numpy.float32)

def encode(outputs):
    return {"largest": int(outputs["output"].argmax()), "all": outputs["output"].tolist()}
"""


def test_files_are_predicted_by_the_users_functions(tmp_path):
    predictor, linear = own_network(tmp_path, "return y", FUNCTIONS)
    for name, text in (("a.dat", "1 2 3"), ("b.dat", "1 2 x"), ("c.dat", "1 2")):
        (tmp_path / name).write_text(text)
    (tmp_path / "names.txt").write_text("a.dat\nb.dat\nc.dat\n")
    words = tmp_path / "x.safetensors", tmp_path / "names.txt"
    option = f"--architecture={tmp_path}/own.py:Network"
    rows, table = (predicted(*words, tmp_path / f"out.{kind}", option, code=6) for kind in ("jsonl", "parquet"))
    (first, *_) = predicted(*words, tmp_path / "half.jsonl", option, "--dtype=bfloat16", code=6)
    given = torch.tensor([[1.0, 2.0, 3.0]] * 8)
    with torch.no_grad():
        theirs = linear(given)[0].tolist()
        assert first["outputs"]["all"] == deepcopy(linear).bfloat16()(given.bfloat16())[0].float().tolist()
    assert rows[0]["outputs"] == {"largest": int(theirs[1] > theirs[0]), "all": theirs}
    assert "could not convert string to float" in rows[1]["error"]
    assert "has for x float32 [2]; the model takes FP32 [3]" in rows[2]["error"]
    assert json.loads(table[0]["outputs"]) == rows[0]["outputs"]
    assert [row["error"] for row in table] == [row["error"] for row in rows]
    assert predictor.predict([predictor.decode(b"1 2 3", "a")])[0].to_plain() == rows[0]["outputs"]


# --- libraries


SIZES = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def tokens(length: int, below: int = 20) -> np.ndarray:
    return GENERATOR.integers(below, size=length)


def t5() -> Any:
    config = transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


def clip() -> Any:
    text = {"vocab_size": 20, "max_position_embeddings": 9, "eos_token_id": 19, **SIZES}
    vision = {"image_size": 16, "patch_size": 8, **SIZES}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=6))


def bert(kind: str) -> Any:
    return getattr(transformers, kind)(transformers.BertConfig(vocab_size=20, max_position_embeddings=16, **SIZES))


def wav2vec2() -> Any:
    config = transformers.Wav2Vec2Config(
        vocab_size=9, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, num_feat_extract_layers=2, **SIZES,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


def text_row(length: int = 7) -> Row:
    return tokens(length), np.ones(length, np.int64)


def typed_row() -> Row:
    return *text_row(), tokens(7, 2)


def layout() -> Any:
    config = transformers.LayoutLMConfig(vocab_size=20, max_2d_position_embeddings=20, **SIZES)
    return transformers.LayoutLMForTokenClassification(config)


@dataclass(frozen=True)
class Case:
    make: Callable[[], Any]
    row: Callable[[], Row]  # of one shape
    outputs: tuple[str, ...]
    full: int = 8


BOTH = "encoder_last_hidden_state"
CASES: dict[str, Case] = {
    "t5": Case(t5, lambda: (*text_row(), tokens(3)), ("logits", BOTH)),
    "clip": Case(
        clip,
        lambda: (tokens(5), floats(3, 16, 16), np.ones(5, np.int64)),
        ("logits_per_image", "logits_per_text", "text_embeds", "image_embeds"),
        full=1,
    ),
    "question answering": Case(lambda: bert("BertForQuestionAnswering"), typed_row, ("start_logits", "end_logits")),
    "boxes of words": Case(
        layout,
        lambda: (tokens(7), GENERATOR.integers(5, size=(7, 4)).cumsum(1), np.ones(7, np.int64), tokens(7, 2)),
        ("logits",),
    ),
    "wav2vec2": Case(wav2vec2, lambda: (floats(400),), ("logits",)),
}


@pytest.mark.parametrize(
    "name",
    CASES,
)
def test_a_model_of_transformers_is_answered_by_its_own_forward(name, tmp_path):
    torch.manual_seed(0)
    case = CASES[name]
    model, rows = case.make(), [case.row() for _ in range(3)]
    model.save_pretrained(tmp_path)
    predictor = load_predictor(tmp_path)
    # A copy: those of from_pretrained lie in the file's own memory, and MKL rounds otherwise for another alignment.
    own = deepcopy(type(model).from_pretrained(tmp_path)).eval()
    names = [spec.name for spec in predictor.inputs]

    def network(*given: Tensor) -> dict[str, Tensor]:
        answer = own(**dict(zip(names, given, strict=True)))
        return {name: each for name, each in answer.items() if isinstance(each, Tensor)}

    assert tuple(spec.name for spec in predictor.outputs) == case.outputs
    assert predictor.max_batch == case.full
    items = [row if len(row) > 1 else row[0] for row in rows]
    ours = predictor.predict(items)
    assert_same_bits(ours, in_full_passes(network, rows, case.full))
    assert ours[2] == predictor.predict(items[2:])[0]
    assert len({each[case.outputs[0]].tobytes() for each in ours}) == 3


def test_tokens_that_a_model_has_no_place_for_are_refused(tmp_path):
    bert("BertForTokenClassification").save_pretrained(tmp_path)
    predictor = load_predictor(tmp_path)
    types = np.zeros(3, np.int64)
    for row, sentence in (
        ((tokens(3) + 20, tokens(3), types), "input_ids has numbers that are not from 0 to 19"),
        ((tokens(17), tokens(17), types), "input_ids has 17 tokens; the model takes at most 16"),
        ((tokens(3), tokens(4), types), "and token_type_ids have different numbers of tokens"),
        ((floats(3), types, types), r"row 0 has for input_ids float32 \[3\]; the model takes INT64 \[-1\]"),
    ):
        with pytest.raises(FormatError, match=sentence):
            predictor.predict([row])


def test_a_model_that_needs_more_is_refused_by_name(tmp_path):
    config = transformers.PatchTSTConfig(num_input_channels=1, context_length=8, d_model=8, num_hidden_layers=1)
    transformers.PatchTSTForRegression(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="a PatchTSTForRegression takes past_values, which is not known here; build"):
        load_predictor(tmp_path)


def test_features_of_timm_are_tensors(tmp_path):
    torch.manual_seed(0)
    own = timm.create_model("resnet10t", features_only=True).eval()
    save_model(own, str(tmp_path / "x.safetensors"))
    predictor = load_predictor(
        tmp_path / "x.safetensors", architecture="timm:resnet10t?features_only=True", max_batch=2
    )
    assert predictor.inputs == (TensorSpec("image", "FP32", (-1, 3, 176, 176)),)

    def named(images: Tensor) -> dict[str, Tensor]:
        return {f"output_{n}": each for n, each in enumerate(own(images))}

    rows = [(floats(3, 176, 176),) for _ in range(2)]
    assert_same_bits(predictor.predict([row[0] for row in rows]), in_full_passes(named, rows, 2))


@pytest.mark.extended
def test_segmentation_of_torchvision(tmp_path):
    torch.manual_seed(0)
    name = "lraspp_mobilenet_v3_large"
    own = torchvision.models.get_model(name, weights=None, weights_backbone=None).eval()
    torch.save(own.state_dict(), tmp_path / "x.pt")
    predictor = load_predictor(tmp_path / "x.pt", architecture=f"torchvision:{name}", max_batch=2)
    assert predictor.outputs == (TensorSpec("out", "FP32", (-1, 21, -1, -1)),)
    rows = [(floats(3, 64, 96),), (floats(3, 96, 64),)]
    for row, found in zip(rows, predictor.predict([row[0] for row in rows]), strict=True):
        assert_same_bits([found], in_full_passes(own, [row], 2))


def test_detection_of_torchvision(tmp_path):
    torch.manual_seed(3)
    name = "ssdlite320_mobilenet_v3_large"
    own = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=3).eval()
    torch.save(own.state_dict(), tmp_path / "x.pt")
    predictor = load_predictor(tmp_path / "x.pt", architecture=f"torchvision:{name}?num_classes=3")
    assert {spec.name: spec.shape for spec in predictor.outputs} == {
        "boxes": (-1, -1, 4), "scores": (-1, -1), "labels": (-1, -1),
    }  # fmt: skip
    images = [floats(3, 64, 96), floats(3, 96, 64)]
    for image, found in zip(images, predictor.predict(images), strict=True):
        with torch.no_grad():
            theirs = own([torch.from_numpy(image)])
        assert_same_bits([found], theirs)
