"""Run folders and storage, and what a checkpoint holds beside model and optimizer."""
