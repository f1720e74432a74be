"""Kills and failing calls, one at a time, in real processes."""
