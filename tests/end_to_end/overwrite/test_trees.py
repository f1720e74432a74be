"""Nothing but what the rule names is gone or changed, whatever a command writes and whatever lies around."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckpt_tools
from ckpt_tools.errors import CkptError, DestinationExistsError
from tests.end_to_end.overwrite.trees import Disk, InBucket, Tree, World, made_run, made_tree
from tests.verification.test_signing import make_key

pytestmark = pytest.mark.extended

NUMBERS = {"disk": (200, 18_000), "bucket": (16, 2_000)}
"""Cases of each place, without and with ``--soak``."""

FORMATS = ("dcp", "zero1", "zero2", "zero3", "universal", "safetensors", "torch")
COPYING = ("convert", "convert", "convert", "convert", "plan", "consolidate", "reshard")
WRITING = (*COPYING, "checksum", "sign", "clean")


@dataclass(frozen=True, slots=True)
class Command:
    """A command by chance: its verb, and the options that say what may be replaced."""

    verb: str
    to: str
    overwrite: bool
    resume: bool
    checksum: bool
    output: str | None

    @property
    def copies(self) -> bool:
        return self.verb in COPYING


def made_command(rng: random.Random, tree: Tree, *, is_remote: bool) -> Command:
    verb = rng.choice([verb for verb in WRITING if not (is_remote and verb == "sign")])
    files = [path for path, node in tree.nodes.items() if node.kind == "file"]
    return Command(
        verb,
        rng.choice(FORMATS),
        overwrite=rng.random() < 0.75,
        resume=rng.random() < 0.25,
        checksum=rng.random() < 0.25,
        output=rng.choice(files) if rng.random() < 0.5 else None,
    )


def run(command: Command, tree: Tree, world: World, key: Path) -> None:
    src, dst = world.url(tree.src), world.url(tree.dst)
    output = None if command.output is None else world.url(command.output)
    if command.verb == "clean":
        ckpt_tools.clean(dst)
    elif command.verb == "checksum":
        ckpt_tools.checksum(dst, output=output, overwrite=command.overwrite, workers=1)
    elif command.verb == "sign":
        ckpt_tools.sign(dst, private_key=key, signature=output, overwrite=command.overwrite)
    else:
        copying(command, tree)(src, dst)


def copying(command: Command, tree: Tree) -> Callable[[str, str], object]:
    """The call of a command that makes a checkpoint, of a source and a destination."""
    options = {"overwrite": command.overwrite, "checksum": command.checksum, "resume": command.resume, "workers": 1}
    to = None if "." in tree.dst else command.to
    tagged = {} if to is None or not to.startswith(("zero", "universal")) else {"tag": "step1"}
    if command.verb == "plan":
        return lambda src, dst: ckpt_tools.plan(src, dst, to=to, **tagged, **options)
    if command.verb == "consolidate":
        return lambda src, dst: ckpt_tools.consolidate(src, dst, **options)
    if command.verb == "reshard":
        return lambda src, dst: ckpt_tools.reshard(src, dst, world_size=3, **options)
    return lambda src, dst: ckpt_tools.convert(src, dst, to=to, **tagged, **options)


def may_change(command: Command, tree: Tree) -> set[str]:
    """The paths that the rule of docs/crashes.md lets the command remove or replace, by what the tree was made of."""
    if command.verb == "plan":
        return set()
    left = {path for path, node in tree.nodes.items() if node.role == "left"}
    if not command.overwrite:
        return left if command.copies or command.verb == "clean" else set()
    if command.verb in ("checksum", "sign"):
        role = "digests" if command.verb == "checksum" else "signature"
        return {path for path, node in tree.nodes.items() if node.role == role}
    if command.verb == "clean":
        return left
    beside = {path for path, node in tree.nodes.items() if node.role == "digests"}
    if not tree.is_full and not tree.is_related:
        return left | (beside if command.checksum else set())
    if not tree.is_pure or tree.is_related:
        return left
    return left | beside | set(tree.at_destination())


def is_folder_of(path: str, paths: set[str]) -> bool:
    return any(inner.startswith(f"{path}/") for inner in paths)


def check(command: Command, tree: Tree, before: Mapping[str, object], after: Mapping[str, object]) -> None:
    """Folders may go with what they held, and with nothing else in them."""
    allowed = may_change(command, tree)
    changed = {path for path, found in before.items() if after.get(path) != found}
    wrong = {path for path in changed if path not in allowed and not is_folder_of(path, allowed)}
    assert not wrong, f"{command} changed {sorted(wrong)} of\n{sorted(before)}"
    new = {path for path in after if path not in before}
    if command.verb == "plan":
        assert not new, f"{command} wrote {new}"


def one(number: int, world: World, key: Path, *, is_remote: bool) -> str:
    """One case, which its number says; how it ended."""
    rng = random.Random(number)
    tree = made_tree(rng, is_remote=is_remote)
    command = made_command(rng, tree, is_remote=is_remote)
    world.put(tree)
    before = world.look()
    try:
        run(command, tree, world, key)
        ended = "done"
    except CkptError as error:
        ended = type(error).__name__
    check(command, tree, before, world.look())
    if command.copies and tree.is_full:
        may_replace = command.overwrite and tree.is_pure and not tree.is_related
        assert ended != "done" or may_replace, f"case {number}: {command} went through"
    return f"{'copy' if command.copies else command.verb} {ended}"


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    path = tmp_path_factory.mktemp("key") / "key.pem"
    make_key(path)
    return path


@pytest.fixture
def soak(pytestconfig):
    return bool(pytestconfig.getoption("--soak"))


@pytest.fixture(params=["disk", "bucket"])
def new_world(request, tmp_path):
    """``new_world(number)``: an empty one for each case."""

    def make(number: int) -> World:
        if request.param == "bucket":
            s3 = request.getfixturevalue("s3")
            return InBucket(s3, s3.new_prefix())
        (tmp_path / str(number)).mkdir()
        return Disk(tmp_path / str(number))

    make.place = request.param
    return make


@pytest.mark.timeout(7200)
def test_a_command_changes_what_the_rule_names_alone(new_world, key, soak):
    ends: Counter[str] = Counter()
    for number in range(NUMBERS[new_world.place][soak]):
        world = new_world(number)
        ends[one(number, world, key, is_remote=new_world.place != "disk")] += 1
        world.clear()
    # Cases of which all are refused, or none, would show nothing.
    total = sum(ends.values())
    assert ends["copy done"] > total / 10, ends
    assert ends[f"copy {DestinationExistsError.__name__}"] > total / 10, ends
    assert ends["clean done"] and (ends["checksum done"] or total < 20), ends


NUM_RUNS, NUM_RUNS_SOAK = 60, 4_000


def prune_one(number: int, world: World, *, is_remote: bool) -> Counter[str]:
    """A case of ``prune``, which its number says; how it ended. What is kept is judged by the tree alone."""
    rng = random.Random(number)
    run = made_run(rng, is_remote=is_remote)
    keep_last, incomplete = rng.choice([1, 2, 3]), rng.random() < 0.3
    yes = rng.random() < 0.8
    world.put(run.tree)
    before = world.look()
    kept: set[str] = set()
    try:
        report = ckpt_tools.prune(world.url("work/run"), keep_last=keep_last, incomplete=incomplete, yes=yes)
        kept = {each.name for each in report.checkpoints if each.reason == "the newest with optimizer state"}
        ended = "done"
    except CkptError as error:
        ended = type(error).__name__
    after = world.look()
    gone = {path for path in before if path not in after}
    newest = [name for name in run.names if name in run.whole][:keep_last]
    links = {Path(node.data.decode()).name for node in run.tree.nodes.values() if node.kind == "link"}
    may_go = [name for name in run.names if name in run.pure and name not in newest and name not in links]
    allowed = {path for name in may_go for path in run.files_of(name)} if yes and ended == "done" else set()
    wrong = {path for path in gone if path not in allowed and not is_folder_of(path, allowed)}
    assert not wrong, f"case {number} removed {sorted(wrong)}, may remove {may_go}"
    there = {path: found for path, found in after.items() if path != "work/run/.ckpt-tools-partial"}  # an empty folder
    assert {path: before[path] for path in there if path in before} == there, f"case {number} changed or added a file"
    left = [name for name in may_go if name in run.whole and name not in kept and run.files_of(name) - gone]
    assert not (allowed and left), f"case {number} left {left}"
    return Counter({ended: 1, "removed": bool(gone), "kept strangers": bool(set(run.names) - run.pure)})


@pytest.mark.timeout(7200)
def test_prune_removes_files_of_old_checkpoints_alone(new_world, soak):
    ends: Counter[str] = Counter()
    total = (NUM_RUNS_SOAK if soak else NUM_RUNS) // {"disk": 1, "bucket": 4}[new_world.place]
    for number in range(total):
        world = new_world(number)
        ends += prune_one(number, world, is_remote=new_world.place != "disk")
        world.clear()
    assert min(ends["done"], ends["removed"], ends["kept strangers"]) > total / 8, ends
