"""Proof that loading a checkpoint runs no code, or the findings where there is no proof.

``source`` lists the files and the items of a DCP, ``kinds`` recognises them, ``prove`` parses each kind to its last
byte, ``disguise`` looks for a second meaning, and ``report`` holds the findings.
"""

from ckpt_tools.verification.scan.findings import Finding
from ckpt_tools.verification.scan.report import ScanReport
from ckpt_tools.verification.scan.source import scan_source

__all__ = ["Finding", "ScanReport", "scan_source"]
