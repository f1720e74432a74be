"""Tests for plug-ins: conformance suites to inherit, and hypothesis strategies.

Nothing outside of tests imports this package; it needs pytest, hypothesis and numpy.
"""
