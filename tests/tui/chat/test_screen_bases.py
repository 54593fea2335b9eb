"""Tests that the classes of the chat screen do not replace each other's methods by accident."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType

from cpuchat.tui.chat.screen import ChatScreen


def methods(of: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield the methods and properties that a class defines itself."""
    for name, value in vars(of).items():
        function = inspect.unwrap(value.fget if isinstance(value, property) and value.fget else value)
        if inspect.isfunction(function) and function.__module__ == of.__module__ and not name.startswith("__"):
            yield name, function


def test_no_base_of_the_chat_screen_replaces_a_method_of_another() -> None:
    bases = [base for base in ChatScreen.__mro__ if base.__module__.startswith("cpuchat.tui.chat.")]
    assert len(bases) > 5
    defined: dict[str, str] = {}
    for base in reversed(bases):
        for name, function in methods(base):
            is_handler = name.startswith(("on_", "_on_"))  # Textual calls that of each class
            calls_super = "__class__" in function.__code__.co_freevars
            where = f"{base.__name__}.{name} replaces that of {defined.get(name)}"
            assert name not in defined or is_handler or calls_super, where
            if "NotImplementedError" not in function.__code__.co_names:  # else it says what it needs
                defined[name] = base.__name__
