"""Rows of JSON: JSON lines, and arrays whose elements are parsed one by one, so that a broken one costs only itself.

JSON lines are read as they are asked for. What is wrong with a row comes out as a `Refused` in its place.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from capture.rows.chat import InputError, Refused, first_line

_SPACE = re.compile(r"[ \t\r\n]*")
# A string cannot hold a newline, so a quote too few or too many does its damage in its own line.
_BRACKET = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"|[\[\]{}]')
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: Path) -> Iterator[tuple[int, bytes | dict[str, Any] | Refused]]:
    """The rows with their 1-based lines; those of JSON lines are still bytes, for `parse_line`.

    Raises `InputError` for a file that is missing or empty and for an array that cannot be read on.
    """
    return _read_array(path) if _first_byte(path) == b"[" else _read_lines(path)


def open_file(path: Path) -> BufferedReader:
    """Open a file for its bytes. Raises `InputError` where it cannot be read."""
    try:
        return open(path, "rb")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _first_byte(path: Path) -> bytes:
    with open_file(path) as file:
        for raw in file:
            if text := raw.removeprefix(codecs.BOM_UTF8).strip():
                return text[:1]
    raise InputError(f"{path} is empty: give a file with at least one row")


def _read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open_file(path) as file:
        for number, raw in enumerate(file, start=1):
            raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if raw.strip():
                yield number, raw


def parse_line(raw: bytes) -> dict[str, Any] | Refused:
    """The row that a line holds."""
    raw = raw.rstrip(b" \t\r\n")  # else what is missing at the line's end is said to be missing in the next one
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return Refused(f"not UTF-8: byte 0x{raw[error.start]:02x} at byte {error.start + 1} of the line")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return Refused(f"not JSON: {error.msg}: column {error.colno}")
    except (ValueError, RecursionError) as error:
        return Refused(f"not JSON that can be read: {first_line(error)}")
    return _check_fields(value, text)


def _check_fields(value: Any, text: str) -> dict[str, Any] | Refused:
    if not isinstance(value, dict):
        return Refused(f"not an object but {kind_of(value)}: a row is an object with named columns")
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return Refused("half a surrogate pair (\\ud800 to \\udfff) stands alone: it is no text")
    return value


def _read_array(path: Path) -> Iterator[tuple[int, dict[str, Any] | Refused]]:
    """The elements of a JSON array, each parsed on its own so that a broken one costs only itself."""
    with open_file(path) as file:
        # Bytes that are not UTF-8 become lone surrogates, which the element that holds them is refused for.
        text = file.read().decode("utf-8-sig", errors="surrogateescape")
    position = _skip_space(text, _skip_space(text, 0) + 1)
    if text[position : position + 1] == "]":
        raise InputError(f"{path} is an empty array: give a file with at least one row")
    line, counted = 1, 0
    while True:
        line, counted = line + text.count("\n", counted, position), position
        fields, end = _parse_element(text, position, line)
        if end is None:
            raise InputError(f"{path}:{line}: {fields}; where this element ends cannot be told, so the array is lost")
        yield line, fields
        position = _skip_space(text, end)
        mark = text[position : position + 1]
        if mark == "]":
            break
        if mark != ",":
            found = repr(mark) if mark else "the end of the file"
            at = line + text.count("\n", counted, position)
            raise InputError(f"{path}:{at}: the array cannot be read on: ',' or ']' expected, {found} found")
        position = _skip_space(text, position + 1)
    rest = _skip_space(text, position + 1)
    if rest < len(text):
        at = line + text.count("\n", counted, rest)
        raise InputError(f"{path}:{at}: there is more after the end of the array; one array a file, or JSON lines")


def _parse_element(text: str, start: int, line: int) -> tuple[dict[str, Any] | Refused, int | None]:
    """The element at `start` and where it ends; None where that cannot be told."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return _broken_element(text, start, line, error)
    segment = text[start:end]
    try:
        segment.encode()
    except UnicodeEncodeError as error:
        return Refused(f"not UTF-8: byte 0x{ord(segment[error.start]) - 0xDC00:02x} in this element"), end
    return _check_fields(value, segment), end


def _broken_element(text: str, start: int, line: int, error: Exception) -> tuple[Refused, int | None]:
    reason = f"not JSON: {first_line(error)}"
    if isinstance(error, json.JSONDecodeError):
        reason = f"not JSON: {error.msg}: line {error.lineno} column {error.colno}"
    end = _closing_bracket(text, start)
    if end is not None:
        # Good elements can have been taken for part of this one: say how far it is taken to go.
        reason += f"; read on after line {line + text.count(chr(10), start, end)}"
    return Refused(reason), end


def _closing_bracket(text: str, start: int) -> int | None:
    """Where the object or array that opens at `start` has closed, going by brackets outside strings."""
    if text[start : start + 1] not in ("{", "["):
        return None
    depth = 0
    for match in _BRACKET.finditer(text, start):
        if match[0] in "[{":
            depth += 1
        elif match[0] in "]}":
            depth -= 1
            if depth == 0:
                return match.end()
    return None


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def kind_of(value: Any) -> str:
    """What JSON calls a value, in words."""
    names = {str: "a string", list: "a list", dict: "an object", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
