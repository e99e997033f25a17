"""Input files -> token ids and loss mask, a row at a time.

A row is a chat (`messages`, `conversations`), a prompt and its response, or ids and mask that somebody else made.
What is wrong with a row comes out as a `BadRow` in its place; only what is wrong with the file, the tokenizer or the
options as a whole raises, as an `InputError`.

The mask covers what the assistant wrote: from the end of the generation prompt through the end-of-turn token. A chat
template that marks it with `{% generation %}` is taken at its word. With any other, the chat up to each assistant
turn and through it is rendered and must tokenise to a prefix of the whole chat's ids: what the model would have been
given, then what it would have said. A row for which that does not hold is refused, not guessed at.
"""

from __future__ import annotations

import bisect
import codecs
import functools
import hashlib
import json
import re
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

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


_REMEDY = "use a chat template that marks the assistant's text with {% generation %}"


class InputError(ValueError):
    """An input file, tokenizer or option that cannot be used at all; the sentence says why and what to do."""

    exit_code: ClassVar[int] = 2


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
Encoded: TypeAlias = tuple[list[int], list[int]]
Message: TypeAlias = dict[str, Any]


class _Refused(Exception):
    """The reason for which one row is bad."""


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
    return f"{model} has no tokenizer that transformers can load ({_first_line(error)})"


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
    template = _ChatTemplate(tokenizer)
    for line, fields in _read(path):
        try:
            if isinstance(fields, _Refused):
                raise fields
            ids, mask = _encode(fields, template, options)
            _check_ids(ids, vocab_size)
        except _Refused as reason:
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
        raise _Refused("the row has no tokens")
    if min(ids) < 0 or max(ids) >= vocab_size:
        outside = next(i for i in ids if not 0 <= i < vocab_size)
        raise _Refused(f"token id {outside} is outside the vocabulary of {vocab_size}")


# ---- files -> (line, fields)

_Read: TypeAlias = Iterator[tuple[int, dict[str, Any] | _Refused]]

_SPACE = re.compile(r"[ \t\r\n]*")
# A string cannot hold a newline, so a quote too few or too many does its damage in its own line.
_BRACKET = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"|[\[\]{}]')
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _read(path: str | Path) -> _Read:
    """The rows with their 1-based lines; a `_Refused` in a row's place says why there is none."""
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


def _parse_line(raw: bytes) -> dict[str, Any] | _Refused:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return _Refused(f"not UTF-8: byte 0x{raw[error.start]:02x} at byte {error.start + 1} of the line")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return _Refused(f"not JSON: {error.msg}: column {error.colno}")
    except (ValueError, RecursionError) as error:
        return _Refused(f"not JSON that can be read: {_first_line(error)}")
    return _check_fields(value, text)


def _check_fields(value: Any, text: str) -> dict[str, Any] | _Refused:
    if not isinstance(value, dict):
        return _Refused(f"not an object but {_kind(value)}: a row is an object with named columns")
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return _Refused("half a surrogate pair (\\ud800 to \\udfff) stands alone: it is no text")
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


def _parse_element(text: str, start: int, line: int) -> tuple[dict[str, Any] | _Refused, int | None]:
    """The element at `start` and where it ends; None where that cannot be told."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return _broken_element(text, start, line, error)
    segment = text[start:end]
    try:
        segment.encode()
    except UnicodeEncodeError as error:
        return _Refused(f"not UTF-8: byte 0x{ord(segment[error.start]) - 0xDC00:02x} in this element"), end
    return _check_fields(value, segment), end


def _broken_element(text: str, start: int, line: int, error: Exception) -> tuple[_Refused, int | None]:
    reason = f"not JSON: {_first_line(error)}"
    if isinstance(error, json.JSONDecodeError):
        reason = f"not JSON: {error.msg}: line {error.lineno} column {error.colno}"
    end = _closing_bracket(text, start)
    if end is not None:
        # Good elements can have been taken for part of this one: say how far it is taken to go.
        reason += f"; read on after line {line + text.count(chr(10), start, end)}"
    return _Refused(reason), end


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


def _encode(fields: dict[str, Any], template: _ChatTemplate, options: RowOptions) -> Encoded:
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
        raise _Refused(_unknown_shape(fields))
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
            raise _Refused(f"{name} is {_kind(values)}, not a list of integers")
    if len(ids) != len(mask):
        raise _Refused(f"input_ids has {len(ids)} entries and loss_mask {len(mask)}: they must be as many")
    for index, value in enumerate(ids):
        if type(value) is not int:
            raise _Refused(f"input_ids[{index}] is {_kind(value)}, not an integer")
    for index, value in enumerate(mask):
        if type(value) not in (int, bool) or value not in (0, 1):
            raise _Refused(f"loss_mask[{index}] is {json.dumps(value)[:40]}: it must be 0 or 1")
    return ids, [int(value) for value in mask]


def _prompt_and_response(fields: dict[str, Any], prompt: str, response: str) -> list[Message]:
    messages = []
    for column, role in ((prompt, "user"), (response, "assistant")):
        if column not in fields:
            raise _Refused(f"no column {column!r}; the row has {', '.join(map(repr, fields)) or 'none'}")
        if not isinstance(fields[column], str):
            raise _Refused(f"column {column!r} is {_kind(fields[column])}, not a string")
        messages.append({"role": role, "content": fields[column]})
    return messages


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _Refused("tools is not a list of objects (JSON schemas)")
    return tools or None


def _chat(messages: Any, column: str) -> list[Message]:
    if not isinstance(messages, list):
        raise _Refused(f"{column} is {_kind(messages)}, not a list of messages")
    if not messages:
        raise _Refused(f"{column} is an empty list")
    return [_message(message, number) for number, message in enumerate(messages, start=1)]


def _message(message: Any, number: int) -> Message:
    """One message as the chat template wants it: `role`, `content` and whatever else it came with."""
    if not isinstance(message, dict):
        raise _Refused(f"message {number} is {_kind(message)}, not an object")
    named: Message = message
    if "role" not in message and "from" in message:
        named = {"role": _role(message["from"], number), "content": message.get("value")}
    if not isinstance(named.get("role"), str):
        raise _Refused(f"message {number} has no role: it needs role and content, or from and value")
    _check_content(named, number)
    return named


def _role(speaker: Any, number: int) -> str:
    role = ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise _Refused(f"message {number} is from {speaker!r:.60}, who is not known; known are {', '.join(ROLES)}")
    return role


def _check_content(message: Message, number: int) -> None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if content is None:
        raise _Refused(f"message {number} ({message['role']}) has no content")
    if not isinstance(content, list):
        raise _Refused(f"the content of message {number} is {_kind(content)}, not a string")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise _Refused(f"a content part of message {number} is not an object with a type")
        if kind != "text":
            what = "images cannot be drawn yet" if "image" in kind else "only text can be drawn yet"
            raise _Refused(f"content part {kind!r} in message {number}: {what}")
        if not isinstance(part.get("text"), str):
            raise _Refused(f"a text part of message {number} has no text")


def _join_parts(message: Message) -> Message:
    """The message with its text parts as one string, joined as SGLang's chat endpoint joins them."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": " ".join(part["text"] for part in content)}


# ---- the chat template


class _Probe(msgspec.Struct):
    """What rendering a plain question and answer tells of a template.

    `closing`: the text after the answer. `closing_ids`: its tokens from the end-of-turn token on, empty where it has
    none. `takes_parts`: can it render content that is a list of text parts.
    """

    closing: str
    closing_ids: list[int]
    takes_parts: bool


class _ChatTemplate:
    """A tokenizer's chat template: chats -> ids and mask."""

    PROBE = "Layertap"
    GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._added = {*added, *tokenizer.all_special_ids}
        # Where one of these begins, the text before has no say in how the text from there on is tokenised.
        self.anchors = {token.content: i for i, token in added.items() if not (token.lstrip or token.single_word)}
        self.anchor_ids = frozenset(self.anchors.values())
        longest_first = sorted(self.anchors, key=len, reverse=True)
        self.anchor_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(self, messages: list[Message], tools: list[dict[str, Any]] | None, last_only: bool) -> Encoded:
        """Ids and mask of a chat. Raises `_Refused` for this row, `InputError` for a template of no use to any."""
        if not self._probe.takes_parts:
            messages = [_join_parts(message) for message in messages]
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if last_only:
            turns = turns[-1:]
        if self._marks_generation(tools):
            return self._by_marks(messages, tools, turns[0] if last_only and turns else 0)
        return self._by_prefixes(messages, tools, turns)

    def tokens(self, text: str) -> list[int]:
        """The ids of rendered text: a BOS is the template's business, so none is added here."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _render(self, messages: list[Message], tools: list[dict[str, Any]] | None, generation_prompt: bool) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # templates raise what they like
            raise _Refused(f"the chat template cannot render the row: {_first_line(error)}") from error
        return text

    @functools.cached_property
    def _probe(self) -> _Probe:
        question = {"role": "user", "content": self.PROBE[::-1]}
        try:
            text = self._render([question, {"role": "assistant", "content": self.PROBE}], None, False)
        except _Refused as refusal:
            reason = str(refusal)
            if not self.tokenizer.chat_template:
                reason = "no chat template, which rows of text need: give the model its own, or rows with input_ids"
            raise InputError(f"{self.tokenizer.name_or_path or 'the tokenizer'}: {reason}") from refusal
        _, found, closing = text.rpartition(self.PROBE)
        if not found:
            raise InputError("the chat template leaves out the content of an assistant message that is a string")
        ids = self.tokens(closing)
        end_of_turn = next((k for k, i in enumerate(ids) if i in self._added), len(ids))
        return _Probe(closing, ids[end_of_turn:], self._takes_parts(text))

    def _takes_parts(self, as_strings: str) -> bool:
        """Whether text parts come out as the same text in a string does; some templates print the list itself."""
        question, answer = ([{"type": "text", "text": text}] for text in (self.PROBE[::-1], self.PROBE))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            return self._render(messages, None, False) == as_strings
        except _Refused:
            return False

    # -- masks by {% generation %}

    def _marks_generation(self, tools: list[dict[str, Any]] | None) -> bool:
        """Whether the template marks the assistant's text and the tokenizer can tell which tokens that text became."""
        return self._can_mark and bool(self.GENERATION.search(self.tokenizer.get_chat_template(tools=tools)))

    @functools.cached_property
    def _can_mark(self) -> bool:
        from transformers import PreTrainedTokenizerBase

        # A tokenizer that renders in a way of its own (Kimi's) would be bypassed by `_render_marked`.
        as_usual = type(self.tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
        return as_usual and bool(self.tokenizer.is_fast)

    def _by_marks(self, messages: list[Message], tools: list[dict[str, Any]] | None, first: int) -> Encoded:
        """The mask as the template marks it, without what it marks in the messages before `first`."""
        text, spans = self._render_marked(messages, tools)
        if first:
            earlier_text, earlier = self._render_marked(messages[:first], tools)
            if [text[a:b] for a, b in spans[: len(earlier)]] != [earlier_text[a:b] for a, b in earlier]:
                raise _Refused(
                    f"the chat template marks other text before message {first + 1} than it does without that message: "
                    "its last turn cannot be told from the earlier ones"
                )
            spans = spans[len(earlier) :]
        encoding = self.tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        return encoding["input_ids"], _mask_of_spans(spans, encoding["offset_mapping"])

    def _render_marked(
        self, messages: list[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The rendered chat and the character spans that `{% generation %}` marks in it.

        `apply_chat_template(return_assistant_tokens_mask=True)` turns the same spans into tokens by their last
        character, which loses the rest of a character that is several tokens, and a whole span where a tokenizer
        trims spaces off its offsets.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(tools=tools),
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # templates raise what they like
            raise _Refused(f"the chat template cannot render the row: {_first_line(error)}") from error
        return texts[0], spans[0]

    # -- masks by prefixes

    def _by_prefixes(self, messages: list[Message], tools: list[dict[str, Any]] | None, turns: list[int]) -> Encoded:
        """The mask of the messages `turns`, each found between two prefixes of the whole chat."""
        text = self._render(messages, tools, False)
        whole = _WholeChat(self, text)
        mask = [0] * len(whole.ids)
        for turn in turns:
            name = f"message {turn + 1} (assistant)"
            if turn == 0:
                raise _Refused(f"{name} has no prompt before it, so where it begins cannot be told; {_REMEDY}")
            through = text if turn + 1 == len(messages) else self._render(messages[: turn + 1], tools, False)
            end = whole.prefix(through, f"the chat through {name}")
            start = whole.prefix(self._render(messages[:turn], tools, True), f"the generation prompt before {name}")
            if start > end:
                raise _Refused(f"the generation prompt before {name} is longer than the message itself; {_REMEDY}")
            end = self._end_of_turn(whole, through, start, end)
            mask[start:end] = [1] * (end - start)
        return whole.ids, mask

    def _end_of_turn(self, whole: _WholeChat, through: str, start: int, end: int) -> int:
        """Where the assistant stops in ids[start:end], the turn as rendered: behind its end-of-turn token.

        The template's text after the content is counted off from the turn's end, so that special tokens in the
        content are not taken for it.
        """
        closing, closing_ids = self._probe.closing, self._probe.closing_ids
        if not closing_ids:
            try:
                return max(start, whole.prefix(through.removesuffix(closing), "the content"))
            except _Refused:
                return end  # content and closing share a token
        if whole.ids[max(start, end - len(closing_ids)) : end] == closing_ids:
            return end - len(closing_ids) + 1
        # Closed in another way, as tool calls are in some templates.
        return next((k + 1 for k in range(end - 1, start - 1, -1) if whole.ids[k] in self._added), end)


class _WholeChat:
    """A rendered chat with its ids, against which prefixes of it are held."""

    def __init__(self, template: _ChatTemplate, text: str) -> None:
        self.ids = template.tokens(text)
        self._template = template
        self._text = text

    def prefix(self, part: str, name: str) -> int:
        """The number of tokens in `part`. Raises `_Refused` where they are not the first ones of the whole chat."""
        if (count := self._prefix_from_anchor(part)) is not None:
            return count
        ids = self._template.tokens(part)
        for k, i in enumerate(ids):
            if self.ids[k : k + 1] != [i]:
                raise _Refused(
                    f"{name} parts from the whole chat at token {k}, {self._text_of(ids, k)} against "
                    f"{self._text_of(self.ids, k)}; {_REMEDY}"
                )
        return len(ids)

    def _prefix_from_anchor(self, part: str) -> int | None:
        """The same from the last anchor in `part` on, which spares tokenising the chat anew for every turn."""
        if not self._text.startswith(part):
            return None
        index = bisect.bisect_left(self._anchors, (len(part), 0)) - 1
        if index < 0:
            return None
        character, token = self._anchors[index]
        ids = self._template.tokens(part[character:])
        return token + len(ids) if self.ids[token : token + len(ids)] == ids else None

    @functools.cached_property
    def _anchors(self) -> list[tuple[int, int]]:
        """(character, token) at which an added token begins; empty where text and ids do not agree on them."""
        template = self._template
        found = list(template.anchor_pattern.finditer(self._text))
        places = [k for k, i in enumerate(self.ids) if i in template.anchor_ids]
        if [template.anchors[match[0]] for match in found] != [self.ids[k] for k in places]:
            return []
        return [(match.start(), k) for match, k in zip(found, places, strict=True)]

    def _text_of(self, ids: list[int], k: int) -> str:
        """Token k and the text around it."""
        tokenizer = self._template.tokenizer
        return f"{_decode(tokenizer, ids[k : k + 1])!r} in {_decode(tokenizer, ids[max(0, k - 6) : k + 6])!r}"


def _mask_of_spans(spans: list[tuple[int, int]], offsets: list[tuple[int, int]]) -> list[int]:
    """1 for each token that holds a character of a span. Spans and offsets are [start, end) in characters, in order.

    A token is taken to begin where the one before it ended, since some tokenizers leave spaces out of their offsets;
    the tokens of one character all have that character's offsets.
    """
    spans = [(start, end) for start, end in spans if start < end]
    mask, covered, k = [], 0, 0
    for start, end in offsets:
        start, covered = min(start, covered), max(end, covered)
        while k < len(spans) and spans[k][1] <= start:
            k += 1
        mask.append(int(k < len(spans) and spans[k][0] < end))
    return mask


# ---- rows -> text


def render_mask(ids: list[int], mask: list[int], tokenizer: Any, limit: int = 400) -> str:
    """A row as one line of text with what is in the loss in brackets; newlines show as ⏎.

    `limit` is about how many characters: where the row has more, long stretches lose their middle, and stretches past
    the limit are left out, each time for a `…`.
    """
    spans = _spans(mask)
    texts = [_decode(tokenizer, ids[start:end]).replace("\n", "⏎") for start, end in spans]
    if sum(map(len, texts)) > limit:
        share = max(60, limit // len(texts))
        texts = [_shorten(text, share) for text in texts]
    shown, length = [], 0
    for (start, _), text in zip(spans, texts, strict=True):
        if length > limit:
            shown.append("…")
            break
        shown.append(f"[{text}]" if mask[start] else text)
        length += len(text)
    return "".join(shown)


def _spans(mask: list[int]) -> list[tuple[int, int]]:
    """The stretches [start, end) of equal mask."""
    cuts = [k for k in range(1, len(mask)) if mask[k] != mask[k - 1]]
    return list(zip([0, *cuts], [*cuts, len(mask)], strict=True)) if mask else []


def _shorten(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    tail = length // 3
    return f"{text[: length - tail - 1]}…{text[-tail:]}"


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _kind(value: Any) -> str:
    names = {str: "a string", list: "a list", dict: "an object", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
