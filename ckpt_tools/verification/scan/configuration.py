"""Names of code in JSON and YAML, which documented loaders of checkpoints import or call. Pure.

Every loader here is run on a folder of a checkpoint as its documentation says. ``docs/scanning_grammar.md`` lists
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ckpt_tools.core.values import Opaque

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_FILE = re.compile(r"\.(pt|pth|bin|ckpt|safetensors|json|ya?ml|txt|npz?|gguf|model|onnx|csv|h5)$")


@dataclass(frozen=True, slots=True)
class CodeName:
    """A ``name`` of code, and the sentence of the finding."""

    name: str
    what: str


def code_names(path: str, document: Any) -> Iterator[CodeName]:
    """The names of code in one document of the file ``path``."""
    file = path.rpartition("/")[2].lower()
    if file == "modules.json":
        yield from _entries(document, _of_sentence_transformers)
    elif file == "model_index.json":
        yield from _entries([document], _of_diffusers)
    yield from _entries(document, _of_any)


_INSTANTIATORS = re.compile(r"(lightning\.pytorch|pytorch_lightning)\.cli\.instantiate_module")


def instantiator(value: Any) -> Iterator[CodeName]:
    """The function that Lightning calls for the hyperparameters of a checkpoint, unless it is its own."""
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        found = value.get(key) if type(value) is dict else None
        pairs = found.pairs if type(found) is Opaque else found.items() if isinstance(found, dict) else ()
        for inner, name in pairs:
            if inner == "_instantiator" and not (type(name) is str and _INSTANTIATORS.fullmatch(name)):
                yield from _named("_instantiator", name, "Lightning calls")


def _entries(document: Any, names: Callable[[dict[Any, Any]], Iterator[CodeName]]) -> Iterator[CodeName]:
    """The names in each object of ``document``; an object that aliases of YAML repeat is looked at once."""
    seen, todo = set[int](), [document]
    while todo:
        value = todo.pop()
        if isinstance(value, dict | list) and id(value) not in seen:
            seen.add(id(value))
            todo += value.values() if isinstance(value, dict) else value
            if isinstance(value, dict):
                yield from names(value)


def _texts(value: Any) -> Iterator[str]:
    """The strings in ``value``, at any depth."""
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, dict | list):
            todo += value.values() if isinstance(value, dict) else value
        elif isinstance(value, str):
            yield value


_CODE_FILES = {
    "auto_map": "transformers runs if it is told to trust it",
    "custom_pipelines": "transformers runs if it is told to trust it",
    "custom_pipeline": "diffusers runs if it is told to trust it",
}
"""Keys whose value names files of code."""

_CALLED = {
    "_target_": "hydra.utils.instantiate and NeMo call",
    "_component_": "torchtune calls",
    "class_path": "jsonargparse, and so LightningCLI, calls",
    "()": "logging.config calls",
}
"""Keys whose value is a name that is imported and called."""

_TRUSTED = {
    "parent_library": ("peft imports", r"(transformers|torch|diffusers|timm|peft)(\.|$)"),
    "activation_function": ("sentence-transformers calls", r"torch\.nn\.|[^.]*$"),
}
"""Keys whose value is such a name unless it matches."""


def _of_any(entry: dict[Any, Any]) -> Iterator[CodeName]:
    for key, value in entry.items():
        if key in _CODE_FILES:
            for name in _texts(value):
                yield CodeName(name, f"its {key} names code, which {_CODE_FILES[key]}: {name}")
        elif key in _CALLED:
            yield from _named(key, value, _CALLED[key])
        elif key == "target" and type(value) is str and _DOTTED.fullmatch(value) and not _FILE.search(value):
            yield from _named(key, value, "latent-diffusion and NeMo call")
        elif key in _TRUSTED and type(value) is str and not re.match(_TRUSTED[key][1], value):
            yield from _named(key, value, _TRUSTED[key][0])
    yield from _of_keras(entry)
    if entry.get("_type") == "CLOUDPICKLE_FALLBACK":
        yield CodeName("cloudpickle.loads", "it holds a pickle in hexadecimal, which Ray Tune loads")
    if "version" in entry and not entry.keys().isdisjoint(("handlers", "formatters", "filters")):
        yield CodeName("logging.config", "it is a configuration of logging, whose classes logging.config calls")


def _named(key: str, value: Any, what: str) -> Iterator[CodeName]:
    name = value if type(value) is str else "something that is not a text"
    yield CodeName(name, f"its {key} is a name that {what}: {name}")


_KERAS_MODULES = re.compile(r"(keras|tf_keras|tensorflow)(\.|$)")


def _of_keras(entry: dict[Any, Any]) -> Iterator[CodeName]:
    kind, module = entry.get("class_name"), entry.get("module")
    if kind in ("Lambda", "__lambda__"):
        yield CodeName(f"keras.{kind}", f"it is a layer of Keras that holds code: {kind}")
    elif type(kind) is str and type(module) is str and "config" in entry and not _KERAS_MODULES.match(module):
        yield CodeName(f"{module}.{kind}", f"it is an object of Keras whose module Keras imports: {module}.{kind}")


def _of_sentence_transformers(entry: dict[Any, Any]) -> Iterator[CodeName]:
    kind = entry.get("type")
    if type(kind) is str and not kind.startswith("sentence_transformers."):
        yield from _named("type", kind, "sentence-transformers imports")


_DIFFUSERS = re.compile(
    r"diffusers|transformers|audioldm2|deepfloyd_if|kandinsky|latent_diffusion|paint_by_example|shap_e|stable_cascade|"
    r"stable_diffusion|unidiffuser|versatile_diffusion|wuerstchen"
)
"""Libraries of the parts of a pipeline, and pipelines of diffusers that have parts of their own."""


def _of_diffusers(entry: dict[Any, Any]) -> Iterator[CodeName]:
    for key, value in entry.items():
        if not (isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)):
            continue
        library, kind = value
        if key == "_class_name" or not _DIFFUSERS.fullmatch(library):
            name = f"{library}.{kind}"
            yield CodeName(name, f"its part {key} is a name that diffusers imports: {name}")
