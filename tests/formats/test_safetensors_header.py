"""``__metadata__`` of safetensors says how the tensors are meant: it is carried, or a note names it. The library's own
``safe_open`` is the judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.core.format_names import HEADER_ENTRY
from ckpt_tools.core.notes import Outcome
from ckpt_tools.errors import LossError
from ckpt_tools.formats.index import built_in

TORCHAO = {
    "format": "pt",
    "tensor_names": '["0.weight"]',
    "0.weight": '{"_type": "Int8Tensor", "_data": {"block_size": [1, 64]}}',
}
HEADERS = {
    "torchao": TORCHAO,
    "diffusers": {"format": "pt", "lora_adapter_metadata": '{"unet.r": 4, "unet.lora_alpha": 16}'},
    "kohya": {"ss_network_alpha": "16", "ss_network_dim": "4", "modelspec.title": "a b"},
    "comfyui": {"format": "pt", "_quantization_metadata": '{"layers": {"0": {"format": "float8_e4m3fn"}}}'},
    "mlx": {"format": "mlx"},
}
CARRYING = ("dcp", "zero1", "zero2", "zero3", "universal", "megatron", "sharded", "safetensors", "torch")


def save(path: Path, header: dict[str, str], *, names: tuple[str, ...] = ("0.weight", "1.weight")) -> Path:
    path.parent.mkdir(exist_ok=True)
    save_file({name: torch.arange(6.0).reshape(2, 3) + n for n, name in enumerate(names)}, path, metadata=header)
    return path


def header(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


@pytest.mark.parametrize("said", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("state", [None, "all"])
def test_a_file_keeps_its_header(said, state, tmp_path):
    source, out = save(tmp_path / "a.safetensors", said), tmp_path / "b.safetensors"
    report = ckpt_tools.convert(source, out, state=state, strict=True)
    assert header(out) == {"format": "pt"} | said
    assert not report.notes
    assert ckpt_tools.verify(source, out).equal


@pytest.mark.parametrize("to", [form.name for form in built_in() if form.writes and form.name != "peft"])
def test_every_format_carries_a_header_or_names_it(to, tmp_path):
    source, there = save(tmp_path / "a.safetensors", TORCHAO), tmp_path / "there"
    state = "all" if to in CARRYING else None
    report = ckpt_tools.convert(source, there, to=to, state=state)
    named = [note.what for note in report.notes if note.outcome is Outcome.DROPPED]
    assert named == ([] if to in CARRYING else [HEADER_ENTRY])
    assert ckpt_tools.verify(source, there).equal
    ckpt_tools.convert(there, tmp_path / "b.safetensors")
    assert header(tmp_path / "b.safetensors") == (TORCHAO if to in CARRYING else {"format": "pt"})
    if to not in CARRYING:
        with pytest.raises(LossError, match=HEADER_ENTRY):
            ckpt_tools.convert(source, tmp_path / "strict", to=to, strict=True)


def shards(folder: Path, *said: dict[str, str]) -> Path:
    files = {f"model-0000{n}-of-0000{len(said)}.safetensors": each for n, each in enumerate(said, 1)}
    for number, (name, each) in enumerate(files.items()):
        save(folder / name, each, names=(f"{number}.weight",))
    where = {f"{number}.weight": name for number, name in enumerate(files)}
    index = {"metadata": {"total_size": 48, "mergekit_version": "0.1"}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_have_one_header_and_what_they_do_not_share_is_named(tmp_path):
    both = {"format": "pt", "tensor_names": "[]"}
    source = shards(tmp_path / "m", {**both, "a": "1", "part": "0"}, {**both, "b": "2", "part": "1"})
    report = ckpt_tools.convert(source, tmp_path / "o", to="safetensors", max_shard_size="24")
    files = sorted((tmp_path / "o").glob("*.safetensors"))
    assert len(files) == 2
    assert all(header(file) == {**both, "a": "1", "b": "2"} for file in files)
    lost = {note.what for note in report.notes if note.is_loss}
    assert lost == {f"{HEADER_ENTRY}.part", "mergekit_version in model.safetensors.index.json"}
    with pytest.raises(LossError, match="part"):
        ckpt_tools.convert(source, tmp_path / "strict.safetensors", strict=True)


@pytest.mark.parametrize("options", [{"rename": ["^0=2"]}, {"dtype": "bfloat16"}, {"exclude": ["1.*"]}])
def test_a_note_says_that_a_header_may_not_hold_any_more(options, tmp_path):
    source, out = save(tmp_path / "a.safetensors", TORCHAO), tmp_path / "b.safetensors"
    report = ckpt_tools.convert(source, out, **options)
    assert header(out) == TORCHAO
    assert [note.what for note in report.notes if note.outcome is Outcome.KEPT] == [HEADER_ENTRY]


@pytest.mark.parametrize("other", [{"format": "pt"}, {**TORCHAO, "tensor_names": "[]"}, {**TORCHAO, "more": ""}])
def test_verify_compares_headers(other, tmp_path):
    source, out = save(tmp_path / "a.safetensors", TORCHAO), save(tmp_path / "b.safetensors", other)
    report = ckpt_tools.verify(source, out)
    assert report.num_differing == 0
    assert {each.key.fqn.split(".")[0] for each in report.differences} == {HEADER_ENTRY}


def test_ties_and_pieces_are_no_texts(tmp_path):
    source = save(tmp_path / "a.safetensors", {"format": "pt", "tied.weight": "0.weight", "said": "x"})
    ckpt_tools.convert(source, tmp_path / "b.safetensors")
    assert header(tmp_path / "b.safetensors") == {"format": "pt", "tied.weight": "0.weight", "said": "x"}
    with ckpt_tools.open(source) as checkpoint:
        assert checkpoint.extras == {HEADER_ENTRY: {"said": "x"}}
