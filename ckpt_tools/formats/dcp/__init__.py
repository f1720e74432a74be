"""PyTorch Distributed Checkpoint. ``docs/formats/dcp.md`` says what its files hold."""
