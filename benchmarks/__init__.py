"""Ours against the peers and against ``cp -r``, side by side: ``make bench``, or ``python -m benchmarks --help``.

A *work* (`works`) is one conversion of one *input* (`inputs`), done by *contestants*: us, ``cp -r`` of the bytes that
the work writes, and every *peer* (`peers`) that can do it. `suite` runs them in turn in random order and notes each
run at once, `measure` measures a command, `startup` start-up times, and `report` draws the table and picture.
"""
