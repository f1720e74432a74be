"""Distributed training of small models, to produce the sharded checkpoints that ``ckpt_tools`` opens.

``python -m training --help`` lists the options; :func:`training.launchers.launch` is the same from Python.
"""
