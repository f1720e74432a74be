"""Ours against the peers and against ``cp -r``, side by side: ``make bench``, or ``python -m benchmarks --help``.

`benchmarks` lists all measurements: the conversions of `works.toml` (`conversions`), and the parts, which measure
commands, training, inference, S3 and Ray. `runner` runs them and keeps a record of each; in all of them the contestants
take turns (`turns`), and `measure` measures a command. `report` draws the tables and the picture from the records.
"""
