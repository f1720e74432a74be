"""A file a rank, of DTensors or ShardedTensors. ``docs/formats/sharded.md`` says what its files hold."""
