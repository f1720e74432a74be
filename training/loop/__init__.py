"""The training loop with saving, measuring and stopping; the same for every engine and launcher."""
