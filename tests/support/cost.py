"""What a command costs, in a process of its own, and how slow the machine is meanwhile."""

import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
OBJECTS_SECONDS = 0.15
"""What ``slowness`` times, on a machine that does little else."""


def slowness() -> float:
    """How many times slower than the reference machine this one makes small objects now, as reading headers does."""

    def once() -> float:
        start = time.process_time()
        made = [{"shape": (str(number), [number])} for number in range(200_000)]
        assert made
        return time.process_time() - start

    return max(1.0, sum(once() for _ in range(3)) / 3 / OBJECTS_SECONDS)


METER = """
import json, os, resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, code]))
"""
"""Starts the command from a small process: the peak of a process includes what it had before its program was loaded."""


def cost(*words: object) -> tuple[float, float, int]:
    """Processor seconds, peak megabytes and exit code of a command."""
    command = [sys.executable, "-S", "-c", METER, sys.executable, "-m", "ckpt_tools", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=300)
    seconds, megabytes, code = json.loads(done.stdout)
    return seconds, megabytes, code
