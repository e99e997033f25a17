"""Input files -> token ids and loss mask, a row at a time.

A row is a chat (`messages`, `conversations`), a prompt and its response, or ids and mask that somebody else made.
What is wrong with a row comes out as a `BadRow` in its place; only what is wrong with the file, the tokenizer or the
options as a whole raises, as an `InputError`.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from capture.chat import ChatTemplate, Encoded, InputError, Message, Refused, first_line

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "system": "system",
}
"""ShareGPT's `from` -> role."""


class RowOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How rows are read. `max_length` is in tokens; `last_turn_only` leaves earlier assistant turns out of the mask.

    A row that brings its own `loss_mask` keeps it whatever `last_turn_only` says.
    """

    prompt_column: str | None = None
    response_column: str | None = None
    max_length: int | None = None
    overlong: Literal["truncate", "skip"] = "skip"
    last_turn_only: bool = False

    def __post_init__(self) -> None:
        if (self.prompt_column is None) != (self.response_column is None):
            raise InputError("prompt_column and response_column go together: give both or neither")
        if self.max_length is not None and self.max_length < 1:
            raise InputError(f"max_length is {self.max_length}: it must be at least 1 token")


class Row(msgspec.Struct):
    """A good row: `ids` and `mask` (0 or 1 each) of the same length, at least one token."""

    file: str
    line: int
    ids: list[int]
    mask: list[int]
    truncated: bool


class BadRow(msgspec.Struct):
    """A row that cannot be used; `reason` says what to do about it."""

    file: str
    line: int
    reason: str


class Skipped(msgspec.Struct):
    """A good row that is longer than `max_length`; `tokens` is its whole length."""

    file: str
    line: int
    tokens: int


Outcome: TypeAlias = Row | BadRow | Skipped


def load_tokenizer(model: str | Path, trust_remote_code: bool = False) -> Any:
    """The transformers tokenizer of a model folder, or of a model in the local Hugging Face cache.

    Nothing is downloaded. Raises `InputError` where there is none. That it has a chat template is asked only once a
    row needs one.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(model), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # whatever a model's files, or its own code, come up with
        raise InputError(_why_no_tokenizer(Path(model), trust_remote_code, error)) from error
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        # Some classes make an empty tokenizer out of a folder that has a config.json and no vocabulary.
        raise InputError(f"{model} has no tokenizer files: copy the model's tokenizer into it")
    return tokenizer


def _why_no_tokenizer(model: Path, trust_remote_code: bool, error: Exception) -> str:
    if not model.is_dir():
        return f"{model}: no such model folder, nor a model of that name in the local Hugging Face cache"
    config = model / "tokenizer_config.json"
    if not trust_remote_code and config.is_file() and b'"auto_map"' in config.read_bytes():
        return f"the tokenizer of {model} is code of the model's own: allow it with trust_remote_code"
    return f"{model} has no tokenizer that transformers can load ({first_line(error)})"


def read_hash(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex. Raises `InputError` where it cannot be read."""
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokenise(path: str | Path, tokenizer: Any, options: RowOptions, vocab_size: int | None = None) -> Iterator[Outcome]:
    """Every row of a JSONL file or JSON array, in the file's order.

    Lazy: nothing is opened before the first row is asked for, and JSONL is read as it goes. Ids must be below
    `vocab_size`, the rows of the model's embedding; by default below the tokenizer's own size. Raises `InputError`
    for a file that is missing or empty, an array that cannot be read on, and a tokenizer without a chat template once
    a row needs one.
    """
    file = str(path)
    vocab_size = vocab_size or len(tokenizer)
    template = ChatTemplate(tokenizer)
    for line, fields in _read(path):
        try:
            if isinstance(fields, Refused):
                raise fields
            ids, mask = _encode(fields, template, options)
            _check_ids(ids, vocab_size)
        except Refused as reason:
            yield BadRow(file, line, str(reason))
            continue
        limit = options.max_length
        overlong = limit is not None and len(ids) > limit
        if overlong and options.overlong == "skip":
            yield Skipped(file, line, len(ids))
        else:
            yield Row(file, line, ids[:limit], mask[:limit], overlong)


def _check_ids(ids: list[int], vocab_size: int) -> None:
    if not ids:
        raise Refused("the row has no tokens")
    if min(ids) < 0 or max(ids) >= vocab_size:
        outside = next(i for i in ids if not 0 <= i < vocab_size)
        raise Refused(f"token id {outside} is outside the vocabulary of {vocab_size}")


# ---- files -> (line, fields)

_Read: TypeAlias = Iterator[tuple[int, dict[str, Any] | Refused]]

_SPACE = re.compile(r"[ \t\r\n]*")
# A string cannot hold a newline, so a quote too few or too many does its damage in its own line.
_BRACKET = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"|[\[\]{}]')
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _read(path: str | Path) -> _Read:
    """The rows with their 1-based lines; a `Refused` in a row's place says why there is none."""
    return _read_array(path) if _first_byte(path) == b"[" else _read_lines(path)


def _open(path: str | Path) -> BufferedReader:
    try:
        return open(path, "rb")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _first_byte(path: str | Path) -> bytes:
    with _open(path) as file:
        for raw in file:
            if text := raw.removeprefix(codecs.BOM_UTF8).strip():
                return text[:1]
    raise InputError(f"{path} is empty: give a file with at least one row")


def _read_lines(path: str | Path) -> _Read:
    with _open(path) as file:
        for number, raw in enumerate(file, start=1):
            raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if raw.strip():
                yield number, _parse_line(raw)


def _parse_line(raw: bytes) -> dict[str, Any] | Refused:
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
        return Refused(f"not an object but {_kind(value)}: a row is an object with named columns")
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return Refused("half a surrogate pair (\\ud800 to \\udfff) stands alone: it is no text")
    return value


def _read_array(path: str | Path) -> _Read:
    """The elements of a JSON array, each parsed on its own so that a broken one costs only itself."""
    with _open(path) as file:
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


# ---- fields -> ids and mask


def _encode(fields: dict[str, Any], template: ChatTemplate, options: RowOptions) -> Encoded:
    if options.prompt_column is not None and options.response_column is not None:
        chat = _prompt_and_response(fields, options.prompt_column, options.response_column)
    elif "input_ids" in fields and "loss_mask" in fields:
        return _given_ids(fields["input_ids"], fields["loss_mask"])
    elif "messages" in fields:
        chat = _chat(fields["messages"], "messages")
    elif "conversations" in fields:
        chat = _chat(fields["conversations"], "conversations")
    elif "prompt" in fields and "response" in fields:
        chat = _prompt_and_response(fields, "prompt", "response")
    else:
        raise Refused(_unknown_shape(fields))
    return template.encode(chat, _tools(fields.get("tools")), options.last_turn_only)


def _unknown_shape(fields: dict[str, Any]) -> str:
    if not fields:
        return "the object is empty"
    if "input_ids" in fields:
        return "input_ids without loss_mask: give both, or text"
    keys = ", ".join(map(repr, fields))
    return f"no chat among the keys {keys}: name the columns with prompt_column and response_column"


def _given_ids(ids: Any, mask: Any) -> Encoded:
    for name, values in (("input_ids", ids), ("loss_mask", mask)):
        if not isinstance(values, list):
            raise Refused(f"{name} is {_kind(values)}, not a list of integers")
    if len(ids) != len(mask):
        raise Refused(f"input_ids has {len(ids)} entries and loss_mask {len(mask)}: they must be as many")
    for index, value in enumerate(ids):
        if type(value) is not int:
            raise Refused(f"input_ids[{index}] is {_kind(value)}, not an integer")
    for index, value in enumerate(mask):
        if type(value) not in (int, bool) or value not in (0, 1):
            raise Refused(f"loss_mask[{index}] is {json.dumps(value)[:40]}: it must be 0 or 1")
    return ids, [int(value) for value in mask]


def _prompt_and_response(fields: dict[str, Any], prompt: str, response: str) -> list[Message]:
    messages = []
    for column, role in ((prompt, "user"), (response, "assistant")):
        if column not in fields:
            raise Refused(f"no column {column!r}; the row has {', '.join(map(repr, fields)) or 'none'}")
        if not isinstance(fields[column], str):
            raise Refused(f"column {column!r} is {_kind(fields[column])}, not a string")
        messages.append({"role": role, "content": fields[column]})
    return messages


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused("tools is not a list of objects (JSON schemas)")
    return tools or None


def _chat(messages: Any, column: str) -> list[Message]:
    if not isinstance(messages, list):
        raise Refused(f"{column} is {_kind(messages)}, not a list of messages")
    if not messages:
        raise Refused(f"{column} is an empty list")
    return [_message(message, number) for number, message in enumerate(messages, start=1)]


def _message(message: Any, number: int) -> Message:
    """One message as the chat template wants it: `role`, `content` and whatever else it came with."""
    if not isinstance(message, dict):
        raise Refused(f"message {number} is {_kind(message)}, not an object")
    named: Message = message
    if "role" not in message and "from" in message:
        named = {"role": _role(message["from"], number), "content": message.get("value")}
    if not isinstance(named.get("role"), str):
        raise Refused(f"message {number} has no role: it needs role and content, or from and value")
    _check_content(named, number)
    return named


def _role(speaker: Any, number: int) -> str:
    role = ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise Refused(f"message {number} is from {speaker!r:.60}, who is not known; known are {', '.join(ROLES)}")
    return role


def _check_content(message: Message, number: int) -> None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if content is None:
        raise Refused(f"message {number} ({message['role']}) has no content")
    if not isinstance(content, list):
        raise Refused(f"the content of message {number} is {_kind(content)}, not a string")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise Refused(f"a content part of message {number} is not an object with a type")
        if kind != "text":
            what = "images cannot be drawn yet" if "image" in kind else "only text can be drawn yet"
            raise Refused(f"content part {kind!r} in message {number}: {what}")
        if not isinstance(part.get("text"), str):
            raise Refused(f"a text part of message {number} has no text")


def _kind(value: Any) -> str:
    names = {str: "a string", list: "a list", dict: "an object", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
