"""ZeRO-1, -2 and -3 to a manifest. ``docs/formats/deepspeed.md`` describes their files."""
