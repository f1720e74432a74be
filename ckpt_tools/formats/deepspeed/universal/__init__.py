"""DeepSpeed universal. ``docs/formats/universal.md`` describes its files."""
