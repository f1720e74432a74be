"""How many tokens a model takes, judged by the model itself: one more than the limit, and its library fails."""

from typing import Any

import pytest
import tokenizers
import torch
import transformers

from ckpt_tools.errors import FormatError
from inference.models.predictor import load_predictor
from tests.support.sweep import tiered

PAD, UNKNOWN, START, END, WORD = range(5)
POSITIONS = 24
WIDTHS = "hidden_size d_model n_embd dim emb_dim embedding_size word_embed_proj_dim intermediate_size encoder_ffn_dim"
WIDTHS += " decoder_ffn_dim ffn_dim hidden_dim d_ff n_inner d_inner"
SIZES = dict.fromkeys(WIDTHS.split(), 16)
SIZES |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "n_head", "n_heads"), 2)
SIZES |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "n_layer", "n_layers", "num_layers"), 2)
SIZES |= dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers"), 1)
SIZES |= dict.fromkeys(("max_position_embeddings", "max_encoder_position_embeddings"), POSITIONS)
SIZES |= {"max_decoder_position_embeddings": POSITIONS, "head_dim": 8, "d_kv": 8, "d_head": 8}
SIZES |= {"vocab_size": 40, "attention_window": 4, "block_size": 4, "num_experts": 2}

TAKEN = {  # of 24 positions, with 0 as the padding
    "bert": 24,
    "roberta": 23,
    "mpnet": 22,
    "longformer": 23,
    "bart": 24,
    "opt": 24,
    "llama": None,
    "mt5": None,
}


def config_of(family: str, **given: Any) -> Any:
    config_class = transformers.AutoConfig.for_model(family).__class__
    known = {name: size for name, size in SIZES.items() if hasattr(config_class(), name)}
    return config_class(
        **known | {"num_labels": 3, "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END} | given
    )


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForSequenceClassification.from_config(config).eval()


def takes(model: Any, num_tokens: int) -> bool:
    try:
        with torch.inference_mode():
            model(input_ids=torch.tensor([[START, *[WORD] * (num_tokens - 2), END]]))
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize(
    "family", tiered(TAKEN, test=("bert", "roberta", "mpnet", "bart", "opt", "llama"), extended=("longformer", "mt5"))
)
def test_the_longest_text_is_taken_and_a_longer_one_is_refused(family, tmp_path):
    most, folder = TAKEN[family], tmp_path / family
    model = model_of(config_of(family))
    model.save_pretrained(folder)
    known = {"<pad>": PAD, "<unk>": UNKNOWN, "<s>": START, "</s>": END, "a": WORD}
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<unk>"))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found.post_processor = tokenizers.processors.BertProcessing(("</s>", END), ("<s>", START))
    transformers.PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>").save_pretrained(folder)
    predictor = load_predictor(folder)
    length = most or POSITIONS
    longest = predictor.decode(b"a " * (length - 2), "longest")
    assert longest.shape[1] == length
    # In one pass with one that is padded.
    first, second = predictor.predict([longest, predictor.decode(b"a", "short")])
    assert first.probabilities != second.probabilities
    assert takes(model, length + 1) == (most is None)
    if most is not None:
        with pytest.raises(FormatError, match=f"^longer has {most + 1} tokens; the model takes at most {most}$"):
            predictor.decode(b"a " * (most - 1), "longer")
