"""File systems of fsspec: the store, the location and the lock."""
