"""Every import statement of the packages, read from their sources."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ckpt_tools

ROOT = Path(__file__).parents[2]
PACKAGE = "ckpt_tools"


@dataclass(frozen=True, slots=True)
class Import:
    """``module`` imports ``target``; ``early`` if that happens when it is itself imported."""

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
    """Modules by full name. A name imported from a package counts as the module of that name, if there is one and it
    is not a verb of the public API."""
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
