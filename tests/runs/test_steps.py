"""Which steps of a run are chosen, and where each goes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import UsageError
from ckpt_tools.runs.steps import DestinationTemplate, StepSelection

pytestmark = pytest.mark.quick

STEPS = st.lists(st.none() | st.integers(0, 40), max_size=12)


@given(
    found=STEPS,
    steps=st.lists(st.integers(0, 40), max_size=4),
    every=st.none() | st.integers(1, 9),
    last=st.none() | st.integers(1, 5),
)
def test_chosen_are_the_last_of_those_that_match_in_order(found, steps, every, last):
    chosen = StepSelection(tuple(steps), every, last).choose_items(list(enumerate(found)), lambda item: item[1])
    matching = [
        (number, step)
        for number, step in enumerate(found)
        if (step in steps or not steps) and (every is None or (step is not None and step % every == 0))
    ]
    assert all(item in matching for item in chosen)
    assert len(chosen) == min(len(matching), last or len(matching))
    in_order = [(-1 if step is None else step, number) for number, step in chosen]
    assert in_order == sorted(in_order)
    left_out = [-1 if step is None else step for number, step in matching if (number, step) not in chosen]
    assert max(left_out, default=-1) <= min((step for step, _ in in_order), default=40)


@pytest.mark.parametrize("bad", [{"steps": (-1,)}, {"steps": (True,)}, {"every": 0}, {"last": 0}, {"last": 1.5}])
def test_other_numbers_are_refused(bad):
    with pytest.raises(UsageError, match=rf"^{next(iter(bad))}=.* is not a number from"):
        StepSelection(**bad)


@pytest.mark.parametrize(
    ("text", "name", "filled"),
    [
        ("out/{step}", "a/checkpoint-7", "out/7"),
        ("s3://b/{name}.safetensors", "a/checkpoint-7", "s3://b/checkpoint-7.safetensors"),
        ("{name}/{step}/{step}", "epoch=1-step=7.ckpt", "epoch=1-step=7/7/7"),
        ("{name}", "step_1.5", "step_1.5"),
    ],
)
def test_a_template_is_filled(text, name, filled):
    assert DestinationTemplate(text).make_destination(7, name) == filled


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("out", "out is one place for all checkpoints; write {step} or {name} in it"),
        ("out/{epoch}", "out/{epoch}: {epoch} is neither {step} nor {name}"),
        ("out/{step}/{}", "{} is neither {step} nor {name}"),
    ],
)
def test_another_template_is_refused(text, said):
    with pytest.raises(UsageError) as error:
        DestinationTemplate(text)
    assert said in str(error.value)


def test_a_checkpoint_without_a_step_has_no_place_by_its_step():
    assert DestinationTemplate("{name}").make_destination(None, "epoch_3.pt") == "epoch_3"
    with pytest.raises(UsageError, match=r"epoch_3.pt says no step; write \{name\} instead of \{step\} in o/\{step\}"):
        DestinationTemplate("o/{step}").make_destination(None, "epoch_3.pt")
