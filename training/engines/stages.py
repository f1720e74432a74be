"""Stages of a pipeline of the language model: consecutive layers, with the names of the whole model.

The first stage has the embedding, the last one the norm and the head. Embedding and head are one matrix: both stages
keep a copy and sum their gradients at each step, so the copies stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..config.model_names import VOCABULARY
from ..config.train_config import TrainConfig
from ..models.language_model import LanguageModel
from ..models.zoo import ModelSpec
from .blocks import OnBlock, build_in_blocks


class LayerChunk(nn.Module):
    """Consecutive layers of the model: bytes or hidden states to hidden states or logits."""

    def __init__(self, model: LanguageModel, layers: range) -> None:
        super().__init__()
        self.is_first, self.is_last = layers.start == 0, layers.stop == model.sizes.layers
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


class ModelStage(nn.Module):
    """The chunks of a worker: one, or several with the chunks of other workers between them."""

    embed: nn.Embedding
    head: nn.Linear
    norm: nn.RMSNorm

    def __init__(self, model: LanguageModel, chunks: Sequence[range]) -> None:
        super().__init__()
        self.width, self.all_layers = model.sizes.width, model.sizes.layers
        self.chunks = tuple(LayerChunk(model, layers) for layers in chunks)
        self.is_first, self.is_last = self.chunks[0].is_first, self.chunks[-1].is_last
        for name, module in chain.from_iterable(chunk.named_children() for chunk in self.chunks):
            self.add_module(name, module)
        self.layers = nn.ModuleDict(dict(chain.from_iterable(chunk.layers.items() for chunk in self.chunks)))


def layers_of(number: int, parts: int, layers: int) -> range:
    """Layers of a part; if ``parts`` does not divide them, the first ones have one more."""
    each, left = divmod(layers, parts)
    start = number * each + min(number, left)
    return range(start, start + each + (number < left))


def build_stage(config: TrainConfig, spec: ModelSpec, number: int, on_block: OnBlock) -> ModelStage:
    """The stage with the seed's weights; ``on_block`` gets its blocks, weights of others are dropped once drawn. Chunks
    go to the stages in turn."""
    parts = config.pp * config.chunks
    mine = [layers_of(at, parts, config.model_facts.layers) for at in range(number, parts, config.pp)]
    position = count()

    def on_each(block: nn.Module) -> None:
        layer = next(position)
        if any(layer in chunk for chunk in mine):
            on_block(block)
        else:
            block.to("meta")

    model = build_in_blocks(config, spec, on_each).module
    assert isinstance(model, LanguageModel)
    return ModelStage(model, mine)


def gather_stage_names(stage: nn.Module, group: ProcessGroup) -> tuple[list[str], frozenset[str]]:
    """Names of all parameters of the model in order, and names that only other ranks have; collective over ``group``,
    the stages of a pipeline."""
    assert isinstance(stage, ModelStage)
    mine = [[name for name, _ in chunk.named_parameters()] for chunk in stage.chunks], list(stage.state_dict())
    of_stages: list[tuple[list[list[str]], list[str]]] = [([], [])] * group.size()
    torch.distributed.all_gather_object(of_stages, mine, group=group)
    chunks, saved = zip(*of_stages, strict=True)
    in_order = chain.from_iterable(zip(*chunks, strict=True))
    return list(dict.fromkeys(chain(*in_order))), frozenset(chain(*saved)) - {*mine[1]}


def broadcast_from_last(value: Tensor, group: ProcessGroup) -> Tensor:
    """Broadcast the last stage's value."""
    torch.distributed.broadcast(value, group=group, group_src=group.size() - 1)
    return value


@torch.no_grad()
def compute_stage_logits(stage: ModelStage, inputs: Tensor, hidden: torch.dtype, group: ProcessGroup) -> Tensor:
    """Logits in evaluation mode, on all ranks. ``hidden`` is the dtype of the hidden states between chunks."""
    stage.eval()
    shape, device, number = inputs.shape, inputs.device, group.rank()
    for chunk in stage.chunks:
        if not chunk.is_first:
            inputs = torch.empty(*shape, stage.width, dtype=hidden, device=device)
            torch.distributed.recv(inputs, group=group, group_src=(number - 1) % group.size())
        output = chunk(inputs)
        if chunk.is_last:
            return broadcast_from_last(output.float().contiguous(), group)
        torch.distributed.send(output.contiguous(), group=group, group_dst=(number + 1) % group.size())
    return broadcast_from_last(torch.empty(*shape, VOCABULARY, device=device), group)
