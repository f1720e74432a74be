"""File systems of fsspec: the store, the place and the lock."""
