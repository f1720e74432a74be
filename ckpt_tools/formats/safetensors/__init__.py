"""safetensors: one file, Hugging Face shards, and the pieces of ranks that DCP writes."""
