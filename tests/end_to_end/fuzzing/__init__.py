"""Structured fuzzing of every reader: seeds, mutations, the target, and the runner behind ``make fuzz``."""
