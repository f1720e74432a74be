"""Moves the bytes of a plan: reads, places, casts, writes, takes checksums, keeps the journal."""
