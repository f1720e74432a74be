"""A local folder as a store to read and as a place to write."""
