"""Damaged and senseless files beside the weights: one sentence each, never an error of a library."""

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import transformers
from timm.models import save_for_hf

import inference
from ckpt_tools.errors import CkptError, FormatError
from inference.models.predictor import load_predictor
from tests.inference.tiny_models import save_image_model, save_text_model, save_writer

KINDS: dict[str, Callable[[Path], object]] = {
    "images": save_image_model,
    "texts": save_text_model,
    "writer": save_writer,
    "timm": lambda folder: save_for_hf(timm.create_model("test_vit", img_size=64), folder, safe_serialization=True),
}
VALUES = (None, True, 0, -1, 3, 2**63, 1e308, float("nan"), "", "x", "../x", "\ud800", [], {}, [None], ["x"], {"a": 1})
CONFIG, IMAGES, TOKENIZER, TOKENS = "config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders")
    for kind, save in KINDS.items():
        save(folder / kind)
    return folder


USABLE = r"config\.json is not usable"
FITS = r"config\.json is not usable: |the checkpoint does not fit the model"
PREPARED = r"preprocessor_config\.json .* is not usable"
NO_TOKENIZER = "no usable tokenizer"


@pytest.mark.parametrize(
    ("kind", "file", "changed", "told"),
    [
        ("texts", CONFIG, {"num_attention_heads": 0}, f"{USABLE}: num_attention_heads is 0, and not a number from 1"),
        ("images", CONFIG, {"id2label": 7}, USABLE),
        ("images", CONFIG, {"patch_size": 16}, "does not fit the model: shape mismatch"),
        ("images", IMAGES, {"size": {"height": 0, "width": 0}}, PREPARED),
        ("images", IMAGES, {"image_processor_type": 7}, PREPARED),
        ("texts", TOKENIZER, {"post_processor": 7}, f"{NO_TOKENIZER} .*PostProcessor"),
        ("texts", TOKENS, {"tokenizer_class": 7}, NO_TOKENIZER),
        ("writer", "generation_config.json", {"eos_token_id": 0.5}, "the files beside the weights do not fit|usable"),
        *(
            ("images", CONFIG, {key: value}, FITS)
            for key, value in (
                ("num_attention_heads", 5),
                ("hidden_size", "24"),
                ("num_hidden_layers", -1),
                ("patch_size", 0),
            )
        ),
    ],
)
def test_a_value_that_a_library_stumbles_over_is_one_sentence(kind, file, changed, told, folders, tmp_path):
    folder = shutil.copytree(folders / kind, tmp_path / kind)
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changed))
    with pytest.raises(FormatError, match=told) as caught:
        load_predictor(folder)
    assert type(caught.value) is FormatError and "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"\xff", b"[]", b"[" * 100_000], ids=range(3))
@pytest.mark.parametrize("file", [CONFIG, IMAGES])
def test_a_file_that_is_no_json_object_is_one_sentence(data, file, folders, tmp_path):
    folder = shutil.copytree(folders / "images", tmp_path / "images")
    (folder / file).write_bytes(data)
    with pytest.raises(FormatError, match=file):
        load_predictor(folder)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in a tree."""
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value[:20]) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*at, key))


def changed(tree: Any, chance: random.Random) -> bytes:
    *way, last = chance.choice([place for place in places(tree) if place])
    holder = tree
    for key in way:
        holder = holder[key]
    holder[last] = copy.deepcopy(chance.choice(VALUES))
    return json.dumps(tree).encode()


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.soak if seed else ()) for seed in range(12)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_error_of_a_library_comes_out(seed, folders, tmp_path, pytestconfig):
    chance, codes, verbosity = random.Random(seed), set(), transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    for _ in range(20 if pytestconfig.getoption("--soak") else 4):
        folder = shutil.copytree(folders / chance.choice([*KINDS]), tmp_path / "changed")
        file = chance.choice(sorted(folder.glob("*.json")))
        file.write_bytes(changed(json.loads(file.read_text()), chance))
        for load in (inference.load_model, load_predictor):
            try:
                load(folder)
            except CkptError as error:
                codes.add(error.exit_code)
        shutil.rmtree(folder)
    transformers.logging.set_verbosity(verbosity)
    assert codes <= {2, 4}
