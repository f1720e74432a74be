"""The calls that a loader of pickles would execute for a checkpoint.

Every pickle of every file is followed by a machine that writes calls down (``containers.unpickler.recorder``): those of
torch files in both formats and of the tar before them, of the items of a DCP, of whatever lies beside a checkpoint, one
after the other where several follow each other, and inside the byte strings that a pickle gives to an unpickler. What
cannot be followed to its end is a finding too, since a loader might get further.

``carriers`` knows in what files pickles lie, ``sources`` which files there are, ``report`` what is found.
"""

from ckpt_tools.verification.scan.findings import Finding
from ckpt_tools.verification.scan.report import ScanReport
from ckpt_tools.verification.scan.source import scan_source

__all__ = ["Finding", "ScanReport", "scan_source"]
