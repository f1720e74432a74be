"""Small, real, distributed training: the runs whose sharded checkpoints ``ckpt_tools`` opens.

One loop (:mod:`training.loop.loop`), two engines (:mod:`training.engines`: FSDP2 and DeepSpeed ZeRO) and two launchers
(:mod:`training.launchers`: Ray Train and torchrun). ``python -m training --help`` is the way in.
"""
