"""Small folders as of the hub: a Llama with its weights, and a tokenizer of 300 tokens that was made for the text."""

from importlib import resources
from pathlib import Path
from typing import Any

import torch

TEXT = resources.files("training").joinpath("texts", "coriolanus.txt").read_text()
VOCABULARY = 300


def save_llama(folder: Path, **sizes: Any) -> Path:
    """``config.json`` and ``model.safetensors``; the same for the same sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    given = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "tie_word_embeddings": True, **small, **sizes}
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**given)).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path) -> Path:
    """``tokenizer.json`` and ``tokenizer_config.json``: pairs of bytes, and a token before each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder
