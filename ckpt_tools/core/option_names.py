"""The option values that the command line prints in its help, apart from what parses them: help imports no numpy."""

DEFAULT_MEMORY = "512MiB"

DTYPE_NAMES = ("float32", "bfloat16", "float16")
"""What weights can be cast to."""
RUNNERS = ("threads", "ray")
"""Where tasks run: in this process, or in those of a Ray cluster."""
