"""Trial of the user's functions on the first batch, before any worker starts."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Dataset

from ckpt_tools.errors import CkptError, UsageError

from ..checkpoints.weights import check_fits
from ..config.model_names import MODELS
from ..config.references import is_function, name_failures, text_of
from ..config.train_config import TrainConfig
from ..data.loading import Batches, EpochPosition, held_out_batches
from ..engines.base import split_batch
from ..engines.optimizers import make_optimizer
from ..engines.parallel import check_text_length
from ..loop.evaluation import check_keep_best, check_metric, choose_metrics
from ..models.zoo import make_spec

CPU = torch.device("cpu")
ONLY_WITH_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)


def try_first_batch(
    config: TrainConfig, checkpoint: Path | str | None, samples: Dataset[Any], held_out: Dataset[Any] | None
) -> None:
    """Make model and optimizer, compare the model with the checkpoints to start from, and compute loss and metrics of
    the first samples, by shapes alone; with values, on the CPU, if that fails, as where numpy is called. What neither
    can compute is left to the workers: steps that depend on values, and on a machine with a GPU what fails on the CPU.
    Raises ``UsageError``."""
    batches = _first_batches(config, samples, held_out)
    log = logging.getLogger(fake_tensor.__name__)
    log.disabled = True  # a traceback of each operation that fails
    try:
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as fake:
            _compute_once(config, checkpoint, *tree_map_only(Tensor, fake.from_tensor, batches))
    except (UsageError, *ONLY_WITH_VALUES) as error:
        cause = error.__cause__ if isinstance(error, UsageError) else error
        if isinstance(cause, CkptError | None):
            raise
        # Models of this package are small: one draws weights until they lie in bounds, one counts tokens of experts.
        is_ours = text_of(config.model) in MODELS
        if is_ours if isinstance(cause, ONLY_WITH_VALUES) else not torch.cuda.is_available():
            _compute_once(config, checkpoint, *batches)
    finally:
        log.disabled = False


def _first_batches(config: TrainConfig, samples: Dataset[Any], held_out: Dataset[Any] | None) -> tuple[Any, Any]:
    """The first micro-batch of the first rank, and the first held-out batch with its number of samples. Raises
    ``UsageError``."""
    batches = Batches(replace(config, loader_workers=0), samples, 0, config.data_workers, CPU)
    with name_failures(config.dataset, "dataset"):
        batch = next(batches.iterate_epoch(EpochPosition(0)))[0]
        kept = None if held_out is None else held_out_batches(held_out, config.eval_batch_size, CPU)(0)
    rows = {len(each) if isinstance(each, Tensor) and each.ndim else 0 for each in tree_leaves(batch)}
    if config.gradient_accumulation > 1 and rows != {config.batch_size // config.data_workers}:
        raise UsageError("--gradient-accumulation needs batches of tensors with a row for each sample")
    return split_batch(batch, config.gradient_accumulation)[0], kept


def _compute_once(
    config: TrainConfig, checkpoint: Path | str | None, batch: Any, held_out: tuple[Any, int] | None
) -> None:
    built = make_spec(config).make()
    if is_function(config.model):  # any other is compared on the meta device
        check_fits(config, built.module, checkpoint)
    if config.tp > 1:
        built.module.register_forward_pre_hook(partial(check_text_length, config.tp))
    make_optimizer(config, built.list_parameter_groups(), torch.device("meta"))

    def call_model(*inputs: Any, **named: Any) -> Any:
        return built.module(*inputs, **named)

    with name_failures(config.model, "model"):
        loss = built.loss(call_model, batch)
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(
            f"the loss of --model {text_of(config.model)} is {kind}, and has to be a tensor of shape [] that depends "
            "on the parameters"
        )
    metrics = choose_metrics(config.metrics, built.loss)
    if held_out is None:
        check_keep_best(config, {})
        return
    built.module.eval()
    with torch.no_grad(), name_failures(config.model, "model"):
        values = metrics(call_model, held_out[0])
    check_keep_best(config, values)
    for name, value in values.items():
        check_metric(name, value, held_out[1])
