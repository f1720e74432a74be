"""Mutation run: how many small faults in the converter do its tests notice?

A mutant is the code with one operator, comparison, constant or return value changed. As many of each package are drawn,
with a fixed seed. One run of the tests over code that records where it passes tells which tests reach which mutant;
then each mutant meets these tests, the fastest first, until one fails. A mutant that no test notices is a survivor.

    python -m scripts.mutants --help
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("core", "planning", "transfer", "formats", "serialization", "recipes", "stores", "runs", "verification")
OPERATORS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
"""How each is written, and what it becomes."""
RECORDER = """
import os
_recorded = set()
def record(site):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0]
    if test and (site, test) not in _recorded:
        _recorded.add((site, test))
        file = os.open(os.environ["MUTANTS_RECORD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{site}\\t{test}\\n".encode())
        os.close(file)
"""
"""A module of the copy. The environment reaches the processes that a test starts, so their passes count as well."""
DURATIONS = """
import json, os
def pytest_runtest_logreport(report):
    if os.environ.get("PYTEST_XDIST_WORKER"):
        with open(os.environ["MUTANTS_RECORD"] + ".durations", "a") as file:
            file.write(json.dumps([report.nodeid, report.duration, report.outcome]) + "\\n")
"""


Result = dict[str, Any]
"""A mutant, the number of tests that it met, and whether one of them caught it."""


@dataclass(frozen=True)
class Mutant:
    """The bytes of a file from ``start`` to ``stop``, replaced by others."""

    file: str
    line: int
    start: int
    stop: int
    before: str
    after: str
    statement: int
    """The first line of the statement around it."""

    def apply_to(self, code: bytes) -> bytes:
        return code[: self.start] + self.after.encode() + code[self.stop :]


def find_mutants(file: Path) -> Iterator[Mutant]:
    """All mutants of a file. Annotations, docstrings, imports, f-strings and sentences are left alone."""
    code = file.read_bytes()
    lines = code.splitlines(keepends=True)
    line_starts = [0, *itertools.accumulate(map(len, lines))]

    def start_of(node: ast.expr) -> int:
        return line_starts[node.lineno - 1] + node.col_offset

    def stop_of(node: ast.expr) -> int:
        return line_starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def mutant(start: int, stop: int, after: str, statement: int) -> Mutant:
        line = code.count(b"\n", 0, start) + 1
        return Mutant(str(file.relative_to(ROOT)), line, start, stop, code[start:stop].decode(), after, statement)

    def visit(node: ast.AST, statement: int) -> Iterator[Mutant]:
        match node:
            case ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.Expr(value=ast.Constant()):
                return
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
            case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
                return
            case (
                ast.BinOp(left=left, op=operator, right=right)
                | ast.BoolOp(op=operator, values=[left, right, *_])
                | ast.Compare(left=left, ops=[operator, *_], comparators=[right, *_])
            ) if type(operator) in OPERATORS:
                symbol, replacement = OPERATORS[type(operator)]
                between = code[stop_of(left) : start_of(right)]
                # A comment may stand there as well.
                found = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), between).find(symbol.encode())
                if found >= 0:
                    start = stop_of(left) + found
                    yield mutant(start, start + len(symbol), replacement, statement)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield mutant(start_of(node), start_of(operand), "", statement)
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield mutant(start_of(value), stop_of(value), "None", statement)
            case ast.Constant(value=bool() as value):
                yield mutant(start_of(node), stop_of(node), str(not value), statement)
            case ast.Constant(value=int() as value):
                yield mutant(start_of(node), stop_of(node), str(value + 1), statement)
            case ast.Constant(value=str() as value) if value and " " not in value and "\n" not in value:
                yield mutant(start_of(node), stop_of(node), repr(f"{value}_"), statement)
        for name, children in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in children if isinstance(children, list) else [children]:
                # No statement can stand before an `elif`: its mutants count as those of the `if`.
                if isinstance(child, ast.stmt) and not lines[child.lineno - 1].lstrip().startswith(b"elif"):
                    yield from visit(child, first_line_of(child))
                elif isinstance(child, ast.AST):
                    yield from visit(child, statement)

    yield from visit(ast.parse(code), 1)


def first_line_of(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def draw_mutants(count: int, seed: int) -> list[Mutant]:
    """Draw the same number of mutants from each package; each is valid Python."""
    generator = random.Random(seed)
    drawn = []
    for package in PACKAGES:
        files = sorted((ROOT / "ckpt_tools" / package).rglob("*.py"))
        mutants = [mutant for file in files for mutant in find_mutants(file)]
        generator.shuffle(mutants)
        drawn.append(filter(is_valid, mutants))
    in_turns = (mutant for turn in itertools.zip_longest(*drawn) for mutant in turn if mutant is not None)
    return list(itertools.islice(in_turns, count))


def is_valid(mutant: Mutant) -> bool:
    try:
        compile(mutant.apply_to((ROOT / mutant.file).read_bytes()), mutant.file, "exec")
    except SyntaxError:
        return False
    return True


def copy_checkout(folder: Path) -> Path:
    """Copy what git tracks, and link the environment and the cache of fixtures."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    for name in (".venv", ".cache"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run_pytest(checkout: Path, arguments: list[str], timeout: float | None = None, **variables: str) -> int:
    """Exit code of pytest; 1 if it takes longer than ``timeout`` seconds: a fault may well be an endless loop."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), **variables}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    log = subprocess.DEVNULL
    with subprocess.Popen(
        command, cwd=checkout, env=environment, start_new_session=True, stdout=log, stderr=log
    ) as process:
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return 1


def find_passes(mutant: Mutant) -> Iterator[tuple[str, int]]:
    """Files and lines before which a pass is recorded: the statement; or, if it runs when its module is imported, the
    beginnings of the module's functions, or of those of the modules that import it."""
    bodies = find_bodies(ROOT / mutant.file)
    if any(first <= mutant.statement <= last for first, last in bodies):
        yield mutant.file, mutant.statement
        return
    stem = Path(mutant.file).stem
    importing = re.compile(rf"^ *from [\w.]*\b{stem} import|^ *from .* import .*\b{stem}\b", re.MULTILINE)
    others = (file for file in (ROOT / "ckpt_tools").rglob("*.py") if importing.search(file.read_text()))
    for file in [ROOT / mutant.file] if bodies else others:
        yield from ((str(file.relative_to(ROOT)), first) for first, _ in find_bodies(file))


def find_bodies(file: Path) -> list[tuple[int, int]]:
    """First and last line of the body of each function, without its docstring."""
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    bodies = [function.body[ast.get_docstring(function) is not None :] for function in functions]
    return [(first_line_of(body[0]), body[-1].end_lineno or 0) for body in bodies if body]


def record_passes(mutants: list[Mutant], arguments: list[str], folder: Path) -> None:
    """Runs the tests once, with a call of the recorder before each statement that has a mutant."""
    with tempfile.TemporaryDirectory() as temporary:
        checkout = copy_checkout(Path(temporary))
        (checkout / "_mutants.py").write_text(RECORDER)
        (checkout / "_mutants_durations.py").write_text(DURATIONS)
        places = defaultdict(list)
        for site, mutant in enumerate(mutants):
            for file, line in find_passes(mutant):
                places[file].append((line, site))
        for file, sites in places.items():
            lines = (checkout / file).read_text().splitlines(keepends=True)
            for line, site in sorted(sites, reverse=True):
                indentation = lines[line - 1][: -len(lines[line - 1].lstrip())]
                lines.insert(line - 1, f"{indentation}__import__('_mutants').record({site})\n")
            (checkout / file).write_text("".join(lines))
        run_pytest(checkout, ["-p", "_mutants_durations", *arguments], MUTANTS_RECORD=str(folder / "passes"))


def write_code(file: Path, code: bytes) -> None:
    """Without what was compiled of it before: a file of the same size and second counts as unchanged."""
    file.write_bytes(code)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


def try_mutant(site: int, mutant: Mutant, tests: list[str], limit: float, checkouts: list[Path]) -> Result:
    """The result of one mutant, in a copy of the checkout that no other thread uses meanwhile."""
    began = time.monotonic()
    checkout = checkouts.pop()
    source = (ROOT / mutant.file).read_bytes()
    write_code(checkout / mutant.file, mutant.apply_to(source))
    try:
        code = run_pytest(checkout, ["-x", "--timeout=300", *tests], 3 * limit + 60) if tests else 0
    finally:
        write_code(checkout / mutant.file, source)
        checkouts.append(checkout)
    seconds = round(time.monotonic() - began, 1)
    return {"site": site, **asdict(mutant), "tests": len(tests), "caught": code != 0, "seconds": seconds}


def choose_tests(folder: Path, limit: float) -> dict[int, list[str]]:
    """Tests that pass each site, the fastest first, as many as take ``limit`` seconds in all."""
    durations: defaultdict[str, float] = defaultdict(float)
    failed = set()
    for line in Path(f"{folder / 'passes'}.durations").read_text().splitlines():
        test, duration, outcome = json.loads(line)
        durations[test] += duration
        if outcome == "failed":
            failed.add(test)
    passes = defaultdict(set)
    for entry in (folder / "passes").read_text().splitlines():
        site, test = entry.split("\t")
        passes[int(site)].add(test)
    chosen = {}
    for number, tests in passes.items():
        fastest = sorted(tests - failed, key=lambda test: (durations[test], test))
        totals = itertools.accumulate(durations[test] for test in fastest)
        # The first is always taken, however long.
        chosen[number] = fastest[: max(1, sum(total <= limit for total in totals))]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150, help="mutants, as many of each package (default: 150)")
    parser.add_argument("--seed", type=int, default=43, help="of the draw")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--limit", type=float, default=90, help="seconds of tests that a mutant meets at most")
    parser.add_argument("--tests", default="-m 'not extended'", help="arguments of pytest that choose the tests")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "mutants", help="folder of what was recorded")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    mutants = draw_mutants(options.count, options.seed)
    if not (options.out / "passes").exists():
        arguments = [f"-n{options.workers}", "--dist=loadfile", *shlex.split(options.tests)]
        record_passes(mutants, arguments, options.out)
    tests = choose_tests(options.out, options.limit)
    results_file = options.out / "results.jsonl"
    results = [json.loads(line) for line in results_file.read_text().splitlines()] if results_file.exists() else []
    done = {result["site"] for result in results}
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.workers) as threads:
        checkouts = [copy_checkout(Path(temporary) / str(number)) for number in range(options.workers)]
        run = partial(try_mutant, limit=options.limit, checkouts=checkouts)
        waiting = [
            threads.submit(run, site, mutant, tests.get(site, []))
            for site, mutant in enumerate(mutants)
            if site not in done
        ]
        with results_file.open("a") as file:
            for future in waiting:
                results.append(result := future.result())
                file.write(json.dumps(result) + "\n")
                file.flush()
    print_table(results)


def print_table(results: list[Result]) -> None:
    """Mutants caught of each package, and the survivors."""
    caught = Counter(package for result in results if result["caught"] for package in (package_of(result), "all"))
    drawn = Counter(package for result in results for package in (package_of(result), "all"))
    for package, number in drawn.items():
        print(f"{package:15} {caught[package]:3} of {number:3}")
    for result in results:
        if not result["caught"]:
            change = f"{result['before']} -> {result['after']}"
            print(f"{result['file']}:{result['line']}: {change}, passed by {result['tests']} tests")


def package_of(result: Result) -> str:
    return Path(result["file"]).parts[1]


if __name__ == "__main__":
    main()
