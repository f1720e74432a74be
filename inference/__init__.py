"""Proof that a consolidated file is a model: load it, predict with it in batches, serve it over HTTP."""
