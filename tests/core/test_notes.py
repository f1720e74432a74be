"""One note for each item: the last step that handled it decides, and no loss is hidden."""

from __future__ import annotations

import pytest

from ckpt_tools.core.notes import Note, Outcome, merged, without_gone

pytestmark = pytest.mark.quick


def test_the_last_step_decides():
    kept, dropped = Note(Outcome.KEPT, "entry", "a"), Note(Outcome.DROPPED, "entry", "b")
    assert merged([kept, Note(Outcome.KEPT, "other", "c"), dropped]) == (dropped, Note(Outcome.KEPT, "other", "c"))


def test_a_loss_that_was_not_asked_for_stays_a_loss():
    dropped, made = Note(Outcome.DROPPED, "entry", "b"), Note(Outcome.DEFAULTED, "entry", "c")
    assert merged([dropped, made]) == (dropped,)
    assert merged([Note(Outcome.DROPPED, "entry", "b", asked=True), made]) == (made,)


def test_two_reasons_for_one_outcome_are_one_note():
    notes = [Note(Outcome.DROPPED, "entry", "a", asked=True), Note(Outcome.DROPPED, "entry", "b")]
    assert merged(notes) == (Note(Outcome.DROPPED, "entry", "a; b"),)
    assert merged([notes[0], notes[0]]) == (notes[0],)


def test_what_is_gone_was_not_kept():
    notes = (Note(Outcome.KEPT, "gone", "a"), Note(Outcome.KEPT, "here", "a"), Note(Outcome.KEPT, "the tree", "a"))
    assert without_gone(notes, {"gone", "here"}, {"here"}) == notes[1:]


def test_a_loader_that_does_not_restore_it_is_a_loss():
    assert [outcome for outcome in Outcome if Note(outcome, "x", "y").is_loss] == [Outcome.DROPPED, Outcome.NOT_LOADED]
    assert not Note(Outcome.DROPPED, "x", "y", asked=True).is_loss
