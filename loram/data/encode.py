"""From a row to tokens and labels: the format, the chat template, and which tokens the loss counts.

Rules: exactly one BOS where the tokenizer adds one; the prompt's ids are a prefix of the whole; the last label of
every completion is EOS; labels are token ids where the loss counts and -100 elsewhere, not shifted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from loram.data.sources import load_rows
from loram.data.templates import known_template
from loram.errors import DataError, did_you_mean
from loram.progress import track
from loram.recipe import DatasetSection, RowType

IGNORED = -100
Message = dict[str, str]
_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Encoded:
    """One example: token ids and labels of equal length."""

    input_ids: list[int]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def loss_tokens(self) -> int:
        """Tokens that the loss counts (the first token of a text is given, so it is not among them)."""
        return sum(label != IGNORED for label in self.labels)


@dataclass(frozen=True)
class Example:
    """A row's content: a conversation, or plain text."""

    messages: tuple[tuple[str, str], ...] = ()
    text: str | None = None


class UnusableRow(Exception):
    """A row without the columns its type needs; the message says which."""


@dataclass(frozen=True)
class EncodedSet:
    """A data set's examples, and why rows were dropped (reason → count)."""

    examples: list[Encoded]
    dropped: dict[str, int]

    @property
    def tokens(self) -> int:
        return sum(len(example) for example in self.examples)

    @property
    def loss_tokens(self) -> int:
        return sum(example.loss_tokens for example in self.examples)

    def describe(self) -> str:
        """One line: rows, tokens, loss tokens, and what was dropped."""
        text = f"{len(self.examples):,} examples, {self.tokens:,} tokens, {self.loss_tokens:,} in the loss"
        if self.dropped:
            text += "; dropped " + ", ".join(f"{count:,} ({reason})" for reason, count in self.dropped.items())
        return text


def encode_dataset(
    dataset: DatasetSection,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    chat_template: str = "auto",
) -> EncodedSet:
    """Reads and encodes a data set.

    Text longer than `max_length` tokens is split; a conversation that is longer is dropped, since a cut completion
    would teach the model to stop early or not at all.

    Raises:
        DataError: unreadable, a row of the wrong form (named by its place), or no usable row left.
    """
    template = resolve_template(chat_template, tokenizer)
    dropped: Counter[str] = Counter()
    examples: list[Encoded] = []
    for row in track(load_rows(dataset), f"encode {dataset.path}", "rows"):
        try:
            example = interpret(row.values, dataset.type)
        except UnusableRow as error:
            raise DataError(f"{row.place}: {error}", fix="Correct the row, or set `type` and `columns`.") from None
        try:
            if example.text is not None:
                examples += _split(encode_text(example.text, tokenizer), max_length)
                continue
            encoded = encode_messages(example.messages, tokenizer, template)
        except (ValueError, TypeError, TemplateError) as error:
            raise DataError(
                f"{row.place}: {error}", fix="Correct the row, or choose another data.chat_template."
            ) from error
        if len(encoded) > max_length:
            dropped[f"longer than {max_length} tokens"] += 1
        elif not encoded.loss_tokens:
            dropped["nothing to learn in it"] += 1
        else:
            examples.append(encoded)
    if not examples:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "all are empty"
        raise DataError(f"{dataset.path}: no usable row ({reasons}).", fix="Raise max_length, or check the data.")
    return EncodedSet(examples, dict(dropped))


def interpret(values: dict[str, Any], kind: RowType) -> Example:
    """The content of a row by its type; `auto` goes by the columns.

    Raises:
        UnusableRow: columns missing, or not text.
    """
    if kind == "auto":
        kind = _guess(values)
    if kind == "text":
        return Example(text=_text(values, "text"))
    if kind == "prompt_completion":
        return Example((("user", _text(values, "prompt")), ("assistant", _text(values, "completion"))))
    if kind == "alpaca":
        extra = values.get("input")
        prompt = _text(values, "instruction") + (f"\n\n{extra}" if extra else "")
        return Example((("user", prompt), ("assistant", _text(values, "output"))))
    key, role, content = ("messages", "role", "content") if kind == "messages" else ("conversations", "from", "value")
    turns = values.get(key)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UnusableRow(f"column '{key}' must be a list of turns")
    messages = []
    for turn in turns:
        name = _text(turn, role)
        known = _SHAREGPT_ROLES if kind == "sharegpt" else _ROLES
        if name not in known:
            raise UnusableRow(f"unknown speaker '{name}'{did_you_mean(name, known)}")
        messages.append((_SHAREGPT_ROLES[name] if kind == "sharegpt" else name, _text(turn, content)))
    return Example(tuple(messages))


def _guess(values: dict[str, Any]) -> RowType:
    for kind, columns in (
        ("messages", {"messages"}),
        ("sharegpt", {"conversations"}),
        ("prompt_completion", {"prompt", "completion"}),
        ("alpaca", {"instruction", "output"}),
        ("text", {"text"}),
    ):
        if columns <= values.keys():
            return cast(RowType, kind)
    raise UnusableRow(f"its columns {sorted(values)} are of no known type")


def _text(values: dict[str, Any], column: str) -> str:
    value = values.get(column)
    if not isinstance(value, str):
        raise UnusableRow(f"column '{column}' is {'missing' if value is None else 'not text'}")
    return value


def resolve_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The Jinja text of a recipe's `data.chat_template`; None when `auto` finds the tokenizer has none of its own."""
    if name != "auto":
        return known_template(name)
    own = tokenizer.chat_template
    return own if isinstance(own, str) else None


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """A document: [BOS] text EOS; every token but the first is learnt."""
    ids = [*_one_bos(_tokens(text, tokenizer), tokenizer), _eos(tokenizer)]
    return Encoded(ids, [IGNORED, *ids[1:]])


def encode_messages(
    messages: Iterable[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, template: str | None
) -> Encoded:
    """A conversation, loss on every assistant turn up to and including its EOS.

    Without a template, prompt and completion simply follow one another.

    Raises:
        ValueError: the template does not keep the prompt as a prefix, or drops a turn's content.
    """
    turns = [{"role": role, "content": content} for role, content in messages]
    ids: list[int] = []
    labels: list[int] = []
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant" or not turn["content"]:
            continue
        prompt = _render(turns[:number], tokenizer, template, "prompt")
        whole = _render(turns[: number + 1], tokenizer, template, "whole")
        if whole[: len(prompt)] != prompt or prompt[: len(ids)] != ids:
            raise ValueError("the chat template changes earlier text when a turn is added, so no loss mask exists")
        completion = _until_eos(whole[len(prompt) :], tokenizer)
        labels += [IGNORED] * (len(prompt) - len(ids)) + completion
        ids = prompt + completion
    return Encoded(ids, labels)


def _render(
    turns: list[Message], tokenizer: PreTrainedTokenizerBase, template: str | None, part: Literal["prompt", "whole"]
) -> list[int]:
    if template is None:
        ids = [token for turn in turns for token in _tokens(turn["content"], tokenizer)]
    else:
        text = tokenizer.apply_chat_template(
            turns, chat_template=template, tokenize=False, add_generation_prompt=part == "prompt"
        )
        ids = _tokens(cast(str, text), tokenizer)
    return _one_bos(ids, tokenizer)


def _until_eos(completion: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ends a completion with EOS: drops what a template writes after it, or adds it where there is none."""
    eos = _eos(tokenizer)
    if eos in completion:
        return completion[: len(completion) - completion[::-1].index(eos)]
    return [*completion, eos]


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _one_bos(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Puts BOS in front where the tokenizer would have, unless the text already begins with it."""
    bos = tokenizer.bos_token_id
    if bos is None or not _adds_bos(tokenizer) or ids[:1] == [bos]:
        return ids
    return [bos, *ids]


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    return list(tokenizer("")["input_ids"])[:1] == [tokenizer.bos_token_id]


def _eos(tokenizer: PreTrainedTokenizerBase) -> int:
    return cast(int, tokenizer.eos_token_id)


def _split(example: Encoded, max_length: int) -> list[Encoded]:
    """Pieces of a text; the first token of each piece is context only."""
    pieces = []
    for start in range(0, len(example), max_length):
        ids = example.input_ids[start : start + max_length]
        if len(ids) > 1:
            pieces.append(Encoded(ids, [IGNORED, *ids[1:]]))
    return pieces
