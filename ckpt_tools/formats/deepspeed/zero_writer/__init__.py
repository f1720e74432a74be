"""A manifest as ZeRO-1, -2 or -3. ``docs/formats/zero-writing.md`` has DeepSpeed's requirements."""
