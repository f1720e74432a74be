"""Embeddings of encoders without a head, judged by transformers' own forward pass of one input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from PIL import Image

from ckpt_tools.errors import UsageError
from inference.batch.__main__ import main
from inference.models.predictor import TensorSpec, load_predictor
from tests.inference.batch.test_batch_inputs import rows_of
from tests.inference.models.test_tasks import PROMPTS, TEXTS, as_bytes, assert_company_changes_nothing, decoded
from tests.inference.tiny_models import WORDS, save_image_model, save_text_model, save_writer

SIZES = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


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


def vit(folder: Path) -> Path:
    return images_of(folder, transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **SIZES)))


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


@pytest.mark.parametrize(("make", "pools"), [(vit, True), (vit_msn, False), (resnet, True), (segformer, False)])
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


def test_the_command_writes_them(tmp_path):
    folder, out = distilbert(tmp_path / "model"), tmp_path / "x.jsonl"
    (tmp_path / "in.txt").write_text("a good film\n" + "very " * 50 + "\nvery bad\n")
    words = ["--model", folder, "--input", tmp_path / "in.txt", "--output", out, "--quiet"]
    refused = CliRunner().invoke(main, list(map(str, words)))
    assert refused.exit_code == 2
    assert "takes tensors (input_ids INT64 [-1, -1], attention_mask INT64 [-1, -1])" in refused.stderr
    assert "or ask an encoder for --embeddings" in refused.stderr
    assert CliRunner().invoke(main, [*map(str, words), "--embeddings"]).exit_code == 6
    first, too_long, last = rows_of(out)
    assert [len(row["embedding"]) for row in (first, last)] == [24, 24]
    assert (too_long["embedding"], too_long["error"]) == (None, "1 has 52 tokens; the model takes at most 40")


def test_what_is_no_single_encoder_is_refused(tmp_path):
    folder = tmp_path / "model"
    save_text_model(folder)
    config = transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    transformers.T5Model(config).save_pretrained(folder)
    with pytest.raises(UsageError, match="a T5Model is not an encoder of images alone or of texts alone"):
        load_predictor(folder, embeddings=True)
    transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=20, **SIZES)).save_pretrained(folder)
    for each in (folder, save_writer(tmp_path / "writer")):
        with pytest.raises(UsageError, match="for a model that tells classes apart, and for an encoder without a head"):
            load_predictor(each, embeddings=True)
