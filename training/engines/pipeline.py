"""Stages of a pipeline of the language model: consecutive layers, with the names of the whole model.

The first stage has the embedding, the last one the norm and the head. Embedding and head are one matrix, of which both
stages keep a copy; they sum their gradients at each step, so the copies stay equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, count

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..config.model_names import VOCABULARY, facts_of
from ..config.train_config import TrainConfig
from ..models.language_model import LanguageModel
from ..models.zoo import ModelSpec
from .blocks import OnBlock, build


class Stage(nn.Module):
    """Consecutive layers of the model: bytes or hidden states to hidden states or logits."""

    def __init__(self, model: LanguageModel, layers: range, number: int, stages: int) -> None:
        super().__init__()
        self.is_first, self.is_last = number == 0, number == stages - 1
        self.width, self.all_layers = model.sizes.width, model.sizes.layers
        if self.is_first or self.is_last:
            self.embed, self.head = model.embed, model.head
        self.layers = nn.ModuleDict({str(layer): model.layers[layer] for layer in layers})
        if self.is_last:
            self.norm = model.norm

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if self.is_last else x


def layers_of(number: int, stages: int, layers: int) -> range:
    """Layers of a stage; if the stages do not divide them, the first ones have one more."""
    each, left = divmod(layers, stages)
    start = number * each + min(number, left)
    return range(start, start + each + (number < left))


def build_stage(config: TrainConfig, spec: ModelSpec, number: int, on_block: OnBlock) -> Stage:
    """The stage with the seed's weights; ``on_block`` gets its blocks, weights of others are dropped once drawn."""
    facts = facts_of(config.model, config.model_arguments)
    assert facts is not None, "the configuration has a model of layers"
    mine = layers_of(number, config.pp, facts.layers)
    position = count()

    def on_each(block: nn.Module) -> None:
        if next(position) in mine:
            on_block(block)
        else:
            block.to("meta")

    model = build(config, spec, on_each).module
    assert isinstance(model, LanguageModel)
    return Stage(model, mine, number, config.pp)


@dataclass(frozen=True, slots=True)
class StageNames:
    """Names of all ``parameters`` of the model in order, and names that only other ranks have (``elsewhere``)."""

    parameters: tuple[str, ...]
    elsewhere: frozenset[str]


def names_of_stages(stage: nn.Module, group: ProcessGroup) -> StageNames:
    """Gather the names; collective over ``group``, the stages of a pipeline."""
    mine = [name for name, _ in stage.named_parameters()], list(stage.state_dict())
    found: list[tuple[list[str], list[str]]] = [([], [])] * group.size()
    torch.distributed.all_gather_object(found, mine, group=group)
    parameters, saved = zip(*found, strict=True)
    return StageNames(tuple(dict.fromkeys(chain(*parameters))), frozenset(chain(*saved)) - {*mine[1]})


@dataclass(frozen=True, slots=True)
class Line:
    """Ranks of a pipeline in the order of stages; ``number`` is this rank's stage."""

    ranks: tuple[int, ...]
    number: int
    group: ProcessGroup
    device: torch.device

    def from_last(self, value: Tensor) -> Tensor:
        """Broadcast the last stage's value."""
        torch.distributed.broadcast(value, self.ranks[-1], group=self.group)
        return value

    @torch.no_grad()
    def logits(self, stage: Stage, inputs: Tensor, hidden: torch.dtype) -> Tensor:
        """Logits in evaluation mode, on all ranks. ``hidden`` is the dtype of the hidden states between stages."""
        stage.eval()
        shape = inputs.shape
        if not stage.is_first:
            inputs = torch.empty(*shape, stage.width, dtype=hidden, device=self.device)
            torch.distributed.recv(inputs, self.ranks[self.number - 1], group=self.group)
        output = stage(inputs)
        if stage.is_last:
            return self.from_last(output.float().contiguous())
        torch.distributed.send(output.contiguous(), self.ranks[self.number + 1], group=self.group)
        return self.from_last(torch.empty(*shape, VOCABULARY, device=self.device))
