"""Tiny models that transformers makes and saves itself, with all that its pipelines need beside the weights."""

from pathlib import Path

import tokenizers
import torch
import transformers

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "very", "a", "the", "was", "not", "play", "##s")


def save_image_model(folder: Path, *, seed: int = 0, **config: object) -> Path:
    torch.manual_seed(seed)
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=32,
            patch_size=8,
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            id2label={0: "cat", 1: "dog", 2: "emu"},
            label2id={"cat": 0, "dog": 1, "emu": 2},
            **config,
        )
    )
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def save_text_model(folder: Path, *, seed: int = 0, **config: object) -> Path:
    torch.manual_seed(seed)
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=len(WORDS),
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=40,
            initializer_range=0.2,
            id2label={0: "NEGATIVE", 1: "NEUTRAL", 2: "POSITIVE"},
            label2id={"NEGATIVE": 0, "NEUTRAL": 1, "POSITIVE": 2},
            **config,
        )
    )
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(folder)
    transformers.BertTokenizer(vocab={word: n for n, word in enumerate(WORDS)}).save_pretrained(folder)
    return folder


CHAT = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('no system, please') }}{% endif %}"
    "<{{ message.role[0] }}>{{ message.content | trim }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
"""A chat template with what those of the hub have: a loop, filters, special tokens, and a role that it refuses."""


def save_writer(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    chat_template: str | None = None,
    **config: object,
) -> Path:
    """A model of Llama's kind over bytes; it ends at a token of its own."""
    torch.manual_seed(seed)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)} | {"<end>": len(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=48,
            bos_token_id=None,
            eos_token_id=len(alphabet),
            initializer_range=1.0,
            **config,
        )
    ).to(dtype)
    model.save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", chat_template=chat_template
    )
    fast.save_pretrained(folder)
    return folder
