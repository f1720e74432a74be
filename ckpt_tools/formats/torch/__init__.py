"""torch: a full state dict of ``torch.save``."""
