"""nanotron (Hugging Face): files of tensors with boxes in their metadata, and files of the optimizer's ranks."""
