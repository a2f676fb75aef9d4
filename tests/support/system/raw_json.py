"""Reads JSON as text: members and items as the very characters they were written with.

`json.loads` keeps the last of two members of one name and knows nothing of spaces; a check that
bytes survived must see both.
"""

import json

_decoder = json.JSONDecoder()


def members(text):
    """The members of an object, in order: [(name, raw value)], duplicates included."""
    found = []
    at = _open(text, "{")
    while text[at] != "}":
        name, at = _decoder.raw_decode(text, at)
        at = _expect(text, _space(text, at), ":")
        end = _decoder.raw_decode(text, at)[1]
        found.append((name, text[at:end]))
        at = _next(text, end, "}")
    return found


def items(text):
    """The items of an array, in order, raw."""
    found = []
    at = _open(text, "[")
    while text[at] != "]":
        end = _decoder.raw_decode(text, at)[1]
        found.append(text[at:end])
        at = _next(text, end, "]")
    return found


def member(text, name):
    """The one member of this name, raw; fails if there is none or more than one."""
    [value] = [value for own, value in members(text) if own == name]
    return value


def _space(text, at):
    while text[at] in " \t\r\n":
        at += 1
    return at


def _expect(text, at, character):
    assert text[at] == character, f"expected {character} at {at}: {text[at : at + 20]!r}"
    return _space(text, at + 1)


def _open(text, bracket):
    return _expect(text, _space(text, 0), bracket)


def _next(text, at, end):
    at = _space(text, at)
    return at if text[at] == end else _expect(text, at, ",")
