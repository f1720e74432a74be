"""Save and resume in a training loop of your own, with torchrun. A comment marks the lines that you add to it.

    torchrun --nproc-per-node 2 your_own_loop.py --out /tmp/own
    torchrun --nproc-per-node 1 your_own_loop.py --out /tmp/continued --epochs 2 --resume /tmp/zero/checkpoints@latest

`--resume` takes a checkpoint of any format and number of ranks that has an optimizer: one of this loop, such as
/tmp/own/epoch_1, or one of `fsdp2_on_ray.py`, or, as above, of `deepspeed_on_ray.py`.
"""

import argparse
import os

import torch
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, interpolate
from torchvision.models import VisionTransformer

import ckpt_tools

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--resume")
options = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group()
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

torch.manual_seed(0)
model = fully_shard(VisionTransformer(28, 7, num_layers=4, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
digits = load_digits()
images = interpolate(torch.tensor(digits.images)[:, None].float() / 16, size=28, mode="bilinear").expand(-1, 3, -1, -1)
images, labels = images.to(device), torch.tensor(digits.target, device=device)

epochs_done = 0
if options.resume:
    # ADDED. Fills model and optimizer in place: each rank reads its own part, and what does not fit is an error that
    # names it. Returns everything else that the checkpoint holds, by name.
    epochs_done = ckpt_tools.load_into(model, optimizer, options.resume)["epoch"]

for epoch in range(epochs_done, options.epochs):
    order = torch.randperm(1408, generator=torch.Generator().manual_seed(epoch))
    for batch in (samples[rank::ranks] for samples in order.split(64)):
        loss = cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # ADDED. torch's own checkpoint: each rank writes its shards, with the names of the parameters.
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments, "epoch": epoch + 1}, checkpoint_id=f"{options.out}/epoch_{epoch + 1}")
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
torch.distributed.destroy_process_group()
