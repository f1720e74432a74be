"""Text for people: numbers and names in messages, results as text, progress, and code that loads an output."""
