"""Models of ``--model``, and the facts that are needed before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from .references import Reference, is_function

Task = Literal["images", "text", "own"]
IMAGE_SIZE, NUM_CLASSES = 28, 10  # height and width of each image, and outputs of each model of images
CONTEXT, VOCABULARY = 64, 256  # bytes of each piece of text, and values of a byte
HUGGING_FACE = "hf:"  # prefix of the folder of a transformers configuration


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Task of a model, and numbers of attention heads and hidden units that tensor parallelism can split, of layers
    that a pipeline can split, and of experts of a layer; 0 if the model cannot be split so."""

    task: Task = "images"
    heads: int = 0
    hidden: int = 0
    layers: int = 0
    experts: int = 0


MODELS: Mapping[str, ModelFacts] = {
    "vit": ModelFacts(),
    "cnn": ModelFacts(),
    "resnet18": ModelFacts(),
    "lm": ModelFacts("text", heads=4, hidden=256, layers=4),
    "lm-moe": ModelFacts("text", experts=4),
}


def facts_of(model: Reference, sizes: Mapping[str, Any]) -> ModelFacts | None:
    """Facts of a model of these sizes; None for an unknown name. A function of the user's may have any task."""
    if is_function(model):
        return ModelFacts("own")
    assert isinstance(model, str)
    if model.startswith(HUGGING_FACE):
        return ModelFacts("text") if model != HUGGING_FACE else None
    facts = MODELS.get(model)
    if facts is None:
        return None
    counts = {each.name for each in fields(facts) if getattr(facts, each.name) and each.name != "task"}
    given: dict[str, Any] = {name: value for name, value in sizes.items() if name in counts and type(value) is int}
    return replace(facts, **given)
