"""Proof that loading a checkpoint runs no code, or the findings where there is no proof.

``source`` goes through the files and the items of a DCP, and ``kinds`` recognises them. ``prove`` parses each kind to
its last byte, with ``arrays``, ``strict_zip``, ``texts`` and ``pictures``; ``alike`` spares it items like one that is
proved, and ``budget`` limits what is decompressed. ``other_loaders`` and ``tokens`` look for a second meaning,
``configuration`` for names of code. ``piece`` is what is proved, and ``findings`` holds the report.
"""

from ckpt_tools.verification.scan.findings import Finding, ScanReport
from ckpt_tools.verification.scan.source import scan_source

__all__ = ["Finding", "ScanReport", "scan_source"]
