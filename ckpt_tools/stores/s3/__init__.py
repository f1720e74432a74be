"""S3: the store, its requests, the lock and the notes of uploads."""
