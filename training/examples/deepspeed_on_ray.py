"""DeepSpeed ZeRO on Ray Train in one file: train a Vision Transformer, save, resume, and predict. It needs
`pip install torch torchvision deepspeed 'ray[train]' scikit-learn`, no GPU and no network.

    python deepspeed_on_ray.py --workers 2 --epochs 1 --out /tmp/zero

The same command with `--epochs 2` continues the run. But a ZeRO checkpoint has a part of the optimizer for each worker,
and DeepSpeed refuses it on another number of workers. For that, and for another stage, convert it first, and begin a
new run from the result. Only this one command is of ckpt-tools:

    ckpt-tools convert /tmp/zero/checkpoints@latest /tmp/zero-for-1 --to zero3 --world-size 1
    python deepspeed_on_ray.py --workers 1 --epochs 2 --out /tmp/zero-1 --resume /tmp/zero-for-1

DeepSpeed begins with `deepspeed_config`, Ray Train with `fit`. Memory: see `--stage`, `--micro-batch`, `--recompute`,
`--no-reshard` and `--offload`.
"""

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import ray.train.torch
import torch
from deepspeed import ops as deepspeed_ops
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.datasets import FashionMNIST
from torchvision.models import VisionTransformer

BATCH_SIZE = 64  # samples of one step, over all workers: the run stays the same run at another number of workers


def load_data(root: str | None, *, train: bool) -> TensorDataset:
    """Images, float32 [n, 3, 28, 28], and labels: scikit-learn's digits, or the FashionMNIST in the folder `root`."""
    if root is not None:
        fashion = FashionMNIST(root, train=train)
        images, labels = fashion.data / 255, fashion.targets
    else:
        digits, part = load_digits(), slice(None, -360) if train else slice(-360, None)  # 360 are held out
        images, labels = torch.tensor(digits.images[part]) / 16, torch.tensor(digits.target[part])
    images = functional.interpolate(images[:, None].float(), size=28, mode="bilinear")
    return TensorDataset(images.expand(-1, 3, -1, -1), labels)


def build_model() -> VisionTransformer:
    return VisionTransformer(28, 7, num_layers=4, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10)


def deepspeed_config(config: dict[str, Any], workers: int) -> dict[str, Any]:
    """Everything that DeepSpeed is told. Stage 1 shards the optimizer over the workers, stage 2 the gradients too,
    stage 3 the weights too, which are then gathered layer by layer."""
    zero: dict[str, Any] = {"stage": config["stage"], "stage3_gather_16bit_weights_on_model_save": True}
    # Stage 3 keeps gathered weights that are used again within so many elements, as those of the last layers are in
    # backward. With 0 it frees all of them after forward, as FSDP2 with reshard_after_forward.
    zero["stage3_max_reuse_distance"] = 0 if config["reshard"] else 1_000_000_000
    if config["offload"]:  # to the host's memory
        zero["offload_optimizer"] = {"device": "cpu"}
        if config["stage"] == 3:
            zero["offload_param"] = {"device": "cpu"}
    # torch's own AdamW needs no compiler. Without "torch_adam" DeepSpeed compiles one for the GPU, or, with offload,
    # for the CPU: these are faster. The key with "force" allows torch's beside offload.
    adam = {"lr": 1e-3, "weight_decay": 0.05, "torch_adam": True}
    return {
        "train_batch_size": BATCH_SIZE,
        # Smaller micro-batches keep fewer activations. DeepSpeed accumulates the gradients of as many as make a batch.
        "train_micro_batch_size_per_gpu": min(config["micro_batch"], BATCH_SIZE // workers),
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "bf16": {"enabled": config["dtype"] == "bf16"},  # of the model; the optimizer keeps the weights in fp32
        "steps_per_print": 1_000_000,
    }


def save(engine: Any, client_state: dict[str, Any], loss: float) -> None:
    """Write this worker's files into a folder of its own. Ray puts the folders of all workers into one checkpoint,
    also if they are on other machines, and records it when all are there. So every worker has to call this."""
    tag = f"step_{client_state['step']}"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, tag).mkdir()  # DeepSpeed makes this folder on rank 0 alone
        engine.save_checkpoint(folder, tag=tag, client_state=client_state)
        ray.train.report({**client_state, "loss": loss}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def resume(engine: Any, given: str | None) -> dict[str, Any]:
    """Load the run's newest checkpoint, if there is one, and return its client state. Ray knows it after a failure,
    and also if the script is started again with the same `--out`."""
    newest = ray.train.get_checkpoint() or (ray.train.Checkpoint.from_directory(given) if given else None)
    if newest is None:
        return {"epoch": 0, "step": 0}
    with newest.as_directory() as folder:
        path, client_state = engine.load_checkpoint(folder)
    if path is None:  # DeepSpeed has only warned
        raise FileNotFoundError(f"{folder} holds no checkpoint of DeepSpeed")
    return client_state


def train(config: dict[str, Any]) -> None:
    """The work of one worker. Ray has already set up `torch.distributed`, which DeepSpeed then uses."""
    device, workers = ray.train.torch.get_device(), torch.distributed.get_world_size()
    if device.type == "cpu":  # DeepSpeed would compile an all-reduce that only inference calls
        deepspeed_ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)
    torch.manual_seed(0)  # equal first weights on all workers
    model = build_model()  # a model that fits into no worker is built within `with deepspeed.zero.Init(...)`
    for block in model.encoder.layers if config["recompute"] else ():
        # Activation checkpointing: backward computes the block again from its input.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    options = deepspeed_config(config, workers)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options)
    state = resume(engine, config["resume"])

    data = load_data(config["data_root"], train=True)
    sampler: DistributedSampler[Any] = DistributedSampler(data, drop_last=True)  # 1/N of the samples for each worker
    loader = DataLoader(data, BATCH_SIZE // workers, sampler=sampler, drop_last=True, pin_memory=device.type == "cuda")
    dtype = torch.bfloat16 if config["dtype"] == "bf16" else torch.float32
    parts = engine.gradient_accumulation_steps()  # micro-batches of a worker's batch
    engine.train()
    for epoch in range(state["epoch"], config["epochs"]):
        sampler.set_epoch(epoch)  # another order in each epoch, and the same one if the epoch is repeated
        for images, labels in loader:
            losses: list[Tensor] = []
            for inputs, classes in zip(images.chunk(parts), labels.chunk(parts), strict=True):
                logits = engine(inputs.to(device, dtype, non_blocking=True)).float()
                losses.append(functional.cross_entropy(logits, classes.to(device, non_blocking=True)))
                engine.backward(losses[-1])  # in place of loss.backward(): divides by the parts, shards the gradients
                engine.step()  # after the last part: clips them, updates the weights and resets the gradients
        state = {"epoch": epoch + 1, "step": engine.global_steps}
        save(engine, state, torch.stack(losses).mean().item())
    # All workers gather the weights, rank 0 writes them: in bf16 if the model computes in bf16.
    engine.save_16bit_model(config["out"], "model.pt")


def fit(config: dict[str, Any]) -> ray.train.Result:
    """Start the workers, and wait until `train` has ended on all of them."""
    use_gpu = ray.cluster_resources().get("GPU", 0) >= config["workers"]
    return ray.train.torch.TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=config["workers"], use_gpu=use_gpu),
        # Ray finds the checkpoints of a run by these two. With several machines, --out is on a disk that all share.
        run_config=ray.train.RunConfig(
            name="checkpoints",
            storage_path=config["out"],
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


@torch.no_grad()
def predict(weights: str, images: Tensor) -> Tensor:
    """Logits for images: one process, a plain model, and none of DeepSpeed or Ray."""
    model = build_model().eval()
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model(images)


def options(args: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [2**n for n in range(7)]  # each divides the batch
    parser.add_argument("--workers", type=int, choices=sizes, default=2, help="a GPU for each, if there are enough")
    parser.add_argument("--epochs", type=int, default=2, help="epochs, those before a resume included")
    parser.add_argument("--out", type=os.path.abspath, required=True, help="folder of the run")
    parser.add_argument("--resume", type=os.path.abspath, help="checkpoint of another run")
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=3, help="stage of ZeRO")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="what the model computes in")
    parser.add_argument("--offload", action="store_true", help="keep the optimizer in the host's memory")
    parser.add_argument("--micro-batch", type=int, choices=sizes, default=64, help="samples that compute at a time")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--no-reshard", dest="reshard", action="store_false", help="whole weights until backward")
    parser.add_argument("--data-root", type=os.path.abspath, help="FashionMNIST instead of digits")
    return vars(parser.parse_args(args))


if __name__ == "__main__":
    chosen = options()
    ray.init()  # a local cluster, or that of RAY_ADDRESS
    print(fit(chosen).checkpoint)
    images, labels = load_data(chosen["data_root"], train=False)[:]
    right = predict(f"{chosen['out']}/model.pt", images).argmax(dim=1) == labels
    print(f"{right.sum()} of {len(right)} held-out images right")
