"""What each trainer writes around a checkpoint: one record a trainer, in a file of its own. Formats may ask it."""
