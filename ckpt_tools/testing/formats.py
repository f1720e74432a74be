"""Requirements of every format, as a class of tests to inherit."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.options import ReadOptions, WriteOptions
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.core.value_refs import replace_tensor_refs
from ckpt_tools.errors import CkptError, FormatError, UnsupportedError
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.builtin import FORMATS
from ckpt_tools.planning.plan import make_plan
from ckpt_tools.stores.destination import StoreDestination
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.wrappers import overlay_literals
from ckpt_tools.testing.manifests import FORMAT, StoredCheckpoint, checkpoints_with_user_tensors, stored_checkpoints
from ckpt_tools.testing.stored import arbitrary_elements
from ckpt_tools.transfer.execute import execute_plan
from ckpt_tools.transfer.runners.threads import ThreadRunner
from ckpt_tools.transfer.tensor_reader import TensorReader

MEMORY_BYTES = 512 << 20
SCRATCH_BYTES = 1 << 16

FOREIGN: Mapping[str, tuple[str, ...]] = {
    "nothing that is a checkpoint": ("README.md", "config.json", "folder/notes.txt"),
    "dcp": (".metadata", "__0_0.distcp"),
    "safetensors": ("model.safetensors",),
    "torch": ("checkpoint.pt",),
    "sharded": ("model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"),
    "deepspeed": ("latest", "step1/mp_rank_00_model_states.pt", "step1/zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    "universal": ("latest_universal", "step1/mp_rank_00_model_states.pt", "step1/zero/w/fp32.pt"),
    "megatron": ("latest_checkpointed_iteration.txt", "iter_0000001/.metadata", "iter_0000001/common.pt"),
    "meta": ("consolidated.00.pth", "consolidated.01.pth", "params.json"),
    "gguf": ("model.gguf",),
    "npz": ("model.npz",),
    "orbax": ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"),
}
"""Names of files in folders that only the reader of that name may claim."""

_EXAMPLE_SETTINGS = settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


class ReaderTests:
    """Inherit it, and give the ``format``, which can be read, and the files of a small ``example``."""

    format: ClassVar[Format]
    optional_files: ClassVar[tuple[str, ...]] = ()
    """Files that the example can be read without."""

    def example(self) -> Mapping[str, bytes | bytearray]:
        """A checkpoint by the paths of all its files. It has a tensor."""
        raise NotImplementedError

    def test_it_says_its_name(self) -> None:
        assert self.format.name and self.format.about
        assert self._read_manifest(self.example())[1].format == self.format.name

    def test_a_missing_or_short_file_is_a_format_error(self) -> None:
        files = self.example()
        assert self._read_elements(files)
        for path, data in files.items():
            others = {name: each for name, each in files.items() if name != path}
            shortened = [{**others, path: part} for part in (data[:0], data[:-1], data[: len(data) // 2])]
            # A folder without any file is refused before a reader is asked.
            without = [] if path in self.optional_files else [others]
            for damaged in [*shortened, *filter(None, without)]:
                with pytest.raises(FormatError):
                    self._read_elements(damaged)

    def test_damage_is_no_other_exception(self) -> None:
        """Any bytes may be others: the checkpoint is read, or one of our errors says why not."""
        files = self.example()

        @_EXAMPLE_SETTINGS
        @given(st.data())
        def check(data: st.DataObject) -> None:
            path = data.draw(st.sampled_from(sorted(path for path in files if files[path])))
            damaged = bytearray(files[path])
            for _ in range(data.draw(st.integers(1, 3))):
                damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
            with suppress(CkptError):
                self._read_elements({**files, path: bytes(damaged)})

        check()

    def test_it_recognises_its_checkpoint_and_no_other_does(self) -> None:
        source = Source.open(_make_memory_store(self.example()))
        others = [each for each in FORMATS.values() if each.name != self.format.name]
        assert self.format.detect(source)
        assert not [each.name for each in others if each.detect(source)]

    @pytest.mark.parametrize("name", FOREIGN)
    def test_it_does_not_claim_others(self, name: str) -> None:
        files = {path: bytearray(b"\0") for path in FOREIGN[name]}
        assert self.format.detect(Source.open(MemoryStore(files))) is (name == self.format.name)

    def _read_manifest(self, files: Mapping[str, bytes | bytearray]) -> tuple[Source, Manifest]:
        source = Source.open(_make_memory_store(files))
        return source, self.format.read(source, ReadOptions())

    def _read_elements(self, files: Mapping[str, bytes | bytearray]) -> dict[StateKey, bytes]:
        return _read_all_elements(*self._read_manifest(files))


class FormatTests(ReaderTests):
    """Inherit it, and give the ``format``, which can be read and written."""

    unsupported_dtypes: ClassVar[tuple[DType, ...]] = ()
    """Those that the format refuses with UnsupportedError."""
    keeps_state: ClassVar[bool] = True
    """Whether it can hold optimizer state, groups and the user's own entries."""
    keeps_user_tensors: ClassVar[bool] = True
    """Whether it can tell a tensor among the user's own entries from the model's."""
    keeps_ties: ClassVar[bool] = True
    """Whether tied names are told from names of equal tensors."""
    own_entries: ClassVar[tuple[str, ...]] = ()
    """Entries that reading adds, which say something of the files."""

    def example(self) -> Mapping[str, bytes | bytearray]:
        return self._write_files(_make_checkpoint(DType.FLOAT32, is_whole=self.keeps_state))

    def test_what_is_written_is_read(self) -> None:
        """Every tensor bit for bit, and all that is not a tensor."""

        @_EXAMPLE_SETTINGS
        @given(
            stored_checkpoints(
                without=self.unsupported_dtypes,
                is_whole=self.keeps_state,
                has_user_tensors=self.keeps_user_tensors,
                has_ties=self.keeps_ties,
            )
        )
        def check(checkpoint: StoredCheckpoint) -> None:
            source, manifest = self._read_manifest(self._write_files(checkpoint))
            assert self._collect_own_facts(manifest, _read_all_elements(source, manifest)) == _collect_facts(
                checkpoint.manifest, checkpoint.elements
            )

        check()

    def test_tensors_of_the_user_are_no_weights(self) -> None:
        """The weights that are read are those that were written, for any entries of the user's own; or writing or
        reading is refused."""
        if not (self.keeps_state and self.keeps_user_tensors):
            return

        @_EXAMPLE_SETTINGS
        @given(checkpoints_with_user_tensors(without=self.unsupported_dtypes))
        def check(checkpoint: StoredCheckpoint) -> None:
            try:
                _, manifest = self._read_manifest(self._write_files(checkpoint))
            except UnsupportedError:
                return
            assert _list_weight_names(manifest) == _list_weight_names(checkpoint.manifest)

        check()

    @pytest.mark.parametrize("dtype", DType)
    def test_every_dtype_is_kept_or_refused(self, dtype: DType) -> None:
        if not dtype.is_torch_dtype and not self.format.keeps_every_dtype:
            pytest.skip("refused before the format is asked")
        checkpoint = _make_checkpoint(dtype)
        if dtype in self.unsupported_dtypes:
            with pytest.raises(FormatError, match=dtype.value):
                self._write_files(checkpoint)
            return
        source, manifest = self._read_manifest(self._write_files(checkpoint))
        assert manifest.tensors[StateKey("w")].dtype is dtype
        assert _read_all_elements(source, manifest) == checkpoint.elements

    def test_planning_and_detection_read_no_tensor(self) -> None:
        """A manifest is made of headers: elements that lie in the files of the checkpoint are not asked for."""
        files = self._write_files(_make_checkpoint(DType.FLOAT32, (1 << 20,)))
        store = _CountingStore(files)
        source = Source.open(store)
        assert self.format.detect(source)
        self.format.read(source, ReadOptions())
        assert store.bytes_read < 1 << 20

    def test_its_own_files_are_those_it_wrote(self) -> None:
        files = self.example()
        source, manifest = self._read_manifest({**files, "notes.md": b"mine", "folder/notes.md": b"mine"})
        assert self.format.own_files(source, manifest) & source.files.keys() == files.keys()

    def _collect_own_facts(self, manifest: Manifest, elements: Mapping[StateKey, bytes]) -> dict[str, object]:
        extra = {name: value for name, value in manifest.extra.items() if name not in self.own_entries}
        return _collect_facts(replace(manifest, extra=extra), elements)

    def _write_files(self, checkpoint: StoredCheckpoint) -> dict[str, bytearray]:
        """The files that the writer makes, by the way of every conversion."""
        layout = self.format.layout(checkpoint.manifest, WriteOptions())
        plan = make_plan(checkpoint.manifest, layout, memory_bytes=MEMORY_BYTES, num_workers=1)
        target = MemoryStore()
        runner = ThreadRunner(1)
        execute_plan(plan, checkpoint.store, StoreDestination(target), runner=runner, on_bytes=lambda num_bytes: None)
        return target.files


def _make_memory_store(files: Mapping[str, bytes | bytearray]) -> MemoryStore:
    return MemoryStore({path: bytearray(data) for path, data in files.items()})


class _CountingStore(MemoryStore):
    """A store in memory that counts what is read of it."""

    def __init__(self, files: dict[str, bytearray]) -> None:
        super().__init__(files)
        self.bytes_read = 0

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        self.bytes_read += len(buffer)
        super().read_into(path, start, buffer)


def _read_all_elements(source: Source, manifest: Manifest) -> dict[StateKey, bytes]:
    reader = TensorReader(overlay_literals(source.store, manifest.literals), SCRATCH_BYTES)
    elements = {}
    for key, entry in manifest.tensors.items():
        buffer = bytearray(entry.num_bytes)
        if buffer:
            reader.read(entry, Box.whole(entry.shape), entry.shape, 0, entry.numel, memoryview(buffer))
        elements[key] = bytes(buffer)
    return elements


def _collect_facts(manifest: Manifest, elements: Mapping[StateKey, bytes]) -> dict[str, object]:
    """All that a checkpoint holds. Formats may name the tensors of the user's entries as they like."""

    def describe_tensor(key: StateKey) -> object:
        entry = manifest.tensors[key]
        return entry.shape, entry.dtype, entry.kind, elements[key]

    return {
        "tensors": {
            key: describe_tensor(key) for key, entry in manifest.tensors.items() if entry.kind is not Kind.EXTRA
        },
        "aliases": dict(manifest.aliases),
        "groups": [(group.params, dict(group.options)) for group in manifest.groups],
        "extra": {
            name: replace_tensor_refs(value, lambda ref: describe_tensor(ref.key))
            for name, value in manifest.extra.items()
        },
    }


def _list_weight_names(manifest: Manifest) -> set[str]:
    weights = {key.fqn for kind in (Kind.PARAMETER, Kind.BUFFER) for key in manifest.select_kinds(kind)}
    return weights | manifest.aliases.keys()


def _make_checkpoint(dtype: DType, shape: tuple[int, ...] = (3, 2), *, is_whole: bool = False) -> StoredCheckpoint:
    """One weight ``w``; if ``is_whole``, with a moment and a group."""
    kind = Kind.PARAMETER if dtype.is_floating else Kind.BUFFER
    kinds = {StateKey("w"): kind} | ({StateKey("w", "exp_avg"): Kind.STATE} if is_whole else {})
    elements = {key: arbitrary_elements(shape, dtype, seed=number).tobytes() for number, key in enumerate(kinds)}
    tensors = {}
    for key in kinds:
        shard = Shard(Box.whole(shape), ByteRange(str(key), 0, len(elements[key])))
        tensors[key] = TensorEntry(shape, dtype, kinds[key], ShardTable.build(shape, dtype, [shard]))
    groups = (ParamGroup(("w",), {"lr": 0.1}),) if is_whole else ()
    store = MemoryStore({str(key): bytearray(data) for key, data in elements.items()})
    return StoredCheckpoint(Manifest(FORMAT, tensors, groups=groups), elements, store)
