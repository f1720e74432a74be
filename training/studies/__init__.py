"""Comparing strategies."""
