"""A tokenizer's chat template: chats -> token ids and loss mask, and back to text with the mask made visible.

The mask covers what the assistant wrote: from the end of the generation prompt through the end-of-turn token. A chat
template that marks it with `{% generation %}` is taken at its word. With any other, the chat up to each assistant
turn and through it is rendered and must tokenise to a prefix of the whole chat's ids: what the model would have been
given, then what it would have said. A row for which that does not hold is refused, not guessed at.
"""

from __future__ import annotations

import bisect
import functools
import json
import re
from collections.abc import Iterator
from typing import Any, ClassVar, TypeAlias

import msgspec

Encoded: TypeAlias = tuple[list[int], list[int]]
Message: TypeAlias = dict[str, Any]

_REMEDY = "use a chat template that marks the assistant's text with {% generation %}"


class InputError(ValueError):
    """An input file, tokenizer or option that cannot be used at all; the sentence says why and what to do."""

    exit_code: ClassVar[int] = 2


class Refused(Exception):
    """The reason for which one row is bad."""


class _Probe(msgspec.Struct):
    """What rendering a plain question and answer tells of a template.

    `closing`: the text after the answer. `closing_ids`: its tokens from the end-of-turn token on, empty where it has
    none. `takes_parts`: can it render content that is a list of text parts. `takes_null`: does it leave out content
    that is null.
    """

    closing: str
    closing_ids: list[int]
    takes_parts: bool
    takes_null: bool


class ChatTemplate:
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
        special = {*tokenizer.all_special_tokens, *(token.content for token in added.values() if token.special)}
        self._special_begins = frozenset(text[0] for text in special if text)
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    def encode(self, messages: list[Message], tools: list[dict[str, Any]] | None, last_only: bool) -> Encoded:
        """Ids and mask of a chat. Raises `Refused` for this row, `InputError` for a template of no use to any."""
        messages = [self._served(message) for message in messages]
        turns = _turns(messages, last_only)
        if self._marks_generation(tools):
            return self._by_marks(messages, tools, turns[0] if last_only and turns else 0)
        return self._by_prefixes(messages, tools, turns)

    @functools.cached_property
    def ignores_roles(self) -> bool:
        """Whether an answer reads the same when the user says it, and nothing else marks it as the assistant's."""
        if self._marks_generation(None):
            return False
        said = [{"role": role, "content": self.PROBE} for role in ("user", "assistant")]
        try:
            return self._render(said, None, False) == self._render([said[0], said[0]], None, False)
        except Refused:
            return False

    def textless(self, messages: list[Message], last_only: bool) -> tuple[str | None, str | None]:
        """The first turn in the loss that says nothing, and the first whose tool calls the template does not render.

        None where there is none. What else a message holds, its reasoning or calls, is text where it is rendered.
        """
        empty = uncalled = None
        for number in _turns(messages, last_only):
            message = messages[number]
            if message.get("tool_calls"):
                if self._renders_alike(message, {key: message[key] for key in message if key != "tool_calls"}):
                    uncalled = uncalled or f"message {number + 1}"
            elif not _said(message.get("content")) and self._renders_alike(message, {"role": message["role"]}):
                empty = empty or f"message {number + 1}"
        return empty, uncalled

    def _renders_alike(self, message: Message, less: Message) -> bool:
        """Whether a message reads like one that holds `less` of it, alone behind a question: a chat may be long."""
        if message.keys() - {"content"} == less.keys() - {"content"}:
            return True
        question = {"role": "user", "content": self.PROBE}
        less = {**less, "content": message.get("content") or ""}
        try:
            as_it_is, without = (self._render([question, self._served(one)], None, False) for one in (message, less))
        except Refused:
            return False
        return as_it_is == without

    def _served(self, message: Message) -> Message:
        """A message as SGLang's chat endpoint hands it to the template."""
        return _as_served(message if self._probe.takes_parts else _join_parts(message), self._probe.takes_null)

    def special_in(self, messages: list[Message]) -> str | None:
        """The first special token that stands in what somebody says, and where; None where there is none."""
        for number, message in enumerate(messages, start=1):
            for text in _texts({key: value for key, value in message.items() if key != "role"}):
                # Most text has none of the characters that such tokens begin with, which is told much faster.
                if not self._special_begins.isdisjoint(text) and (found := self._special.search(text)):
                    return f"{found[0]} in message {number} ({message['role']})"
        return None

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
            raise Refused(f"the chat template cannot render the row: {first_line(error)}") from error
        return text

    @functools.cached_property
    def _probe(self) -> _Probe:
        question = {"role": "user", "content": self.PROBE[::-1]}
        try:
            text = self._render([question, {"role": "assistant", "content": self.PROBE}], None, False)
        except Refused as refusal:
            reason = str(refusal)
            if not self.tokenizer.chat_template:
                reason = "no chat template, which rows of text need: give the model its own, or rows with input_ids"
            raise InputError(f"{self.tokenizer.name_or_path or 'the tokenizer'}: {reason}") from refusal
        _, found, closing = text.rpartition(self.PROBE)
        if not found:
            raise InputError("the chat template leaves out the content of an assistant message that is a string")
        ids = self.tokens(closing)
        end_of_turn = next((k for k, i in enumerate(ids) if i in self._added), len(ids))
        return _Probe(closing, ids[end_of_turn:], self._takes_parts(text), self._takes_null())

    def _takes_parts(self, as_strings: str) -> bool:
        """Whether text parts come out as the same text in a string does; some templates print the list itself."""
        question, answer = ([{"type": "text", "text": text}] for text in (self.PROBE[::-1], self.PROBE))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            return self._render(messages, None, False) == as_strings
        except Refused:
            return False

    def _takes_null(self) -> bool:
        """Whether a tool call's missing content comes out as nothing; some templates print None, or fail."""
        question = {"role": "user", "content": self.PROBE}
        call = {"type": "function", "id": "call_1", "function": {"name": self.PROBE, "arguments": {}}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        try:
            return "None" not in self._render([question, answer], None, False)
        except Refused:
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
                raise Refused(
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
            raise Refused(f"the chat template cannot render the row: {first_line(error)}") from error
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
                raise Refused(f"{name} has no prompt before it, so where it begins cannot be told; {_REMEDY}")
            through = text if turn + 1 == len(messages) else self._render(messages[: turn + 1], tools, False)
            end = whole.prefix(through, f"the chat through {name}")
            start = whole.prefix(self._render(messages[:turn], tools, True), f"the generation prompt before {name}")
            if start > end:
                raise Refused(f"the generation prompt before {name} is longer than the message itself; {_REMEDY}")
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
            except Refused:
                return end  # content and closing share a token
        if whole.ids[max(start, end - len(closing_ids)) : end] == closing_ids:
            return end - len(closing_ids) + 1
        # Closed in another way, as tool calls are in some templates.
        return next((k + 1 for k in range(end - 1, start - 1, -1) if whole.ids[k] in self._added), end)


class _WholeChat:
    """A rendered chat with its ids, against which prefixes of it are held."""

    def __init__(self, template: ChatTemplate, text: str) -> None:
        self.ids = template.tokens(text)
        self._template = template
        self._text = text

    def prefix(self, part: str, name: str) -> int:
        """The number of tokens in `part`. Raises `Refused` where they are not the first ones of the whole chat."""
        if (count := self._prefix_from_anchor(part)) is not None:
            return count
        ids = self._template.tokens(part)
        for k, i in enumerate(ids):
            if self.ids[k : k + 1] != [i]:
                raise Refused(
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
        return f"{decode(tokenizer, ids[k : k + 1])!r} in {decode(tokenizer, ids[max(0, k - 6) : k + 6])!r}"


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


def _turns(messages: list[Message], last_only: bool) -> list[int]:
    """The indices of what the assistant says that is in the loss."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return turns[-1:] if last_only else turns


def _said(content: Any) -> bool:
    """Whether content, a string or text parts, is more than space."""
    return any(text.strip() for text in ([content] if isinstance(content, str) else _part_texts(content)))


def _part_texts(content: Any) -> list[str]:
    return [part["text"] for part in content or ()]


def _join_parts(message: Message) -> Message:
    """The message with its text parts as one string, joined as SGLang's chat endpoint joins them."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": " ".join(_part_texts(content))}


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """A row or a message without the keys that it has only since others have them, as SGLang's chat endpoint sees it.

    Content stays, since null is something that is said there, beside tool calls.
    """
    return {name: value for name, value in fields.items() if value is not None or name == "content"}


def _as_served(message: Message, takes_null: bool) -> Message:
    """A message with tool calls as SGLang's chat endpoint hands it to the template.

    Arguments that are JSON text become objects, and content that is null an empty string where the template would
    print it.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    served = {**message, "tool_calls": [_with_arguments(call) for call in calls]}
    if not takes_null and served.get("content") is None:
        served["content"] = ""
    return served


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _texts(value: Any) -> Iterator[str]:
    """Every string in a value as JSON has them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def mask_parts(ids: list[int], mask: list[int], tokenizer: Any, limit: int = 400) -> list[tuple[str, bool]]:
    """A row as text in stretches, each with whether it is in the loss; newlines show as ⏎.

    `limit` is about how many characters: where the row has more, long stretches lose their middle, and stretches past
    the limit are left out, each time for a `…`.
    """
    spans = _spans(mask)
    texts = [decode(tokenizer, ids[start:end]).replace("\n", "⏎") for start, end in spans]
    if sum(map(len, texts)) > limit:
        share = max(60, limit // len(texts))
        texts = [_shorten(text, share) for text in texts]
    shown: list[tuple[str, bool]] = []
    length = 0
    for (start, _), text in zip(spans, texts, strict=True):
        if length > limit:
            shown.append(("…", False))
            break
        shown.append((text, bool(mask[start])))
        length += len(text)
    return shown


def bracketed(parts: list[tuple[str, bool]]) -> str:
    """What `mask_parts` made as one line, what is in the loss in brackets."""
    return "".join(f"[{text}]" if in_loss else text for text, in_loss in parts)


def _spans(mask: list[int]) -> list[tuple[int, int]]:
    """The stretches [start, end) of equal mask."""
    cuts = [k for k in range(1, len(mask)) if mask[k] != mask[k - 1]]
    return list(zip([0, *cuts], [*cuts, len(mask)], strict=True)) if mask else []


def _shorten(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    tail = length // 3
    return f"{text[: length - tail - 1]}…{text[-tail:]}"


def decode(tokenizer: Any, ids: list[int]) -> str:
    """The text of ids; `�` for those of the model that a tokenizer has no token for, and does not pass over."""
    try:
        text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    except Exception:  # each tokenizer has its own
        return "".join(decode(tokenizer, [one]) for one in ids) if len(ids) > 1 else "�"
    return text


def first_line(error: BaseException) -> str:
    """An exception's message without what follows on further lines."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
