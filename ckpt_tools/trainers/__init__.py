"""Files that trainers write around a checkpoint: one record a trainer, in a file of its own."""
