"""Ways to run tasks."""
