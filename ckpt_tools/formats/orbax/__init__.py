"""Orbax, the checkpoints of JAX: a JSON tree of names, and arrays of Zarr in OCDBT or in folders."""
