"""Jobs of two ranks that train an adapter of PEFT, save as FSDP2 and DeepSpeed do, and say what PEFT would write."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor

from fixtures import zero
from fixtures.fsdp_state import gathered, sharded, tree
from tests.lora.models import CASES, Case, adapted, llama

TOKENS = torch.arange(16)[None]
CASE = Case(llama, {**CASES["saved"].settings, "target_modules": ["q_proj", "v_proj"]})


def save_fsdp2(folder: str) -> None:
    """A DCP in ``folder/run``."""
    model = _started(Path(folder))
    sharded(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    for _ in range(2):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save({"app": tree(model, optimizer)}, checkpoint_id=Path(folder, "run"))
    _finished(Path(folder), model, gathered(model, optimizer).weights)


def save_zero3(folder: str) -> None:
    """A checkpoint of DeepSpeed in ``folder/run``."""
    import deepspeed

    zero.prepare()
    model = _started(Path(folder))
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config={**config, "zero_allow_untested_optimizer": True}
    )
    for _ in range(2):
        engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
        engine.step()
    engine.save_checkpoint(str(Path(folder, "run")))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    engine.destroy()
    _finished(Path(folder), model, weights)


def _started(folder: Path) -> Any:
    """The same model on each rank; the first writes its base and the adapter's settings."""
    place = folder if dist.get_rank() == 0 else folder / "other"
    place.mkdir(exist_ok=True)
    model = adapted(CASE, place)
    if dist.get_rank() == 0:
        model.peft_config["default"].save_pretrained(str(folder / "settings"))
    return model


def _finished(folder: Path, model: Any, weights: Mapping[str, Tensor]) -> None:
    """Write what PEFT saves of the whole ``weights``."""
    if dist.get_rank() == 0:
        wanted = get_peft_model_state_dict(model, state_dict=dict(weights))
        save_file({name: tensor.contiguous() for name, tensor in wanted.items()}, folder / "wanted.safetensors")
    dist.barrier()
