"""Proof that loading a checkpoint runs no code, or the findings where there is no proof.

``source`` lists the files and the items of a DCP, ``kinds`` recognises them, ``prove`` parses each kind to its last
byte, ``other_loaders`` looks for a second meaning, ``configuration`` for names of code, and ``findings`` holds the
report.
"""

from ckpt_tools.verification.scan.findings import Finding, ScanReport
from ckpt_tools.verification.scan.source import scan_source

__all__ = ["Finding", "ScanReport", "scan_source"]
