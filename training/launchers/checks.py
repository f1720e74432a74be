"""Checks of a run before its ranks start, in the command or on a rank of a torchrun that the user started."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import ckpt_tools
from ckpt_tools.errors import CkptError, FormatError, UsageError

from ..checkpoints.locking import check_no_other_run
from ..checkpoints.run_folder import find_resume_checkpoint
from ..checkpoints.settings import list_resume_messages
from ..checkpoints.weights import check_export, check_fits
from ..config.model_names import folder_of
from ..config.references import first_line, import_function, is_function, text_of
from ..config.train_config import TrainConfig
from ..data.datasets import PARTS
from ..data.loading import count_samples, make_dataset
from ..data.texts import list_tokenizer_messages
from ..engines.optimizers import make_optimizer, make_schedule
from ..loop.result import check_result_file
from ..models.zoo import TrainableModel, make_spec
from .devices import check_device, check_gpus


def check_before_start(config: TrainConfig) -> None:
    """Check in one process what would fail on every worker; prints messages about the checkpoint to resume."""
    check_no_other_run(config.out)
    if config.launcher == "torchrun":
        check_gpus(config.num_workers, torch.cuda.device_count(), "this machine")
    for line in check_run(config):
        print(line, flush=True)


def check_run(config: TrainConfig, *, with_data: bool = True) -> list[str]:
    """Messages about the checkpoint to resume. Raises CkptError for a run that would fail on every worker."""
    checkpoint = find_resume_checkpoint(config)
    check_result_file(config.out)
    if config.recipe is not None:
        ckpt_tools.show_recipe(config.recipe)
    check_export(config)
    lines = list_resume_messages(config, checkpoint) + list_tokenizer_messages(config)
    parts = _checked_parts(config) if with_data else None
    model = check_frameworks(config)
    if model is not None:
        check_fits(config, model, checkpoint)
    own = any(map(is_function, (config.model, config.dataset, config.optimizer, config.metrics)))
    if parts and (own or config.keep_best):
        from .first_batch import try_first_batch  # its imports take a second

        try_first_batch(config, checkpoint, *parts)
    return lines


def _checked_parts(config: TrainConfig) -> tuple[Dataset[Any], Dataset[Any] | None]:
    samples, held_out = (make_dataset(config, part) for part in PARTS)
    assert samples is not None, "only the held-out part may be missing"
    length, name = count_samples(samples), text_of(config.dataset)
    if config.num_samples is not None and length is not None and config.num_samples > length:
        raise UsageError(f"--num-samples is {config.num_samples} and {name} has {length} to train on")
    if held_out is not None and count_samples(held_out) == 0:
        raise UsageError(f"--dataset {name} has no held-out samples, which a run predicts")
    config.steps_per_epoch(length)
    return samples, held_out


def check_frameworks(config: TrainConfig) -> nn.Module | None:
    """The model on the meta device; None for one of a function of the user's. Raises CkptError for a run that its
    frameworks would refuse on every worker."""
    model = None if is_function(config.model) else _build_on_meta(config)
    # The others cannot fail, and to make an optimizer imports torch's compiler, which takes seconds.
    if model is not None and (is_function(config.optimizer) or config.optimizer_arg):
        make_optimizer(config, model.list_parameter_groups(), torch.device("meta"))
    make_schedule(config, 2).compute_factor(0)
    for each in config.callback:
        import_function(each, "callback")
    if config.launcher != "ray" or "RAY_ADDRESS" not in os.environ:  # a remote cluster's machines are asked when joined
        check_device(config)
    return None if model is None else model.module


def _build_on_meta(config: TrainConfig) -> TrainableModel:
    """The model without memory."""
    try:
        with torch.device("meta"):
            model = make_spec(config).make()
    except CkptError:
        raise
    except Exception as error:  # a class of transformers fails in its own way at each value that it does not expect
        raise FormatError(f"--model {text_of(config.model)} cannot be built: {first_line(error)}") from error
    if folder_of(config.model) is not None:
        _check_causal(config.model, model.module.config)
    return model


def _check_causal(model: object, described: Any) -> None:
    """Refuse a model that transformers also trains on masked words: it sees the words that it has to predict."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if described.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(described, "is_decoder", False):
        raise FormatError(
            f"--model {model}: {described.model_type} is not causal, so it sees the text that it has to predict; set "
            "is_decoder to true in its config.json"
        )
