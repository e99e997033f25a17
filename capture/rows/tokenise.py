"""Input files -> token ids and loss mask, a row at a time.

A row is a chat (`messages`, `conversations`), a prompt and its response, or ids and mask that somebody else made.
What is wrong with a row comes out as a `BadRow` in its place; only what is wrong with the file, the tokenizer or the
options as a whole raises, as an `InputError`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from capture.rows import files, parallel
from capture.rows.chat import ChatTemplate, Encoded, InputError, Message, Refused, first_line, without_nulls
from capture.rows.files import Raw
from capture.rows.json_rows import kind_of, parse_line
from capture.rows.vocabulary import tokens_end

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
KNOWN_ROLES = frozenset({*ROLES.values(), "developer", "tool", "function", "ipython"})
COLUMNS = ("input_ids", "loss_mask", "messages", "conversations", "prompt", "response")
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
_TEXT_ONLY = "only text can be drawn yet; leave the row out, or keep its text alone"


class RowOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How rows are read. `max_length` is in tokens; `last_turn_only` leaves earlier assistant turns out of the mask.

    A row that brings its own `loss_mask` keeps it whatever `last_turn_only` says. `allow_ignored_roles` takes a chat
    template that renders every role alike.
    """

    prompt_column: str | None = None
    response_column: str | None = None
    max_length: int | None = None
    overlong: Literal["truncate", "skip"] = "skip"
    last_turn_only: bool = False
    allow_ignored_roles: bool = False

    def __post_init__(self) -> None:
        if (self.prompt_column is None) != (self.response_column is None):
            raise InputError("prompt_column and response_column go together: give both or neither")
        if self.max_length is not None and self.max_length < 1:
            raise InputError(f"max_length is {self.max_length}: it must be at least 1 token")


class Row(msgspec.Struct):
    """A good row: `ids` and `mask` (0 or 1 each) of the same length, at least one token.

    `alarms`: what is odd about it, by the names of `alarms.py`, each with what was seen.
    """

    file: str
    line: int
    ids: list[int]
    mask: list[int]
    truncated: bool
    alarms: dict[str, str] = {}


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


def token_digest(ids: bytes, mask: bytes) -> bytes:
    """16 bytes that tell samples of other tokens apart, made of the tokens as the token files hold them."""
    return hashlib.blake2b(ids + mask, digest_size=16).digest()


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
        return f"the tokenizer of {model} is code of the model's own: allow it with --trust-remote-code"
    return f"{model} has no tokenizer that transformers can load ({first_line(error)})"


def tokenise(
    path: str | Path, tokenizer: Any, options: RowOptions, vocab_size: int | None = None, workers: int = 1
) -> Iterator[Outcome]:
    """Every row of an input (see `files.py`), in its order.

    Lazy: nothing is opened before the first row is asked for, and all but a JSON array is read as it goes. Ids must be
    below `vocab_size`, the rows of the model's embedding (see `vocabulary.py`); by default the tokenizer must have
    them. Raises `InputError` for an input that is missing, empty or cannot be read on, and for a tokenizer without a
    chat template once a row needs one. More than one of `workers` are processes that share the work.
    """
    encoder = Encoder(tokenizer, options, vocab_size or tokens_end(tokenizer))
    rows = files.read(path, encoder.columns)
    return map(encoder, rows) if workers < 2 else parallel.ordered(encoder, rows, workers)


class Encoder:
    """Rows as they were read -> outcomes."""

    def __init__(self, tokenizer: Any, options: RowOptions, vocab_size: int) -> None:
        self.options, self.vocab_size = options, vocab_size
        self.template = ChatTemplate(tokenizer)
        self.bos = tokenizer.bos_token_id

    @property
    def columns(self) -> list[str]:
        """The columns that a row may be made of."""
        named = [name for name in (self.options.prompt_column, self.options.response_column) if name is not None]
        return [*(named or COLUMNS), "tools", *MEDIA_COLUMNS]

    def __call__(self, read: tuple[str, int, Raw]) -> Outcome:
        """What becomes of a row, whole or as far as it was read. Raises `InputError` for what concerns all rows."""
        file, line, raw = read
        alarms: dict[str, str] = {}
        try:
            fields = parse_line(raw) if isinstance(raw, bytes) else raw
            if isinstance(fields, Refused):
                raise fields
            ids, mask = self._encode(without_nulls(fields), alarms)
            self._check_ids(ids)
        except Refused as reason:
            return BadRow(file, line, str(reason))
        limit = self.options.max_length
        overlong = limit is not None and len(ids) > limit
        if overlong and self.options.overlong == "skip":
            return Skipped(file, line, len(ids))
        self._look_at(ids, mask, alarms)
        return Row(file, line, ids[:limit], mask[:limit], overlong, alarms)

    def _check_ids(self, ids: list[int]) -> None:
        if not ids:
            raise Refused("the row has no tokens")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            outside = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise Refused(f"token id {outside} is outside the vocabulary of {self.vocab_size}")

    def _look_at(self, ids: list[int], mask: list[int], alarms: dict[str, str]) -> None:
        if self.bos is not None and ids[:2] == [self.bos, self.bos]:
            alarms["bos_twice"] = f"token {self.bos} twice"
        limit = self.options.max_length
        if not any(mask):
            alarms["zero_mask"] = f"{len(ids):,} tokens"
        elif limit is not None and not any(mask[:limit]):
            alarms["mask_cut_off"] = f"the first is token {mask.index(1) + 1:,} of {len(ids):,}"

    def _encode(self, fields: dict[str, Any], alarms: dict[str, str]) -> Encoded:
        options = self.options
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
        for column in MEDIA_COLUMNS:
            if fields.get(column):
                raise Refused(f"column {column!r} holds media: {_TEXT_ONLY}")
        encoded = self.template.encode(chat, _tools(fields.get("tools")), options.last_turn_only)
        if self.template.ignores_roles:
            alarms["ignores_roles"] = f"{len(chat)} messages"
        for number, message in enumerate(chat, start=1):
            if message["role"] not in KNOWN_ROLES:
                alarms.setdefault("unknown_role", f"{message['role']!r:.60} in message {number}")
        empty, uncalled = self.template.textless(chat, options.last_turn_only)
        found = {"empty_turn": empty, "calls_left_out": uncalled, "special_from_text": self.template.special_in(chat)}
        alarms |= {name: seen for name, seen in found.items() if seen}
        return encoded


# ---- fields -> ids and mask


def _unknown_shape(fields: dict[str, Any]) -> str:
    if not fields:
        return "the object is empty"
    if "input_ids" in fields:
        return "input_ids without loss_mask: give both, or text"
    keys = ", ".join(map(repr, fields))
    return f"no chat among the keys {keys}: name the columns with --prompt-column and --response-column"


def _given_ids(ids: Any, mask: Any) -> Encoded:
    for name, values in (("input_ids", ids), ("loss_mask", mask)):
        if not isinstance(values, list):
            raise Refused(f"{name} is {kind_of(values)}, not a list of integers")
    if len(ids) != len(mask):
        raise Refused(f"input_ids has {len(ids)} entries and loss_mask {len(mask)}: they must be as many")
    for index, value in enumerate(ids):
        if type(value) is not int:
            raise Refused(f"input_ids[{index}] is {kind_of(value)}, not an integer")
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
            raise Refused(f"column {column!r} is {kind_of(fields[column])}, not a string")
        messages.append({"role": role, "content": fields[column]})
    return messages


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):  # as tables keep schemas that are not all alike
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise Refused(f"tools is a string that is not JSON: {first_line(error)}") from error
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused("tools is not a list of objects (JSON schemas)")
    return tools or None


def _chat(messages: Any, column: str) -> list[Message]:
    if not isinstance(messages, list):
        raise Refused(f"{column} is {kind_of(messages)}, not a list of messages")
    if not messages:
        raise Refused(f"{column} is an empty list")
    return [_message(message, number) for number, message in enumerate(messages, start=1)]


def _message(message: Any, number: int) -> Message:
    """One message as the chat template wants it: `role`, `content` and whatever else it came with."""
    if not isinstance(message, dict):
        raise Refused(f"message {number} is {kind_of(message)}, not an object")
    named: Message = without_nulls(message)
    if "role" not in named and "from" in named:
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
        raise Refused(f"the content of message {number} is {kind_of(content)}, not a string")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise Refused(f"a content part of message {number} is not an object with a type")
        if kind != "text":
            raise Refused(f"content part {kind!r} in message {number}: {_TEXT_ONLY}")
        if not isinstance(part.get("text"), str):
            raise Refused(f"a text part of message {number} has no text")
