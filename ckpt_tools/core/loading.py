"""Python code that loads an output: pieces of it that several formats share. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def quoted(text: str) -> str:
    """``text`` as a literal of Python in double quotes, if it has none itself."""
    found = repr(text)
    return found if '"' in text or found[0] == '"' else f'"{found[1:-1]}"'


def braced(text: str) -> str:
    """``text`` as a part of an f-string."""
    return text.replace("{", "{{").replace("}", "}}")


def opened(path: str) -> str:
    """The output as a mapping of tensors, for formats that no framework loads."""
    return f"import ckpt_tools\ncheckpoint = ckpt_tools.open({quoted(path)})"


def into_job(path: str) -> str:
    """The whole state into a live model and its optimizer, for files that only ckpt-tools reads whole."""
    return f"import ckpt_tools\nextras = ckpt_tools.load_into(model, optimizer, {quoted(path)})"


def pretrained(config: Mapping[str, Any], path: str) -> str | None:
    """``from_pretrained`` of the class that ``config.json`` names; None if it is not one of transformers."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(config.get("model_type"), str) or "auto_map" in config:
        return None
    is_named = isinstance(name, str) and name.isidentifier() and name.isascii()
    known = name if is_named else "AutoModel"
    code = f"from transformers import {known}\nmodel = {known}.from_pretrained({quoted(path)})"
    return code if is_named else f"# config.json names no class: take your model's, as AutoModel has no head\n{code}"


def joined(path: str, pattern: str, module: str, call: str) -> str:
    """The state dict of all files of a folder, each loaded by ``call``."""
    each = f"for file in Path({quoted(path)}).glob({quoted(pattern)}) for name, tensor in {call}.items()"
    return f"from pathlib import Path\n{module}\nstate_dict = {{name: tensor {each}}}"
