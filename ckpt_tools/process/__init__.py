"""What a process needs around its work: signals, processes that end with it, credentials kept out of text."""
