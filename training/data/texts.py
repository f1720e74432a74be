"""Text as pieces of bytes, or of the tokens of ``hf:FOLDER``."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_tools.errors import FormatError, UsageError

from ..config import PACKAGE
from ..config.model_names import CONTEXT, TOKENIZER, VOCABULARY, files_in, folder_of, read_config, read_tokenizer
from ..config.references import first_line
from ..config.train_config import TrainConfig

TEXTS = "texts"
HELD_OUT_EVERY = 10

Documents = tuple[tuple[str, bytes], ...]


def cut_into_pieces(
    root: Path | None, hub: Path | None, context: int | None, *, held_out: bool
) -> tuple[Tensor, Tensor]:
    """Pieces of ``context`` bytes or tokens, int [n, context], and what follows each of these, int64 [n, context]. The
    text is the bundled one, or the ``.txt`` files of a folder in order; every tenth piece is held out. ``hub`` is the
    folder of the model, whose tokenizer is used if it has one. Raises ``UsageError``, ``FormatError``."""
    context = CONTEXT if context is None else context
    if type(context) is not int or context < 1:
        raise UsageError(f"--dataset-arg context is a length of at least 1, not {context!r}")
    limit = None if hub is None else getattr(_text_config(hub), "max_position_embeddings", None)
    if isinstance(limit, int) and context > limit:
        raise UsageError(f"--dataset-arg context={context} is longer than the {limit} positions of {hub}")
    content = _read_content(root, hub)
    count = (len(content) - 1) // context
    if count < HELD_OUT_EVERY:
        place = "the text" if root is None else f"--data-root {root}"
        unit = "bytes of text" if content.dtype == torch.uint8 else "tokens of text"
        raise UsageError(f"{place} has {len(content)} {unit}, too few to learn from")
    pieces = content[: count * context].view(count, context)
    following = content[1 : count * context + 1].view(count, context).to(torch.int64)
    is_in_part = (torch.arange(count) % HELD_OUT_EVERY == 0) == held_out
    return pieces[is_in_part], following[is_in_part]


def list_tokenizer_messages(config: TrainConfig) -> list[str]:
    """Message about a folder without a tokenizer."""
    hub = folder_of(config.model) if config.dataset == "text" else None
    if hub is None or files_in(hub, TOKENIZER):
        return []
    return [f"{hub} has no tokenizer: the model learns the bytes of the text"]


def _read_content(root: Path | None, hub: Path | None) -> Tensor:
    """Bytes of the text, uint8, or its tokens, int32; 1-d."""
    documents = _read_documents(root)
    if hub is not None and files_in(hub, TOKENIZER):
        return _tokenize_documents(documents, hub)
    if hub is not None:
        _check_vocabulary(hub, VOCABULARY, "bytes of a text")
    return torch.frombuffer(bytearray(b"\n".join(content for _, content in documents)), dtype=torch.uint8)


@lru_cache(maxsize=1)
def _tokenize_documents(documents: Documents, hub: Path) -> Tensor:
    """Tokens of the documents in order, each with the special tokens that the tokenizer adds. Cached, because both
    parts of the dataset are cut from them."""
    tokenizer = read_tokenizer(hub)
    _check_vocabulary(hub, max(tokenizer.get_vocab().values(), default=0) + 1, "tokens of its tokenizer")
    each = tokenizer([_decode_document(name, content) for name, content in documents], verbose=False)["input_ids"]
    tokens = torch.tensor([token for one in each for token in one], dtype=torch.int32)
    if {*tokens.unique().tolist()} <= {*tokenizer.all_special_ids}:
        raise FormatError(f"{hub} has a tokenizer that knows no part of the text: its vocabulary is missing")
    return tokens


def _check_vocabulary(hub: Path, needed: int, what: str) -> None:
    if (known := _text_config(hub).vocab_size) < needed:
        raise FormatError(f"{hub}: vocab_size is {known}, and there are {needed} {what}")


def _text_config(hub: Path) -> Any:
    """The configuration of the model's text part, which is all of it for most."""
    return read_config(hub).get_text_config()


def _decode_document(name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8, which a tokenizer needs: {first_line(error)}") from error


def _read_documents(root: Path | None) -> Documents:
    """Name and content of each. Raises ``UsageError`` if there is no text."""
    if root is None:
        return (("text", resources.files(PACKAGE).joinpath(TEXTS, "coriolanus.txt").read_bytes()),)
    try:
        files = sorted(path for path in root.iterdir() if path.match("*.txt") and path.is_file())
        documents = tuple((str(path), path.read_bytes()) for path in files)
    except OSError as error:
        raise UsageError(f"--data-root {root} is not a folder that can be read: {error.strerror}") from error
    if not any(content for _, content in documents):
        what = f"only empty .txt files, such as {files[0].name}" if files else "no .txt file"
        raise UsageError(f"--data-root {root} holds {what}")
    return documents
