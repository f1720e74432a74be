"""From an open source to a manifest: choose the format, read, add what the trainer's files say."""
