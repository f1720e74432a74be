"""A manifest as ZeRO-1, -2 or -3. ``docs/formats/zero-writing.md`` says what DeepSpeed asks of it."""
