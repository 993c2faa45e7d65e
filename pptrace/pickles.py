"""Plain values out of a pickle; whatever would run code is refused by name.

A pickle is a program for a small stack machine, and some of its instructions import and
call things. This machine knows none of those: it builds numbers, strings, lists, tuples
and dictionaries, within limits that follow from the length of the data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

__all__ = ["PickleError", "loads"]

_SLACK = 10_000
"""Values of each sort that any pickle may make, however short it is."""
_BYTES_PER = {"value": 2, "number": 5, "string": 8, "list": 10, "dictionary": 48}
"""What one value costs at least in torch's own dumps, with room to spare: it keeps what
a pickle makes below ten times its length."""
_NUMBER_BYTES = 64
_DEPTH = 1000

_IMPORTS = frozenset({0x63, 0x69})  # GLOBAL, INST: module and name follow as lines
_STACK_IMPORT = 0x93  # STACK_GLOBAL: they are the last two values
_REFUSED = {
    0x52: "call", 0x81: "construct", 0x92: "construct", 0x62: "change the state of",
    0x6F: "construct", 0x50: "load", 0x51: "load", 0x82: "import", 0x83: "import",
    0x84: "import", 0x97: "load", 0x98: "load",
}  # fmt: skip
"""Instructions that act on something outside of the pickle, by what they would do."""


class PickleError(ValueError):
    """The pickle is damaged, too large for its length, or would run code."""


def loads(data: bytes) -> Any:
    """Build the value that a pickle of plain values describes.

    Parts that the pickle refers to several times are the same object, so a short pickle
    may describe a value that is huge when written out: look at it, never print it.

    Raises:
        PickleError: it is damaged, contains anything but plain values (then what it
            would import is named), or would need far more memory than its length.
    """
    return _Machine(data).run()


class _Machine:
    """The stack, the memo and what is left to spend."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.left = {
            sort: _SLACK + len(data) // size for sort, size in _BYTES_PER.items()
        }

    def run(self) -> Any:
        data, end, table, stack = self.data, len(self.data), _TABLE, self.stack
        most = self.left["value"]
        try:
            while self.at < end:
                code = data[self.at]
                self.at += 1
                action = table[code]
                if action is None:
                    if code == 0x2E:  # STOP
                        return self.result()
                    raise self.refusal(code)
                action(self)
                if len(stack) > most:
                    raise PickleError("makes more values than its length allows")
        except (IndexError, struct.error, UnicodeError, ValueError) as error:
            if isinstance(error, PickleError):
                raise
            raise self.damaged(str(error)) from None
        raise PickleError("is cut off")

    def result(self) -> Any:
        if len(self.stack) != 1 or self.marks:
            raise self.damaged("it leaves no single value")
        return self.stack[0]

    def refusal(self, code: int) -> PickleError:
        if code in _IMPORTS:
            lines = self.data[self.at : self.at + 512].split(b"\n")[:2]
            return _import_refused([part.decode("utf-8", "replace") for part in lines])
        if code == _STACK_IMPORT:
            return _import_refused([v for v in self.stack[-2:] if isinstance(v, str)])
        if code in _REFUSED:
            return PickleError(f"would {_REFUSED[code]} an object: refused, not run")
        return self.damaged(f"{code:#04x} is no instruction of a dump")

    def damaged(self, reason: str) -> PickleError:
        return PickleError(f"is damaged at byte {self.at}: {reason}")

    def spend(self, sort: str) -> None:
        left = self.left[sort] - 1
        if left < 0:
            raise PickleError(f"has more than one {sort} per {_BYTES_PER[sort]} bytes")
        self.left[sort] = left

    def take(self, count: int) -> bytes:
        start = self.at
        if count > len(self.data) - start:
            raise PickleError("is cut off")
        self.at = start + count
        return self.data[start : self.at]

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end]
        self.at = end + 1
        if len(text) > _NUMBER_BYTES:
            raise self.damaged("a number is too long")
        return text.decode("ascii").rstrip("L")

    def push_new(self, sort: str, value: Any) -> None:
        self.spend(sort)
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def pop(self, count: int) -> list[Any]:
        start = len(self.stack) - count
        if start < (self.marks[-1] if self.marks else 0):
            raise self.damaged("the stack is too short")
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def top(self, kind: type) -> Any:
        value = self.stack[-1]
        if type(value) is not kind:
            raise self.damaged(f"{kind.__name__} expected")
        return value

    def keep(self, index: int) -> None:
        if index > len(self.memo):  # every writer numbers them in order
            raise self.damaged(f"memo {index} comes before {len(self.memo)}")
        self.memo[index : index + 1] = [self.stack[-1]]


def _import_refused(parts: list[str]) -> PickleError:
    name = ".".join(parts)[:200] or "something"
    return PickleError(f"would import {name}: refused, nothing was run")


# -- instructions --------------------------------------------------------------------

_Action = Callable[[_Machine], None]


def _string(width: int) -> _Action:
    def act(machine: _Machine) -> None:
        text = machine.take(machine.number(width))
        machine.push_new("string", text.decode("utf-8", "surrogatepass"))

    return act


def _raw(width: int) -> _Action:
    return lambda m: m.push_new("string", m.take(m.number(width)))


def _long(width: int) -> _Action:
    def act(machine: _Machine) -> None:
        count = machine.number(width)
        if count > _NUMBER_BYTES:
            raise machine.damaged("a number is too long")
        value = int.from_bytes(machine.take(count), "little", signed=True)
        machine.push_new("number", value)

    return act


def _text_integer(machine: _Machine) -> None:
    text = machine.line()
    value = bool(int(text)) if text in {"00", "01"} else int(text)
    machine.push_new("number", value)


def _constant(value: Any) -> _Action:
    return lambda m: m.stack.append(value)


def _tuple(count: int) -> _Action:
    return lambda m: m.push_new("list", tuple(m.pop(count)))


def _append(machine: _Machine) -> None:
    (item,) = machine.pop(1)
    machine.top(list).append(item)


def _appends(machine: _Machine) -> None:
    items = machine.since_mark()
    machine.top(list).extend(items)


def _set_item(machine: _Machine) -> None:
    _update(machine, machine.pop(2))


def _set_items(machine: _Machine) -> None:
    _update(machine, machine.since_mark())


def _dictionary(machine: _Machine) -> None:
    items = machine.since_mark()
    machine.push_new("dictionary", {})
    _update(machine, items)


def _update(machine: _Machine, items: list[Any]) -> None:
    target = machine.top(dict)
    if len(items) % 2:
        raise machine.damaged("a key has no value")
    for i in range(0, len(items), 2):
        # Nothing else is a key of a dump; the hash of nested tuples may take for ever.
        if type(items[i]) not in {str, int}:
            raise machine.damaged("a key is neither a string nor a number")
        target[items[i]] = items[i + 1]


def _mark(machine: _Machine) -> None:
    machine.marks.append(len(machine.stack))
    if len(machine.marks) > _DEPTH:
        raise PickleError("is nested too deeply")


def _skip(count: int) -> _Action:
    def act(machine: _Machine) -> None:
        machine.take(count)

    return act


def _pop(machine: _Machine) -> None:
    machine.pop(1)


_ACTIONS: dict[int, _Action] = {
    0x80: _skip(1),  # the protocol's number
    0x95: _skip(8),  # a frame's length: all is in memory
    0x28: _mark,
    0x58: _string(4),
    0x8C: _string(1),
    0x8D: _string(8),
    0x54: _raw(4),
    0x55: _raw(1),
    0x42: _raw(4),
    0x43: _raw(1),
    0x8E: _raw(8),
    0x4A: lambda m: m.push_new("number", struct.unpack("<i", m.take(4))[0]),
    0x4B: lambda m: m.stack.append(m.number(1)),
    0x4D: lambda m: m.push_new("number", m.number(2)),
    0x8A: _long(1),
    0x8B: _long(4),
    0x47: lambda m: m.push_new("number", struct.unpack(">d", m.take(8))[0]),
    0x49: _text_integer,
    0x4C: lambda m: m.push_new("number", int(m.line())),
    0x46: lambda m: m.push_new("number", float(m.line())),
    0x71: lambda m: m.keep(m.number(1)),
    0x72: lambda m: m.keep(m.number(4)),
    0x94: lambda m: m.keep(len(m.memo)),
    0x70: lambda m: m.keep(int(m.line())),
    0x68: lambda m: m.stack.append(m.memo[m.number(1)]),
    0x6A: lambda m: m.stack.append(m.memo[m.number(4)]),
    0x67: lambda m: m.stack.append(m.memo[abs(int(m.line()))]),
    0x4E: _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    0x5D: lambda m: m.push_new("list", []),
    0x6C: lambda m: m.push_new("list", m.since_mark()),
    0x7D: lambda m: m.push_new("dictionary", {}),
    0x64: _dictionary,
    0x29: _constant(()),
    0x74: lambda m: m.push_new("list", tuple(m.since_mark())),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    0x61: _append,
    0x65: _appends,
    0x73: _set_item,
    0x75: _set_items,
    0x30: _pop,
}
_TABLE = [_ACTIONS.get(code) for code in range(256)]
