"""The same inputs through the models of two checkpoints, and how far their states and logits lie apart."""
