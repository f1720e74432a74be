"""Ways to run tasks: threads here, or processes of a Ray cluster."""
