"""Table of what ckpt-tools and other scanners say of the corpora and of our own hostile files. Run by hand::

    python -m tests.verification.scan.corpora.compare PYTHON FOLDER

PYTHON is an interpreter that has picklescan, fickling, modelscan or modelaudit. The files are written into FOLDER, and
nothing loads them but the judge, which catches what they call. Verdicts go to FOLDER/verdicts.json.
"""

import json
import subprocess
import sys
from collections import Counter
from math import gcd
from pathlib import Path

import ckpt_tools
from tests.verification.scan.corpora import CORPORA, Entry, Label, scanners
from tests.verification.scan.generator import BENIGN, CARRIERS, NUM_SAMPLES, sample
from tests.verification.scan.scanner import told

NUM_OWN = 500
NUM_JUDGED = 1500
"""Samples that real loaders are given, to find ``NUM_OWN`` that run something."""


def own() -> list[Entry]:
    """Our own samples that a real loader runs, and a value that runs nothing in each of their carriers."""
    step = next(n for n in range(NUM_SAMPLES // NUM_JUDGED, NUM_SAMPLES) if gcd(n, NUM_SAMPLES) == 1)
    judged = told("judge", {"generator": list(range(0, NUM_SAMPLES, step))[:NUM_JUDGED]})["generator"]
    ran = [int(number) for number, loaders in judged.items() if loaders]
    assert len(ran) >= NUM_OWN
    chosen = [sample(ran[at * len(ran) // NUM_OWN]) for at in range(NUM_OWN)]
    hostile = [Entry(each.label, Label.MALICIOUS, each.files) for each in chosen]
    return hostile + [Entry(name, Label.INNOCUOUS, put(BENIGN[4])) for name, put in CARRIERS.items()]


def written(found: list[Entry], folder: Path) -> dict[str, Entry]:
    """The entries, each in a numbered folder."""
    out = {}
    for number, entry in enumerate(found):
        place = folder / f"{number:04}"
        place.mkdir(parents=True)
        for name, data in entry.files.items():
            (place / name).write_bytes(data)
        out[place.name] = entry
    return out


def ours(folder: Path) -> str:
    """Data that is not looked into, and configuration, count as unread, though they are findings."""
    findings = ckpt_tools.scan(folder).findings
    unread = {"not looked into", "configuration"}
    return scanners.verdict(flagged=any(finding.danger not in unread for finding in findings), read=not findings)


def cell(verdicts: list[str]) -> str:
    count = Counter(verdicts)
    return f"{count['flagged']} / {count['unread']} / {count['clean']}"


def main() -> None:
    python, folder = sys.argv[1], Path(sys.argv[2])
    groups = {**CORPORA, "ckpt-tools": own()}
    verdicts: dict[str, dict[str, dict[str, str]]] = {}
    rows: list[str] = []
    for group, found in groups.items():
        placed = written(found, folder / group)
        done = subprocess.run([python, "-P", scanners.__file__, folder / group], stdout=subprocess.PIPE, check=True)
        said = {"ckpt-tools": {name: ours(folder / group / name) for name in placed}, **json.loads(done.stdout)}
        verdicts[group] = {
            tool: {placed[name].name: verdict for name, verdict in given.items()} for tool, given in said.items()
        }
        for label in Label:
            names = [name for name, entry in placed.items() if entry.label is label]
            if names:
                cells = [cell([given[name] for name in names]) for given in said.values()]
                rows.append(f"| {group} | {label} | {len(names)} | {' | '.join(cells)} |")
    tools = list(next(iter(verdicts.values())))
    print(f"| files of | | number | {' | '.join(tools)} |")
    print("|---|---|---:|" + "---:|" * len(tools))
    print("\n".join(rows))
    (folder / "verdicts.json").write_text(json.dumps(verdicts, indent=1))


if __name__ == "__main__":
    main()
