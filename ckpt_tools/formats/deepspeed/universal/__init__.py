"""DeepSpeed universal. ``docs/formats/universal.md`` says what its files hold."""
