"""A checkpoint into a live torch job. The only package that imports torch."""
