"""A file a rank, of DTensors or ShardedTensors. ``docs/formats/sharded.md`` describes its files."""
