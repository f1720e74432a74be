"""Ours against the peers and against ``cp -r``, side by side: ``make bench``, or ``python -m benchmarks --help``.

The conversions are the works of `works.toml` (`conversions`); the parts, listed in `runner`, measure commands,
training, inference, S3 and Ray. `runner` runs all and keeps a record of each, the contestants take turns (`turns`), and
`measure` measures a command. `report` draws the tables and the picture from the records.
"""
