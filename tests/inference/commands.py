"""The batch command in this process, and the rows that it writes."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from pyarrow import parquet

from inference.batch.__main__ import main


def predict(model: object, source: object, out: object, *options: object) -> Result:
    words = ("--model", model, "--input", source, "--output", out, *options)
    return CliRunner().invoke(main, [str(word) for word in words])


def rows_of(out: Path) -> list[dict[str, Any]]:
    if out.suffix == ".parquet":
        return parquet.read_table(out).to_pylist()
    return [json.loads(line) for line in out.read_text().splitlines()]


def predicted(model: object, source: object, out: Path, *options: object, code: int = 0) -> list[dict[str, Any]]:
    """The rows of a run that ends with this code."""
    result = predict(model, source, out, "--quiet", *options)
    assert result.exit_code == code, (result.output, result.exception)
    return rows_of(out)
