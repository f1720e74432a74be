"""GGUF, the files of llama.cpp: unquantized tensors, and the key-values about the model."""
