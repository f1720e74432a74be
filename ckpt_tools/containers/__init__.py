"""What several formats share: pickles read without being run, and torch's zip archives."""
