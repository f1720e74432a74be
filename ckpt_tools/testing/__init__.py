"""What tests of a plug-in are made of: conformance suites to inherit, and hypothesis strategies.

Nothing outside of tests imports this package; it needs pytest, hypothesis and numpy.
"""
