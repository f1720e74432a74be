"""Ours against the peers and against ``cp -r``, side by side: ``make bench``, or ``python -m benchmarks --help``.

A *work* (`works`) is one conversion of one *input* (`inputs`), done by *contestants*: us, ``cp -r`` of the bytes that
the work writes, and every *peer* (`peers`) that can do it. `suite` runs them in turn in random order and notes each
run at once, and `measure` measures a command. A *part* (`parts`) is any other measurement, whose contestants take
turns too (`turns`). `report` draws the tables and the picture.
"""
