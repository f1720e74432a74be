"""The test files of picklescan, fickling and modelscan, generated anew from descriptions of them."""

from tests.verification.scan.corpora import fickling, modelscan, picklescan
from tests.verification.scan.corpora.build import Entry, Label

__all__ = ["CORPORA", "Entry", "Label"]

CORPORA: dict[str, list[Entry]] = {
    "picklescan": picklescan.ENTRIES,
    "fickling": fickling.ENTRIES,
    "modelscan": modelscan.ENTRIES,
}
