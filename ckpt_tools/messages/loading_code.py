"""Python code that loads an output: pieces of it that several formats share. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def quote_literal(text: str) -> str:
    """``text`` as a literal of Python in double quotes, if it has none itself."""
    found = repr(text)
    return found if '"' in text or found[0] == '"' else f'"{found[1:-1]}"'


def escape_braces(text: str) -> str:
    """``text`` as a part of an f-string."""
    return text.replace("{", "{{").replace("}", "}}")


def make_open_snippet(path: str) -> str:
    """Code that opens the output as a mapping of tensors, for formats that no framework loads."""
    return f"import ckpt_tools\ncheckpoint = ckpt_tools.open({quote_literal(path)})"


def make_load_into_snippet(path: str) -> str:
    """Code that loads the whole state into a live model and its optimizer, for files that only ckpt-tools reads
    whole."""
    return f"import ckpt_tools\nextras = ckpt_tools.load_into(model, optimizer, {quote_literal(path)})"


def make_from_pretrained_snippet(config: Mapping[str, Any], path: str) -> str | None:
    """Code that calls ``from_pretrained`` of the class that ``config.json`` names; None if it is not of
    transformers."""
    class_names = config.get("architectures")
    name = class_names[0] if isinstance(class_names, list) and class_names else None
    if not isinstance(config.get("model_type"), str) or "auto_map" in config:
        return None
    is_named = isinstance(name, str) and name.isidentifier() and name.isascii()
    class_name = name if is_named else "AutoModel"
    code = f"from transformers import {class_name}\nmodel = {class_name}.from_pretrained({quote_literal(path)})"
    return code if is_named else f"# config.json names no class: take your model's, as AutoModel has no head\n{code}"


def make_joined_files_snippet(path: str, pattern: str, module: str, call: str) -> str:
    """Code that makes the state dict of all files of a folder, each loaded by ``call``."""
    each = f"for file in Path({quote_literal(path)}).glob({quote_literal(pattern)}) for name, tensor in {call}.items()"
    return f"from pathlib import Path\n{module}\nstate_dict = {{name: tensor {each}}}"
