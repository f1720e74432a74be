"""The surroundings of a process: signals, processes that end with it, credentials kept out of text."""
