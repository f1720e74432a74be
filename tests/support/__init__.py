"""What tests share: reading a fixture's truth, and comparing bit patterns."""
