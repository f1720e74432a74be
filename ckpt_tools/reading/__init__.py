"""From an open source to a manifest: the format reads, and what trainers lay beside the checkpoint is added."""
