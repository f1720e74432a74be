"""From a checkpoint to a predictor: architectures, loading, and the tasks of image and text models."""
