"""Who may import whom, downwards only, and nobody a framework before it is needed."""

import subprocess
import sys
from collections.abc import Callable
from graphlib import TopologicalSorter

import pytest

from tests.support.imports import IMPORTS, MODULES, PACKAGE, ROOT, Import

pytestmark = pytest.mark.quick

PACKAGES = (
    *(
        "process",
        "messages",
        "core",
        "lora",
        "recipes",
        "planning",
        "stores",
        "serialization",
        "trainers",
        "state_tree",
        "formats",
        "reading",
        "runs",
    ),
    *("transfer", "verification", "conversion", "torch", "cli", "testing"),
)
"""Each imports only those before it."""

APART = {
    frozenset({"formats", "transfer"}),
    frozenset({"reading", "transfer"}),
    frozenset({"runs", "transfer"}),
    frozenset({"verification", "torch"}),
}
"""Packages that know nothing of each other, though one stands before the other."""

FACE = {"__main__", "api", "arguments", "checkpoint", "errors", "slices"}
"""The modules at the root, beside the package itself."""

EVERYWHERE = {"arguments", "errors"}
"""Modules at the root that any package may import. The others stand above all packages but ``cli`` and ``testing``."""

LIGHT = {
    "core.format_names",
    "core.option_names",
    "core.options",
    "core.part_number",
    "messages.help_text",
    "messages.progress",
    "messages.wording",
}
"""What the command line imports beside the public API and ``process``: it costs nothing."""

FRAMEWORKS = {
    *("torch", "torchvision", "deepspeed", "ray", "safetensors", "transformers", "accelerate", "pandas", "pyarrow"),
    "fsspec",
}
"""None of them is imported before something needs it: torch alone takes two seconds."""

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
    if inside(found.module) == "errors":
        return there == "process"
    if here is None:
        return there not in {"cli", "testing"} or inside(found.module) == "__main__"
    if there is None:
        return root_module in EVERYWHERE or here == "cli" or here == "testing"
    if frozenset({here, there}) in APART:
        return False
    return PACKAGES.index(there) <= PACKAGES.index(here)


def test_packages_and_rules_are_the_same_set():
    folder = ROOT / PACKAGE
    folders = {path.name for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__"}
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert (folders, modules) == (set(PACKAGES), FACE)


def test_packages_import_only_what_stands_before_them():
    assert not listing([found for found in AMONG_US if not may_import(found)])


def test_formats_build_on_each_other_in_no_circle():
    """A format may use the modules of one that it is built on: megatron those of dcp, sharded those of torch. Names of
    files, in ``names``, are known to all."""
    graph: dict[str, set[str]] = {}
    for found in OURS:
        here, there = (inside(module).split(".") for module in (found.module, found.target))
        are_formats = here[0] == there[0] == "formats" and len(there) > 1 < len(here)
        if are_formats and here[1] != there[1] and there[2:] != ["names"]:
            graph.setdefault(here[1], set()).add(there[1])
    assert graph["megatron"] >= {"dcp"}
    list(TopologicalSorter(graph).static_order())


def test_families_of_deepspeed_share_what_is_common_alone():
    def family(module: str) -> str | None:
        *package, part = [*inside(module).split("."), "", ""][:3]
        is_family = package == ["formats", "deepspeed"] and part not in ("", "complete", "loading", "names")
        return part if is_family else None

    wrong = [found for found in OURS if family(found.module) and family(found.target)]
    assert not listing([found for found in wrong if family(found.target) not in {family(found.module), "common"}])


def test_the_command_line_knows_the_public_api_alone():
    def allowed(found: Import) -> bool:
        there = inside(found.target)
        return found.for_types or there in {"", *EVERYWHERE, *LIGHT} or package_of(found.target) in {"cli", "process"}

    imports = [found for found in AMONG_US if package_of(found.module) == "cli"]
    assert imports and not listing([found for found in imports if not allowed(found)])


def first(module: str) -> str:
    return module.split(".")[0]


BESIDE = {"fixtures", "benchmarks", "tests"}


def ours(found: Import) -> bool:
    return first(found.module) == PACKAGE


FORBIDDEN: dict[str, Callable[[Import], bool]] = {
    "of the converter by training and inference, but for the public API": lambda found: (
        first(found.module) in ("training", "inference")
        and first(found.target) == PACKAGE
        and inside(found.target) not in {"", "messages.help_text", *EVERYWHERE}
        and package_of(found.target) != "process"
    ),
    "of inference by training": lambda found: (
        first(found.module) == "training" and first(found.target) in {"inference", *BESIDE}
    ),
    "of training or inference by the converter": lambda found: (
        ours(found) and first(found.target) in {"training", "inference", *BESIDE}
    ),
    "of torch, but in its own package": lambda found: (
        ours(found) and first(found.target) == "torch" and not (found.for_types or package_of(found.module) == "torch")
    ),
    "of deepspeed": lambda found: ours(found) and first(found.target) == "deepspeed",
    "of a framework before it is needed": lambda found: (
        ours(found) and found.early and first(found.target) in FRAMEWORKS
    ),
    "of tools of tests, but in what is for tests": lambda found: (
        ours(found) and first(found.target) in {"pytest", "hypothesis"} and package_of(found.module) != "testing"
    ),
}


@pytest.mark.parametrize("forbidden", FORBIDDEN)
def test_there_is_no_import(forbidden):
    assert not listing([found for found in IMPORTS if FORBIDDEN[forbidden](found)])


TABLES: dict[str, dict[str, set[str]]] = {
    "training": {
        "config": set(),
        "models": {"config"},
        "data": {"config"},
        "checkpoints": {"config", "models"},
        "engines": {"config", "models", "checkpoints"},
        "loop": {"config", "models", "data", "checkpoints", "engines"},
        "launchers": {"config", "models", "data", "checkpoints", "engines", "loop"},
        "examples": set(),
        "studies": {"config", "models", "data", "checkpoints", "engines", "loop", "launchers"},
    },
    "inference": {
        "common": set(),
        "models": {"common"},
        "batch": {"common", "models"},
        "serving": {"common", "models"},
        "forward": {"common", "models"},
    },
}
"""For each tree its rooms, and for each room the others that it may import."""

ROOTS = {"training": {"__main__"}, "inference": {"demo"}}
"""Modules beside the rooms. They may import all rooms, and no room imports them."""


def room_of(tree: str, module: str) -> str | None:
    """The room of a module of the tree; None for the tree itself and for modules of other trees."""
    top, _, rest = module.partition(".")
    return rest.partition(".")[0] or None if top == tree else None


@pytest.mark.parametrize("tree", TABLES)
def test_rooms_import_only_what_their_table_allows(tree):
    """Never upward, never in a circle."""
    table = TABLES[tree]
    here = {room_of(tree, module) for module in MODULES} - {None}
    assert here == table.keys() | ROOTS[tree]
    assert {path.parent.name for path in (ROOT / tree).glob("*/*.py")} == table.keys()
    list(TopologicalSorter(table).static_order())
    imports = [(room, found) for found in IMPORTS if (room := room_of(tree, found.module)) in table]
    wrong = [found for room, found in imports if room_of(tree, found.target) not in {None, room, *table[f"{room}"]}]
    assert not listing(wrong)


def test_modules_do_not_import_each_other_in_a_circle():
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


def test_the_package_and_the_command_line_load_next_to_nothing():
    assert not loaded_after("import ckpt_tools") & {*FRAMEWORKS, "numpy", "click", "rich"}
    assert not loaded_after("import ckpt_tools.cli") & {*FRAMEWORKS, "numpy"}


def test_every_module_together_loads_no_framework():
    modules = [name for name in MODULES if first(name) == PACKAGE and inside(name) != "__main__"]
    names = [name for name in modules if package_of(name) != "testing"]
    assert not loaded_after("\n".join(f"import {name}" for name in names)) & FRAMEWORKS
