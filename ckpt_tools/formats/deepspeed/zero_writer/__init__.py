"""A manifest as ZeRO-1, -2 or -3. ``docs/formats/deepspeed.md`` has DeepSpeed's requirements."""
