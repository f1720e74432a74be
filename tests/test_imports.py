"""Who may import whom, downwards only, and nobody a framework before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ckpt_tools

ROOT = Path(__file__).parent.parent
PACKAGE = "ckpt_tools"

NOUNS = {"errors", "dtypes", "boxes", "values", "manifest"}

ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "dtypes": set(),
    "boxes": set(),
    "buffers": set(),
    "ledger": set(),
    "notices": set(),
    "wording": set(),
    "applicability": {"errors"},
    "matching": {"errors", "wording"},
    "options_names": set(),
    "signals": set(),
    "values": {"errors", "dtypes", "boxes"},
    "manifest": {"errors", "dtypes", "boxes", "ledger"},
    "numbered": {"boxes"},
    "casts": {"errors", "dtypes"},
    "transforms": {*NOUNS, "casts", "foreign", "ledger", "matching", "wording"},
    "layout": {*NOUNS, "ledger"},
    "coalesce": {*NOUNS},
    "foreign": {*NOUNS, "ledger", "wording"},
    "tree": {*NOUNS, "foreign", "ledger", "numbered", "wording"},
    "references": {*NOUNS},
    "entries": {*NOUNS, "ledger", "references", "wording"},
    "parts": set(),
    "planning": {*NOUNS, "layout", "coalesce", "parts", "wording"},
    "stores": {"errors", "notices", "parts", "signals", "wording"},
    "runners": {"errors", "checksums", "signals"},
    "containers": {*NOUNS, "layout", "stores.base", "wording"},
    "format": {
        *NOUNS,
        "casts",
        "ledger",
        "tree",
        "entries",
        "foreign",
        "references",
        "layout",
        "containers",
        "stores.base",
        "wording",
    },
    "assemble": {*NOUNS, "buffers", "casts", "planning", "containers", "coalesce", "stores.base"},
    "checksums": set(),
    "execute": {
        *NOUNS,
        "buffers",
        "checksums",
        "layout",
        "planning",
        "assemble",
        "coalesce",
        "stores.base",
        "runners.base",
    },
    "journal": {*NOUNS, "checksums", "layout", "planning", "execute", "stores.base", "runners.base"},
    "cleaning": {"stores.base"},
}
"""What each room below the public API may import of the others. A room that is not listed wires them together, and may
import any but ``cli`` and ``testing``."""

PUBLIC = {"errors", "notices", "options_names", "signals", "wording"}
"""What the command line may import beside the package itself: neither costs anything."""

FAMILIES = [{"deepspeed", "zero_writer", "universal"}]
"""Formats that are one framework's, and share what is its own. All others know nothing of each other."""

FRAMEWORKS = {
    "torch",
    "torchvision",
    "deepspeed",
    "ray",
    "safetensors",
    "transformers",
    "accelerate",
    "pandas",
    "pyarrow",
    "fsspec",
}
"""None of them is imported before something needs it: torch alone takes two seconds."""


@dataclass(frozen=True, slots=True)
class Import:
    """``module`` imports ``target``; ``early`` where that happens when it is itself imported."""

    module: str
    target: str
    line: int
    early: bool
    for_types: bool


def sources(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = {name: path for package in (PACKAGE, "training", "inference") for name, path in sources(package)}


def imports_of(module: str) -> list[Import]:
    return list(_walk(module, ast.parse(MODULES[module].read_text()).body, early=True, for_types=False))


def _walk(module: str, nodes: list[ast.stmt], *, early: bool, for_types: bool) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in _targets(module, node):
                yield Import(module, target, node.lineno, early and not for_types, for_types)
            continue
        inner_early = early and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            types_only = for_types or (guarded and name == "body")
            yield from _walk(module, getattr(node, name, []), early=inner_early, for_types=types_only)


def _targets(module: str, node: ast.Import | ast.ImportFrom) -> list[str]:
    """Modules by full name; a name imported from a package counts as the module of that name, if there is one and it
    is no verb of the public API."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
        base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])])
    verbs = ckpt_tools.__all__ if base == PACKAGE else []
    modules = [f"{base}.{alias.name}" if alias.name not in verbs else base for alias in node.names]
    return [module if module in MODULES else base for module in modules]


IMPORTS = [found for module in MODULES for found in imports_of(module)]
OURS = [found for found in IMPORTS if found.module.split(".")[0] == PACKAGE]


def inside(module: str) -> str:
    """The name within the package: ``stores.base``."""
    return module.removeprefix(PACKAGE).removeprefix(".")


def room(module: str) -> str:
    return inside(module).split(".")[0]


def described(wrong: list[Import]) -> str:
    return "\n".join(f"{found.module}:{found.line} imports {found.target}" for found in wrong)


def test_the_rules_lead_downwards_only() -> None:
    below = {name: {part.split(".")[0] for part in allowed} for name, allowed in ROOMS.items()}
    assert set(TopologicalSorter(below).static_order()) == set(ROOMS)


def test_rooms_import_only_what_is_below_them() -> None:
    def allowed(found: Import) -> bool:
        here, there = room(found.module), inside(found.target)
        if here not in ROOMS or found.target.split(".")[0] != PACKAGE or room(found.target) == here:
            return True
        return there in ROOMS[here] or there.split(".")[0] in ROOMS[here]

    assert not described([found for found in OURS if not allowed(found)])


def test_nobody_imports_the_command_line_or_what_is_for_tests() -> None:
    above = {"cli": {"cli", "__main__"}, "testing": {"testing"}}
    wrong = [found for found in IMPORTS if found.target.startswith(f"{PACKAGE}.") and room(found.target) in above]
    assert not described([found for found in wrong if room(found.module) not in above[room(found.target)]])


def test_formats_do_not_know_each_other() -> None:
    def format_of(module: str) -> str | None:
        parts = inside(module).split(".")
        return parts[1] if parts[0] == "format" and len(parts) > 1 else None

    def allowed(found: Import) -> bool:
        here, there = format_of(found.module), format_of(found.target)
        if here is None or there in {None, here, "base"} or here == "registry":
            return True
        return any({here, there} <= family for family in FAMILIES)

    assert not described([found for found in OURS if not allowed(found)])


def test_the_command_line_knows_the_public_api_alone() -> None:
    def allowed(found: Import) -> bool:
        there = inside(found.target)
        return found.for_types or there == "" or there in PUBLIC or there.split(".")[0] == "cli"

    ours = [found for found in OURS if room(found.module) == "cli" and found.target.split(".")[0] == PACKAGE]
    assert ours
    assert not described([found for found in ours if not allowed(found)])


@pytest.mark.parametrize("package", ["training", "inference"])
def test_training_and_inference_know_the_public_api_alone(package: str) -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.module.split(".")[0] == package
        and found.target.split(".")[0] == PACKAGE
        and inside(found.target) not in {"", "errors", "signals"}
    ]
    assert not described(wrong)


def test_the_converter_knows_neither_training_nor_inference() -> None:
    others = {"training", "inference", "fixtures", "benchmarks", "tests"}
    assert not described([found for found in OURS if found.target.split(".")[0] in others])


def test_no_framework_is_imported_before_it_is_needed() -> None:
    assert not described([found for found in OURS if found.early and found.target.split(".")[0] in FRAMEWORKS])


def test_only_what_is_for_tests_needs_their_tools() -> None:
    tools = {"pytest", "hypothesis"}
    wrong = [found for found in OURS if found.target.split(".")[0] in tools and room(found.module) != "testing"]
    assert not described(wrong)


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in IMPORTS:
        if found.early and found.target in MODULES and found.target != PACKAGE:
            graph[found.module].add(found.target)
    list(TopologicalSorter(graph).static_order())


def loaded_after(code: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has loaded after ``code``."""
    program = f"import sys\n{code}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_the_package_alone_loads_nothing() -> None:
    assert not loaded_after("import ckpt_tools") & {*FRAMEWORKS, "numpy", "click", "rich"}


def test_the_command_line_loads_no_numpy_before_a_command_does() -> None:
    assert not loaded_after("import ckpt_tools.cli") & {*FRAMEWORKS, "numpy"}


def test_every_module_together_loads_no_framework() -> None:
    names = [name for name in MODULES if name.split(".")[0] == PACKAGE and room(name) not in {"testing", "__main__"}]
    assert not loaded_after("\n".join(f"import {name}" for name in names)) & FRAMEWORKS
