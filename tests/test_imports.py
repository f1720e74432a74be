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

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent.parent
PACKAGE = "ckpt_tools"

PACKAGES = (
    "core",
    "planning",
    "stores",
    "serialization",
    "formats",
    "transfer",
    "verification",
    "torch",
    "cli",
    "testing",
)
"""Each imports only those before it."""

APART = {frozenset({"formats", "transfer"}), frozenset({"verification", "torch"})}
"""Packages that know nothing of each other, though one stands before the other."""

FACE = {
    "__main__",
    "api",
    "arguments",
    "checkpoint",
    "conversion",
    "errors",
    "guard",
    "guard_process",
    "loadable",
    "signals",
}
"""The modules at the root, beside the package itself."""

EVERYWHERE = {"arguments", "errors", "guard", "signals"}
"""Modules at the root that any package may import. The others stand above all packages but ``cli`` and ``testing``."""

LIGHT = {"core.announcements", "core.option_names", "core.value_text", "core.wording"}
"""What the command line imports beside the public API: it costs nothing."""

FORMATS_SHARED = {
    "accelerate",
    "base",
    "completeness",
    "deepspeed_files",
    "flat_names",
    "foreign",
    "hf_index",
    "rank_names",
    "run_folders",
    "state_dict",
    "torch_leaves",
    "torch_save",
    "trainer_files",
    "trainer_names",
}
"""What several formats have in common; files of ranks are torch's. ``registry`` knows every format, ``reading``,
``runs``, ``run_folders`` and ``trainer_files`` none, but ``reading`` hands the files of torch to what joins them with
others."""

FORMATS_ABOVE = {"halves", "reading", "registry", "run_metrics", "runs"}
"""What asks formats for something, and is asked by none."""

FORMATS_BELOW = {"megatron": "dcp"}
"""A format whose files are those of another with more beside them, and which is built on that one's modules."""

FROZEN_OR_BUFFER = "ckpt_tools.formats.deepspeed.common.frozen_or_buffer"
"""It tells frozen parameters and buffers of any source apart, and ``sharded`` has to know, as DeepSpeed's writers."""

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
OURS = [found for found in IMPORTS if found.module.split(".")[0] == PACKAGE]
AMONG_US = [found for found in OURS if found.target.split(".")[0] == PACKAGE]


def inside(module: str) -> str:
    """The name within the package: ``stores.urls``."""
    return module.removeprefix(PACKAGE).removeprefix(".")


def package_of(module: str) -> str | None:
    """The package of a module, or None for one at the root."""
    first = inside(module).split(".")[0]
    return first if first in PACKAGES else None


def listing(wrong: list[Import]) -> str:
    return "\n".join(f"{found.module}:{found.line} imports {found.target}" for found in wrong)


def may_import(found: Import) -> bool:
    here, there = package_of(found.module), package_of(found.target)
    root_module = inside(found.target)
    if here is None:
        return there not in {"cli", "testing"} or inside(found.module) == "__main__"
    if there is None:
        return root_module in EVERYWHERE or here == "cli" or here == "testing"
    if frozenset({here, there}) in APART:
        return False
    return PACKAGES.index(there) <= PACKAGES.index(here)


def test_packages_and_rules_are_the_same_set() -> None:
    folder = ROOT / PACKAGE
    folders = {path.name for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__"}
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert (folders, modules) == (set(PACKAGES), FACE)


def test_packages_import_only_what_stands_before_them() -> None:
    assert not listing([found for found in AMONG_US if not may_import(found)])


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("ckpt_tools.core.manifest", "ckpt_tools.planning.plan"),
        ("ckpt_tools.formats.base", "ckpt_tools.transfer.execute"),
        ("ckpt_tools.transfer.execute", "ckpt_tools.formats.base"),
        ("ckpt_tools.torch.fill", "ckpt_tools.verification.verify"),
        ("ckpt_tools.stores.local", "ckpt_tools.api"),
        ("ckpt_tools.api", "ckpt_tools.cli.main"),
    ],
)
def test_an_import_upwards_is_found(module: str, target: str) -> None:
    assert not may_import(Import(module, target, 1, early=True, for_types=False))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_in_one_line_what_it_is_for(package: str) -> None:
    charter = ast.get_docstring(ast.parse((ROOT / PACKAGE / package / "__init__.py").read_text()))
    assert charter
    assert charter.splitlines()[0].endswith(".")


def test_formats_do_not_know_each_other() -> None:
    def format_of(module: str) -> str | None:
        parts = inside(module).split(".")
        return parts[1] if parts[0] == "formats" and len(parts) > 1 else None

    def allowed(found: Import) -> bool:
        here, there = format_of(found.module), format_of(found.target)
        known = {None, here, *FORMATS_SHARED, FORMATS_BELOW.get(here or "")}
        if here == "sharded" and found.target.startswith(FROZEN_OR_BUFFER):
            return True
        return here is None or there in known or here in FORMATS_ABOVE

    assert not listing([found for found in OURS if not allowed(found)])


def test_families_of_deepspeed_share_what_is_common_alone() -> None:
    def family(module: str) -> str | None:
        parts = inside(module).split(".")
        return parts[2] if parts[:2] == ["formats", "deepspeed"] and len(parts) > 2 else None

    wrong = [found for found in OURS if family(found.module) and family(found.target)]
    assert not listing([found for found in wrong if family(found.target) not in {family(found.module), "common"}])


def test_the_command_line_knows_the_public_api_alone() -> None:
    def allowed(found: Import) -> bool:
        there = inside(found.target)
        return found.for_types or there in {"", *EVERYWHERE, *LIGHT} or package_of(found.target) == "cli"

    ours = [found for found in AMONG_US if package_of(found.module) == "cli"]
    assert ours
    assert not listing([found for found in ours if not allowed(found)])


@pytest.mark.parametrize("package", ["training", "inference"])
def test_training_and_inference_know_the_public_api_alone(package: str) -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.module.split(".")[0] == package
        and found.target.split(".")[0] == PACKAGE
        and inside(found.target) not in {"", *EVERYWHERE}
    ]
    assert not listing(wrong)


def test_training_does_not_know_inference() -> None:
    others = {"inference", "fixtures", "benchmarks", "tests"}
    ours = [found for found in IMPORTS if found.module.split(".")[0] == "training"]
    assert not listing([found for found in ours if found.target.split(".")[0] in others])


def test_the_converter_knows_neither_training_nor_inference() -> None:
    others = {"training", "inference", "fixtures", "benchmarks", "tests"}
    assert not listing([found for found in OURS if found.target.split(".")[0] in others])


def test_torch_is_imported_in_its_own_package_alone() -> None:
    wrong = [found for found in OURS if found.target.split(".")[0] == "torch" and package_of(found.module) != "torch"]
    assert not listing([found for found in wrong if not found.for_types])


def test_deepspeed_is_imported_nowhere() -> None:
    assert not listing([found for found in OURS if found.target.split(".")[0] == "deepspeed"])


def test_no_framework_is_imported_before_it_is_needed() -> None:
    assert not listing([found for found in OURS if found.early and found.target.split(".")[0] in FRAMEWORKS])


def test_only_what_is_for_tests_needs_their_tools() -> None:
    tools = {"pytest", "hypothesis"}
    wrong = [found for found in OURS if found.target.split(".")[0] in tools and package_of(found.module) != "testing"]
    assert not listing(wrong)


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Wherever an import stands: one in a function, or for types alone, ties two modules as one at the top does."""
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in IMPORTS:
        if found.target in MODULES and found.target not in (PACKAGE, found.module):
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
    names = [
        name
        for name in MODULES
        if name.split(".")[0] == PACKAGE and package_of(name) != "testing" and inside(name) != "__main__"
    ]
    assert not loaded_after("\n".join(f"import {name}" for name in names)) & FRAMEWORKS
