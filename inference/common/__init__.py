"""URLs, options that name tensors, error reports and exit codes: shared by prediction, batch and serving."""
