"""Anything that fsspec opens: the store, its errors and its lock."""
