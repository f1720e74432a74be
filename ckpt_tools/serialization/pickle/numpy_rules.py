"""Rules of the closed list for what numpy and joblib pickle: dtypes, arrays and their subclasses, random generators.

The number of bytes of an array must be that of its shape and dtype, and a dtype must say the same in its code and its
state. A structured dtype has no field of objects, so that no bytes of a file become pointers.
"""

from __future__ import annotations

from math import prod

from ckpt_tools.core.values import GlobalRef, Opaque, Value
from ckpt_tools.serialization.pickle.machine import JOBLIB_ARRAY
from ckpt_tools.serialization.pickle.shapes import (
    BOOL,
    BYTES,
    FLOAT,
    INT,
    NATURALS,
    NO_ARGUMENTS,
    NOTHING,
    STR,
    NameRule,
    ValueShape,
    charge_items,
    equal_to,
    fields,
    global_name,
    made_by,
    one_of,
    row,
    string_matching,
    tuple_of,
    with_text,
)

DTYPE = GlobalRef("numpy", "dtype")
JOBLIB_ALIGNMENT = 16
"""joblib before 1.2 aligned nothing; later ones align elements to this."""

MAX_FIELDS = 256
"""Fields of a structured dtype: a pickle may refer to them again for every dtype that it makes."""

_CODE = string_matching("the code of a plain dtype ('f4', 'U3', 'O8')", r"[biufc]\d{1,2}|[SUV]\d{1,9}|[mM]8|O8?")
_RECORD = global_name("numpy.record", "numpy.core.records.record")
_COPIED = equal_to(True) | equal_to(1)
_ORDER = one_of("<", ">", "|", "=")
_UNIT = row(fields() | NOTHING, row(BYTES, INT, INT, INT))
_USUAL = (INT, _ORDER, NOTHING, NOTHING, NOTHING, INT, INT, INT)
_ALIGNMENTS = (1, 2, 4, 8, 16)
_NEEDS_INIT, _STRUCT_FLAGS = 8, 8 | 16 | 128
"""NPY_NEEDS_INIT; with NPY_NEEDS_PYAPI and NPY_ALIGNED_STRUCT. No flag of these says that there are objects."""


def _is_dtype(value: Value) -> bool:
    return type(value) is Opaque and value.ref == DTYPE and value.form == "call" and bool(value.args)


def _is_object_dtype(dtype: Value) -> bool:
    return _is_dtype(dtype) and type(dtype.args[0]) is str and dtype.args[0][:1] == "O"


def get_item_bytes(dtype: Value) -> int | None:
    """Bytes of an element; None for objects, and for a value that is not a dtype.

    The dtype is judged by itself (``is_consistent_dtype``).
    """
    if not _is_dtype(dtype) or _is_object_dtype(dtype):
        return None
    code, state = dtype.args[0], dtype.state
    if _CODE.accepts(code):
        return int(code[1:]) * (4 if code[0] == "U" else 1)
    is_record_dtype = _RECORD.accepts(code) and type(state) is tuple and len(state) == 8 and type(state[5]) is int
    return state[5] if is_record_dtype and state[5] >= 0 else None


def is_consistent_dtype(dtype: Opaque) -> bool:
    """True if the state of a dtype agrees with its code, and its fields lie within it."""
    code, state = dtype.args[0], dtype.state
    if state is None:
        return type(code) is str
    # numpy/_core/src/multiarray/descriptor.c: (3, byte order, subdtype, names, fields, bytes, alignment, flags).
    # A plain dtype has no subdtype, names and fields; a subarray a subdtype alone; a struct names and fields.
    order, subdtype, names, fields_by_name, size, alignment, flags = state[1:8]
    if subdtype is None and names is None and fields_by_name is None:
        return type(code) is str and _is_plain_state(code, size, alignment, flags)
    is_void = order == "|" and alignment in _ALIGNMENTS and size == get_item_bytes(dtype)
    if not is_void or (type(code) is str and code[0] != "V") or flags & ~_STRUCT_FLAGS:
        return False
    if subdtype is not None:
        is_only_subarray = names is None and fields_by_name is None and type(code) is str
        return is_only_subarray and _is_subarray(subdtype, size)
    return _are_fields_within(names, fields_by_name, size)


def _is_plain_state(code: str, size: int, alignment: int, flags: int) -> bool:
    if code[0] in "SUV":
        wide = int(code[1:]) * (4 if code[0] == "U" else 1)
        return size == wide and alignment in (1, 4) and flags in (0, _NEEDS_INIT)
    return (size, alignment) == (-1, -1) and flags == (63 if code[0] == "O" else 0)


def _is_subarray(subdtype: Value, size: int) -> bool:
    if type(subdtype) is not tuple or len(subdtype) != 2 or type(subdtype[1]) is not tuple:
        return False
    num_bytes = get_item_bytes(subdtype[0])
    return num_bytes is not None and NATURALS.accepts(subdtype[1]) and num_bytes * prod(subdtype[1]) == size


def _are_fields_within(names: Value, fields_by_name: Value, size: int) -> bool:
    """Each field is a dtype without objects and an offset, within ``size`` bytes. Titles are not read.

    The check of a field takes as long as that of 16 other items.
    """
    if type(fields_by_name) is not dict or type(names) is not tuple or len(names) > MAX_FIELDS:
        return False
    are_strings = tuple_of(STR).accepts(names)
    is_named = are_strings and len(fields_by_name) == len(names) and fields_by_name.keys() == set(names)
    return is_named and all(_is_field_within(field, size) for field in charge_items(fields_by_name, weight=16).values())


def _is_field_within(field: Value, size: int) -> bool:
    if not row(made_by(str(DTYPE)), INT).accepts(field):
        return False
    num_bytes = get_item_bytes(field[0])
    return num_bytes is not None and 0 <= field[1] <= size - num_bytes


def _is_dtype_state(state: Value) -> bool:
    """Sizes, flags and fields must follow from the code; ``is_consistent_dtype`` compares them."""
    if row(*_USUAL, _UNIT).accepts(state):
        return bool(state[0] == 4)
    is_state = type(state) is tuple and len(state) == 8 and state[0] == 3
    return is_state and row(INT, _ORDER).accepts(state[:2]) and row(INT, INT, INT).accepts(state[5:])


def _is_array_state(state: Value) -> bool:
    if type(state) is not tuple or len(state) != 5 or state[0] != 1 or not NATURALS.accepts(state[1]):
        return False
    _, shape, dtype, fortran, data = state
    if type(fortran) is not bool and type(fortran) is not int:
        return False
    if _is_object_dtype(dtype):
        return type(data) is list and len(data) == prod(shape)
    return type(data) is bytes and _has_elements_of(data, dtype, shape)


def _has_elements_of(data: bytes | bytearray, dtype: Value, shape: Value) -> bool:
    """True if ``data`` has exactly the bytes of an array of this dtype and shape."""
    num_bytes = get_item_bytes(dtype)
    return num_bytes is not None and NATURALS.accepts(shape) and len(data) == prod(shape) * num_bytes


def _is_masked_state(state: Value) -> bool:
    """The state of an array, with a byte of mask for each element and a value that fills gaps."""
    if type(state) is not tuple or len(state) != 7 or not _is_array_state(state[:5]) or _is_object_dtype(state[2]):
        return False
    mask, fill = state[5:]
    is_plain = type(state[2].args[0]) is str and state[2].args[0][0] != "V"
    return is_plain and type(mask) is bytes and len(mask) == prod(state[1]) and (NOTHING | ARRAY).accepts(fill)


def _is_scalar_call(args: Value) -> bool:
    is_pair = type(args) is tuple and len(args) == 2 and type(args[1]) is bytes
    return is_pair and _has_elements_of(args[1], args[0], ())


def _is_buffer_call(args: Value) -> bool:
    if type(args) is not tuple or len(args) != 4 or type(args[0]) not in (bytes, bytearray):
        return False
    data, dtype, shape, order = args
    return _has_elements_of(data, dtype, shape) and order in ("C", "F")


ARRAY = with_text("array of numpy", made_by(
    "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.core.numeric._frombuffer",
    "numpy._core.numeric._frombuffer", str(JOBLIB_ARRAY),
))  # fmt: skip


def _int_up_to(most: int) -> ValueShape:
    return ValueShape(f"int up to {most}", lambda value: type(value) is int and 0 <= value <= most)


_BIT_GENERATORS = (
    "numpy.random._mt19937.MT19937", "numpy.random._pcg64.PCG64", "numpy.random._pcg64.PCG64DXSM",
    "numpy.random._philox.Philox", "numpy.random._sfc64.SFC64",
)  # fmt: skip
_BIT_GENERATOR_NAMES = one_of("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_GENERATOR_STATE = with_text(
    "numbers and arrays of the generator",
    fields(
        bit_generator=_BIT_GENERATOR_NAMES,
        state=fields(key=ARRAY, pos=_int_up_to(624))
        | fields(state=INT, inc=INT)
        | fields(counter=ARRAY, key=ARRAY)
        | fields(state=ARRAY),
        buffer=ARRAY,
        buffer_pos=_int_up_to(4),
        has_uint32=INT,
        uinteger=INT,
        has_gauss=INT,
        gauss=FLOAT,
    ),
)
_SEED_SEQUENCE = made_by("numpy.random.bit_generator.__pyx_unpickle_SeedSequence")
_BIT_GENERATOR = made_by("numpy.random._pickle.__bit_generator_ctor")

_SUBCLASSES = {
    "numpy": "matrix memmap recarray chararray record",
    "numpy.matrixlib.defmatrix": "matrix",
    "numpy.core.memmap": "memmap",
    "numpy.rec": "recarray",
    "numpy.core.records": "recarray record",
    "numpy.char": "chararray",
    "numpy.core.defchararray": "chararray",
    "numpy.ma numpy.ma.core": "MaskedArray",
}
"""Subclasses of ndarray by the modules that numpy has named since 1.13: none of them has a hook of its own that reads
more than the state of an array."""

_ARRAY_CLASSES = with_text(
    "numpy.ndarray or a subclass of it in numpy",
    global_name(
        "numpy.ndarray",
        *(
            f"{module}.{each}"
            for modules, names in _SUBCLASSES.items()
            for module in modules.split()
            for each in names.split()
            if each not in ("record", "MaskedArray")
        ),
    ),
)
_MASKED = global_name("numpy.ma.MaskedArray", "numpy.ma.core.MaskedArray")
_MATRIX = global_name("numpy.ndarray", "numpy.matrix", "numpy.matrixlib.defmatrix.matrix")

JOBLIB_STATE = fields(
    subclass=_ARRAY_CLASSES,
    shape=ValueShape("tuple of ints", lambda value: type(value) is tuple and NATURALS.accepts(value)),
    order=one_of("C", "F"),
    dtype=made_by(str(DTYPE)),
    allow_mmap=BOOL,
    numpy_array_alignment_bytes=equal_to(JOBLIB_ALIGNMENT) | NOTHING,
)
"""Attributes of joblib's ``NumpyArrayWrapper``."""

_SPARSE_FORMATS = "csr csc coo bsr dia"
_SPARSE_STATE = with_text("its shape, its arrays and bools", fields(
    _shape=NATURALS, maxprint=INT | NOTHING, data=ARRAY, indices=ARRAY, indptr=ARRAY, offsets=ARRAY,
    coords=row(ARRAY) | row(ARRAY, ARRAY) | row(ARRAY, ARRAY, ARRAY),
    row=ARRAY, col=ARRAY, has_canonical_format=BOOL, _has_canonical_format=BOOL,
    _has_sorted_indices=BOOL, has_sorted_indices=BOOL, _index_dtype=made_by(str(DTYPE)),
))  # fmt: skip

RULES: tuple[NameRule, ...] = (
    NameRule("numpy",
         "ndarray bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 longdouble "
         "complex64 complex128 str_ bytes_ void datetime64 timedelta64", "a name by itself: the type of a value"),
    *(NameRule(modules, names, "a name by itself: a class of arrays") for modules, names in _SUBCLASSES.items()),
    NameRule("numpy", "dtype",
         "a plain dtype or one of fields without objects; its state must say the same as its code",
         call=(row(_CODE, BOOL | INT, BOOL | INT), row(_RECORD, BOOL | INT, _COPIED)),
         state=ValueShape("byte order, sizes and fields", _is_dtype_state)),
    NameRule("numpy.core.multiarray numpy._core.multiarray", "_reconstruct",
         "an empty array; its state has exactly the bytes of its shape and dtype, or one object for each element",
         call=(row(_ARRAY_CLASSES, row(equal_to(0)), equal_to(b"b")),),
         state=ValueShape("(1, shape, dtype, bool, bytes or list)", _is_array_state)),
    NameRule("numpy.core.multiarray numpy._core.multiarray", "scalar", "a plain dtype and the bytes of one element",
         call=(ValueShape("(dtype, bytes)", _is_scalar_call),)),
    NameRule("numpy.core.numeric numpy._core.numeric", "_frombuffer",
         "an array over bytes of the pickle, exactly as many",
         call=(ValueShape("(bytes, dtype, shape, 'C' or 'F')", _is_buffer_call),)),
    NameRule("numpy.ma.core", "_mareconstruct",
         "the same with a mask, a byte for each element, and a value that fills it",
         call=(row(_MASKED, _MATRIX, row(equal_to(0)), equal_to("b")),),
         state=ValueShape("(1, shape, dtype, bool, bytes, bytes, array or None)", _is_masked_state)),
    NameRule("numpy.ma.core numpy.ma", "MaskedConstant", "numpy.ma.masked", call=(NO_ARGUMENTS,)),
    NameRule("numpy.random._pickle", "__randomstate_ctor __generator_ctor", "a random generator",
         call=(row(_BIT_GENERATOR), row(_BIT_GENERATOR_NAMES), row(_BIT_GENERATOR_NAMES,
              global_name("numpy.random._pickle.__bit_generator_ctor"))), state=_GENERATOR_STATE),
    NameRule("numpy.random._pickle", "__bit_generator_ctor", "makes one of five classes of numpy",
         call=(row(global_name(*_BIT_GENERATORS)), row(_BIT_GENERATOR_NAMES)),
         state=_GENERATOR_STATE | row(_GENERATOR_STATE, _SEED_SEQUENCE | NOTHING)),
    NameRule("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence", "numbers of a seed",
         call=(row(global_name("numpy.random.bit_generator.SeedSequence"), INT, NOTHING),),
         state=row(INT | NOTHING, INT, ARRAY, INT, tuple_of(INT))),
    NameRule("numpy.random.bit_generator", "SeedSequence", "a name by itself"),
    *(NameRule(*each.rpartition(".")[::2], "a name by itself") for each in _BIT_GENERATORS),
    NameRule(JOBLIB_ARRAY.module, JOBLIB_ARRAY.name, "an array of joblib.dump, whose bytes follow in the file",
         new=(NO_ARGUMENTS,), state=JOBLIB_STATE),
    *(NameRule(f"scipy.sparse._{form} scipy.sparse.{form}", f"{form}_matrix {form}_array",
         "arrays and a shape; they cannot be hooks", new=(NO_ARGUMENTS, ),
         state=_SPARSE_STATE) for form in _SPARSE_FORMATS.split()),
)  # fmt: skip
"""A part of the list in ``closed_list``."""
