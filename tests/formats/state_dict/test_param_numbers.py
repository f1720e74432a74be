"""Numbers of an optimizer and the parameters they are proven to mean, or not."""

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.core.boxes import Shape
from ckpt_tools.formats.state_dict.param_numbers import NumberedGroup, match_numbers

MODEL: dict[str, Shape] = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (3, 4), "b.bias": (3,)}


def shapes_of(*names: str) -> dict[int, Shape]:
    return {number: MODEL[name] for number, name in enumerate(names)}


def test_all_parameters_in_order():
    found = match_numbers([NumberedGroup((0, 1, 2, 3))], shapes_of(*MODEL), MODEL)
    assert found == dict(enumerate(MODEL))


def test_the_count_alone_decides_where_nothing_has_state():
    assert match_numbers([NumberedGroup((0, 1, 2, 3))], {}, MODEL) == dict(enumerate(MODEL))
    assert match_numbers([NumberedGroup((0, 1, 2))], {}, MODEL) is None


def test_groups_that_interleave():
    groups = [NumberedGroup((0, 1)), NumberedGroup((2, 3))]
    found = match_numbers(groups, shapes_of("a.weight", "b.weight", "a.bias", "b.bias"), MODEL)
    assert found == {0: "a.weight", 1: "b.weight", 2: "a.bias", 3: "b.bias"}


def test_an_order_that_is_not_the_models():
    assert (
        match_numbers([NumberedGroup((0, 1, 2, 3))], shapes_of("b.weight", "b.bias", "a.weight", "a.bias"), MODEL)
        is None
    )


def test_a_frozen_parameter_of_a_shape_of_its_own():
    found = match_numbers([NumberedGroup((0, 1))], shapes_of("a.weight", "b.bias"), MODEL)
    assert found == {0: "a.weight", 1: "b.bias"}


def test_a_frozen_parameter_that_could_be_the_trained_one():
    model: dict[str, Shape] = {"a": (4,), "b": (4,)}
    assert match_numbers([NumberedGroup((0,))], {0: (4,)}, model) is None


def test_two_groups_that_could_mean_each_others_parameters():
    model: dict[str, Shape] = {"a": (4,), "b": (4,)}
    assert match_numbers([NumberedGroup((0,)), NumberedGroup((1,))], {0: (4,), 1: (4,)}, model) is None


def test_statistics_of_a_batch_norm_are_no_choice():
    model: dict[str, Shape] = {"bn.weight": (4,), "bn.bias": (4,), "bn.running_mean": (4,), "bn.running_var": (4,)}
    assert match_numbers([NumberedGroup((0, 1))], {0: (4,), 1: (4,)}, model) == {0: "bn.weight", 1: "bn.bias"}


def test_names_that_the_optimizer_says():
    groups = [NumberedGroup((0, 1), ("b.bias", "a.weight"))]
    assert match_numbers(groups, {0: (3,), 1: (4, 3)}, MODEL) == {0: "b.bias", 1: "a.weight"}
    assert match_numbers(groups, {0: (4,), 1: (4, 3)}, MODEL) is None
    assert match_numbers([NumberedGroup((0,), ("c",))], {}, MODEL) is None
    assert match_numbers([NumberedGroup((0, 1), ("a.bias",))], {}, MODEL) is None


def test_a_number_in_two_groups_or_a_state_of_none():
    assert match_numbers([NumberedGroup((0,), ("a.bias",)), NumberedGroup((0,), ("b.bias",))], {}, MODEL) is None
    assert match_numbers([NumberedGroup((0, 1, 2, 3))], {**shapes_of(*MODEL), 4: (3,)}, MODEL) is None


@given(st.lists(st.sampled_from([(2,), (3,), (2, 3)]), max_size=7), st.data())
def test_what_is_found_is_what_the_optimizer_had(shapes, data):
    """Whatever is trained, in whatever groups of the model's order: the truth or nothing."""
    model = {f"p{number}": shape for number, shape in enumerate(shapes)}
    owners = data.draw(st.lists(st.integers(-1, 1), min_size=len(shapes), max_size=len(shapes)))
    order = [name for group in (0, 1) for name, owner in zip(model, owners, strict=True) if owner == group]
    numbers = {name: number for number, name in enumerate(order)}
    groups = [
        NumberedGroup(tuple(numbers[n] for n, owner in zip(model, owners, strict=True) if owner == group))
        for group in (0, 1)
    ]
    found = match_numbers(groups, {number: model[name] for name, number in numbers.items()}, model)
    assert found in (None, dict(enumerate(order)))
