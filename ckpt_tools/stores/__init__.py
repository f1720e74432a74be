"""Bytes in a place: local folders, S3, anything that fsspec opens. A store confines names and knows no format."""
