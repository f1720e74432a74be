"""What a loader would run of a pickle: the same machine, which records calls instead of refusing them."""
