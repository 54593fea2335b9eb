"""Tests what a chat can be at, and what holds its backend meanwhile."""

from __future__ import annotations

import pytest

from cpuchat.base.errors import UsageError
from cpuchat.session.activity import Activity, ActivityOwner


def test_an_activity_ends_before_another_one_begins() -> None:
    owner = ActivityOwner()
    owner.change(Activity.LOADING)
    with pytest.raises(ValueError, match="cannot follow"):
        owner.change(Activity.ANSWERING)
    owner.change(Activity.NONE)
    owner.change(Activity.AWAITING_ROOM)
    assert not owner.now.runs
    owner.change(Activity.SUMMARIZING)
    owner.change(Activity.ANSWERING)  # the question that had no room
    assert owner.now.runs


def test_a_stop_that_comes_early_holds_for_the_stream_of_the_activity_and_no_longer() -> None:
    owner = ActivityOwner()
    owner.change(Activity.ANSWERING)
    owner.is_stopping = True
    with owner.streaming(Activity.ANSWERING):
        assert owner.is_stopping
    assert owner.now is Activity.ANSWERING
    owner.change(Activity.NONE)
    owner.change(Activity.MEASURING)
    assert not owner.is_stopping
    owner.is_stopping = True
    with owner.streaming(Activity.LOADING):  # a measurement loads more than once, and is stopped by itself
        assert not owner.is_stopping and owner.now is Activity.MEASURING


def test_one_stream_at_a_time_which_is_an_activity_where_there_is_none() -> None:
    owner = ActivityOwner()
    with owner.streaming(Activity.ANSWERING):
        assert owner.now.answers
        with pytest.raises(UsageError, match="still being loaded"), owner.streaming():
            pass
        with pytest.raises(UsageError):
            owner.refuse_while_answering()
    assert owner.now is Activity.NONE
    with owner.streaming():  # work for idle time gives way
        owner.change(Activity.LOADING)
    assert owner.now is Activity.LOADING


def test_an_answer_goes_on_after_an_approval_unless_it_has_ended() -> None:
    owner = ActivityOwner()
    owner.change(Activity.ANSWERING)
    with owner.awaiting_approval():
        assert owner.now is Activity.AWAITING_APPROVAL and owner.now.answers
    assert owner.now is Activity.ANSWERING
    with owner.awaiting_approval():
        owner.change(Activity.NONE)
    assert owner.now is Activity.NONE
