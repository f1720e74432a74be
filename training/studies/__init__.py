"""Studies of several runs: comparing strategies, and tuning the learning rate."""
