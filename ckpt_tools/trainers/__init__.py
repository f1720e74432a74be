"""What each trainer writes around a checkpoint, by name. Formats may ask it."""
