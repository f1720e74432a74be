"""A checkpoint as values: tensors, names, options, layouts. It reads and writes nothing, and knows no format."""
