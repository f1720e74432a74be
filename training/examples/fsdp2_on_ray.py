"""FSDP2 on Ray Train in one file: shard a Vision Transformer, train it, save, resume, and predict. It needs
`pip install torch torchvision 'ray[train]' scikit-learn`, no GPU and no network.

    python fsdp2_on_ray.py --workers 2 --epochs 1 --out /tmp/fsdp2
    python fsdp2_on_ray.py --workers 1 --epochs 2 --out /tmp/fsdp2

The second command continues the run of the first on one worker. FSDP2 begins with `shard`, checkpoints with
`AppState`, Ray Train with `fit`. Memory: see `--micro-batch`, `--recompute`, `--no-reshard` and `--offload`.
"""

import argparse
import os
import tempfile
from functools import partial
from typing import Any

import ray.train.torch
import torch
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
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


def shard(model: VisionTransformer, device: torch.device, config: dict[str, Any]) -> VisionTransformer:
    """Leave each worker 1/N of every weight. FSDP2 gathers the weights of one block just before that block computes,
    and frees them afterwards. So each block is wrapped by itself, and the root takes what is in no block."""
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    # In bf16 the blocks compute with half the bytes. The sharded weights, which the optimizer updates, stay fp32, and
    # gradients are added up in fp32: many small numbers would be lost in bf16.
    precision = MixedPrecisionPolicy(torch.bfloat16 if config["dtype"] == "bf16" else None, torch.float32)
    # With offload, weights, gradients and optimizer are in the host's memory; only a block that computes is on the GPU.
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if config["offload"] else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload}
    for block in model.encoder.layers:
        if config["recompute"]:  # activation checkpointing: backward computes the block again from its input
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        # With reshard_after_forward=False the gathered weights stay until backward: less is sent, more kept.
        fully_shard(block, reshard_after_forward=config["reshard"], **options)
    fully_shard(model, **options)
    return model


class AppState(Stateful):
    """The content of a checkpoint. `dcp.save` and `dcp.load` call the two methods, because it is `Stateful`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.epoch = self.step = 0

    def state_dict(self) -> dict[str, Any]:
        # get_state_dict names the optimizer's state by parameter (torch.save would number it), and its tensors are
        # DTensors, which know which part of the whole they are. So another number of workers can read them.
        model, optimizer = states.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        model, optimizer = state_dict["model"], state_dict["optim"]
        states.set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.epoch, self.step = state_dict["epoch"], state_dict["step"]


def save(app: AppState, loss: float) -> None:
    """Write this worker's shards into a folder of its own. Ray puts the folders of all workers into one checkpoint,
    also if they are on other machines, and records it when all are there. So every worker has to call this."""
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"app": app}, checkpoint_id=folder)
        metrics = {"epoch": app.epoch, "step": app.step, "loss": loss}
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def resume(app: AppState, given: str | None) -> None:
    """Load the run's newest checkpoint, if there is one. Ray knows it after a failure, and also if the script is
    started again with the same `--out`. Each worker reads its new part of every tensor, from the shards of all."""
    newest = ray.train.get_checkpoint() or (ray.train.Checkpoint.from_directory(given) if given else None)
    if newest is not None:
        with newest.as_directory() as folder:
            dcp.load({"app": app}, checkpoint_id=folder)


def train(config: dict[str, Any]) -> None:
    """The work of one worker. Ray has already set up `torch.distributed`."""
    device, rank = ray.train.torch.get_device(), torch.distributed.get_rank()
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history()
    torch.manual_seed(0)  # equal first weights on all workers, because FSDP2 keeps the part that each has
    # A model that fits into no worker is built on torch.device("meta"), and gets its weights after `shard`.
    model = shard(build_model(), device, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)  # of this worker's shards
    app = AppState(model, optimizer)
    resume(app, config["resume"])

    data = load_data(config["data_root"], train=True)
    sampler: DistributedSampler[Any] = DistributedSampler(data, drop_last=True)  # 1/N of the samples for each worker
    batch_size = BATCH_SIZE // torch.distributed.get_world_size()
    loader = DataLoader(data, batch_size, sampler=sampler, drop_last=True, pin_memory=device.type == "cuda")
    parts = max(1, batch_size // config["micro_batch"])  # micro-batches of a worker's batch
    for epoch in range(app.epoch, config["epochs"]):
        sampler.set_epoch(epoch)  # another order in each epoch, and the same one if the epoch is repeated
        for images, labels in loader:
            losses: list[Tensor] = []
            # Gradient accumulation: part by part, so that only the activations of one part are in memory.
            for inputs, classes in zip(images.chunk(parts), labels.chunk(parts), strict=True):
                model.set_requires_gradient_sync(len(losses) == parts - 1)  # the last part sends the gradients of all
                logits = model(inputs.to(device, non_blocking=True)).float()
                losses.append(functional.cross_entropy(logits, classes.to(device, non_blocking=True)) / parts)
                losses[-1].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over all shards
            optimizer.step()
            optimizer.zero_grad()
            app.step += 1
        app.epoch = epoch + 1
        save(app, float(sum(losses)))

    if device.type == "cuda":  # open it at pytorch.org/memory_viz; torch records no such history of a CPU's memory
        torch.cuda.memory._dump_snapshot(f"{config['out']}/memory_rank_{rank}.pickle")
    # Every worker has to take part in gathering the weights. They arrive on rank 0, tensor by tensor, in host memory.
    whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = states.get_model_state_dict(model, options=whole)
    if rank == 0:
        torch.save(weights, f"{config['out']}/model.pt")


def fit(config: dict[str, Any]) -> ray.train.Result:
    """Start the workers, and wait until `train` has ended on all of them."""
    use_gpu = ray.cluster_resources().get("GPU", 0) >= config["workers"]
    # gloo beside nccl, because offloaded tensors are in the host's memory, where nccl cannot add them up.
    backend = "cpu:gloo,cuda:nccl" if use_gpu else "gloo"
    return ray.train.torch.TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=ray.train.torch.TorchConfig(backend=backend),
        scaling_config=ray.train.ScalingConfig(num_workers=config["workers"], use_gpu=use_gpu),
        # Ray finds the checkpoints of a run by these two. With several machines, --out is on a disk that all share.
        run_config=ray.train.RunConfig(
            name="checkpoints",
            storage_path=config["out"],
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            failure_config=ray.train.FailureConfig(max_failures=1),  # start all workers again, once, if one fails
        ),
    ).fit()


@torch.no_grad()
def predict(weights: str, images: Tensor) -> Tensor:
    """Logits for images: one process, a plain model, and none of FSDP2 or Ray."""
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
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="what the blocks compute in")
    parser.add_argument("--offload", action="store_true", help="keep weights and optimizer in the host's memory")
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
