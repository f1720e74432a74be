"""``python -m tests.end_to_end.fuzzing.guided [FOLDER]``: atheris, which follows branches of readers.

Its input is a number of bytes: which genuine checkpoint, which of its files, and that file. Not a part of ``make
fuzz``, for atheris has builds for few versions of Python; ``pip install atheris`` is all that it takes.
"""

import sys

import atheris

with atheris.instrument_imports(include=["ckpt_tools"]):
    from tests.end_to_end.fuzzing import corpus
    from tests.end_to_end.fuzzing.target import execute


def run(data: bytes) -> None:
    """One execution: a checkpoint in which one file is what atheris wants."""
    found = atheris.FuzzedDataProvider(data)
    seeds = list(corpus.seeds().values())
    files = dict(seeds[found.ConsumeIntInRange(0, len(seeds) - 1)])
    path = list(files)[found.ConsumeIntInRange(0, len(files) - 1)]
    execute({**files, path: found.ConsumeBytes(1 << 16)})


if __name__ == "__main__":
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()
