"""LoRA adapters of PEFT: their names and settings, and a model with one merged into it. Pure.

What PEFT does was read from its version 0.21: ``tuners/lora/layer.py`` for the arithmetic, ``tuners/lora/config.py``
for settings, ``tuners/tuners_utils.py`` and ``utils/save_and_load.py`` for names.
"""
