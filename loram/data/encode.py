"""From examples to tokens and labels: the chat template, and which tokens the loss counts.

Rules: exactly one BOS where the tokenizer adds one; the prompt's ids are a prefix of the whole; the last label of
every completion is EOS; labels are token ids where the loss counts and -100 elsewhere, not shifted.

A conversation is rendered once and tokenized once. What of it is learnt is known in characters: from the template's
own `{% generation %}` blocks where it has them, else from rendering the turns before each answer, which must be the
beginning of the whole. It becomes tokens by tokenizing the text between the last special token and the boundary, which
is nearly always the same few words: special tokens cut a text, so what is before them changes nothing after them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from loram.data.rows import Example, Message
from loram.data.templates import known_template
from loram.data.tokens import IGNORED, Encoded
from loram.recipe import LossOn

T = TypeVar("T")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Text before a boundary that is worth remembering: an assistant's header behind a special token, which is short; a
# prompt without special tokens hardly comes again.
_REMEMBERED_CHARACTERS = 64
_REMEMBERED = 1024
_REASON_CHARACTERS = 160

_NOTHING = "nothing to learn in it"
_NO_PROMPT = "no prompt before the answer"
_SHIFTS = "the chat template changes earlier text when a turn is added"
_NO_EOS = "the chat template does not end every answer with EOS"
_ALL_TURNS_HINT = "; data.loss=last_assistant_turn may help"
_SHARED = "the answer's first characters join the prompt's last token"
_NO_TOOLS = "the chat template leaves out tools, calls or their results"


@dataclass(frozen=True)
class Unusable:
    """Why an example gives no tokens; `broken` when the row is at fault and not what was asked of it."""

    reason: str
    broken: bool = False


Result = list[Encoded] | Unusable
"""What an example gives."""

_Encodings = tuple[list[Any], list[Any]]  # of texts, of layouts


class _Refused(Exception):
    """An example that gives no tokens; the message is the reason."""


@dataclass(frozen=True)
class _Layout:
    """A rendered conversation and the stretches of it (first and last + 1 character) that are learnt, in order."""

    text: str
    learnt: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Batch:
    """Examples on their way, by their number: texts and layouts to tokenize, and what is known already."""

    examples: Sequence[Example]
    results: list[Result]
    texts: dict[int, str] = field(default_factory=dict)
    layouts: dict[int, _Layout] = field(default_factory=dict)


class Encoder:
    """Turns examples into tokens, a batch at a time.

    Args:
        tokenizer: the model's.
        template: Jinja text of the chat template; None: turns simply follow one another, each answer ended by EOS.
        max_length: longer texts are split; a longer conversation is unusable, since a cut completion would teach the
            model to stop early or not at all.
        loss: which assistant turns are learnt.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None,
        max_length: int,
        loss: LossOn = "all_assistant_turns",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_length = max_length
        self._loss = loss
        self._core = getattr(tokenizer, "backend_tokenizer", None) if tokenizer.is_fast else None
        if self._core is not None:
            # Left in some tokenizer.json files; nothing here may be cut or filled up.
            self._core.no_truncation()
            self._core.no_padding()
        self._eos = cast(int, tokenizer.eos_token_id)
        self._bos = _added_bos(tokenizer)
        self._variables = dict(tokenizer.special_tokens_map)
        self._marks = template is not None and _GENERATION.search(template) is not None
        self._special = {
            number: token.content
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special and not token.single_word and not token.normalized
        }
        self._remembered = functools.lru_cache(_REMEMBERED)(self._ids_of)

    def settings(self) -> dict[str, Any]:
        """Everything of the encoder that its tokens depend on, as plain JSON."""
        return {
            "tokenizer": tokenizer_digest(self._tokenizer),
            "chat_template": self._template,
            "special_tokens": {name: str(token) for name, token in sorted(self._variables.items())},
            "bos": self._bos,
            "eos": self._eos,
            "max_length": self._max_length,
            "loss": self._loss,
        }

    def encode(self, examples: Sequence[Example]) -> list[Result]:
        """What each example gives: the pieces of a text, one conversation, or the reason for nothing."""
        batch = self._prepare(examples)
        return self._finish(batch, self._tokenize(batch))

    def stream(self, batches: Iterable[tuple[T, Sequence[Example]]]) -> Iterator[tuple[T, list[Result]]]:
        """The same for batch after batch, each with something that goes along with it.

        One batch is tokenized, which leaves Python free, while the next is read and rendered.
        """
        with ThreadPoolExecutor(1) as pool:
            running: tuple[T, _Batch, Future[_Encodings]] | None = None
            for along, examples in batches:
                batch = self._prepare(examples)
                following = (along, batch, pool.submit(self._tokenize, batch))
                if running is not None:
                    yield running[0], self._finish(running[1], running[2].result())
                running = following
            if running is not None:
                yield running[0], self._finish(running[1], running[2].result())

    def _prepare(self, examples: Sequence[Example]) -> _Batch:
        """Renders what is to be tokenized."""
        batch = _Batch(examples, [Unusable(_NOTHING)] * len(examples))
        for number, example in enumerate(examples):
            if example.text is not None:
                batch.texts[number] = example.text
            elif self._template is None:
                batch.results[number] = self._attempt(self._without_template, example)
            else:
                layout = self._attempt(self._lay_out, example)
                if isinstance(layout, _Layout):
                    batch.layouts[number] = layout
                else:
                    batch.results[number] = layout
        return batch

    def _tokenize(self, batch: _Batch) -> _Encodings:
        """Tokenizes it, all at once where the tokenizer can."""
        rendered = [layout.text for layout in batch.layouts.values()]
        return self._encodings(list(batch.texts.values()), False), self._encodings(rendered, True)

    def _finish(self, batch: _Batch, encodings: _Encodings) -> list[Result]:
        """Labels what was tokenized."""
        of_texts, of_layouts = encodings
        for (number, text), encoding in zip(batch.texts.items(), of_texts, strict=True):
            found = self._attempt(self._tokenized, text, encoding, False)
            batch.results[number] = (
                found if isinstance(found, Unusable) else self._pieces(batch.examples[number], found.ids)
            )
        for (number, layout), encoding in zip(batch.layouts.items(), of_layouts, strict=True):
            found = self._attempt(self._tokenized, layout.text, encoding, True)
            batch.results[number] = (
                found if isinstance(found, Unusable) else self._attempt(self._conversation, layout, found)
            )
        return batch.results

    def _attempt(self, work: Any, *arguments: Any) -> Any:
        try:
            return work(*arguments)
        except _Refused as refused:
            return Unusable(str(refused))
        except UnicodeError as error:
            return Unusable(_no_unicode(error), broken=True)

    def _refused(self, reason: str) -> _Refused:
        return _Refused(reason + (_ALL_TURNS_HINT if self._loss == "all_assistant_turns" else ""))

    # -- texts -------------------------------------------------------------------------------------------------------

    def _pieces(self, example: Example, ids: list[int]) -> list[Encoded] | Unusable:
        """A document: [BOS] text EOS, in pieces whose first token is context only."""
        if example.opens:
            ids = self._with_bos(ids)
        if example.closes:
            ids = [*ids, self._eos]
        pieces = [ids[start : start + self._max_length] for start in range(0, len(ids), self._max_length)]
        return [Encoded(piece, [IGNORED, *piece[1:]]) for piece in pieces if len(piece) > 1] or Unusable(_NOTHING)

    # -- conversations -----------------------------------------------------------------------------------------------

    def _without_template(self, example: Example) -> list[Encoded]:
        messages = example.messages
        if example.tools or any("tool_calls" in message for message in messages):
            raise _Refused(_NO_TOOLS)
        answers = _answers(messages)
        learnt = set(answers if self._loss == "all_assistant_turns" else answers[-1:])
        ids: list[int] = self._with_bos([])
        labels = [IGNORED] * len(ids)
        for number, message in enumerate(messages[: answers[-1] + 1]):
            turn = self._ids_of(message["content"])
            if number in answers:
                turn = [*turn, self._eos]
            ids += turn
            labels += turn if number in learnt else [IGNORED] * len(turn)
        return self._fitting(ids, labels)

    def _lay_out(self, example: Example) -> _Layout:
        """Renders a conversation up to its last answer and finds what of it is learnt."""
        answers = _answers(example.messages)
        layout = self._by_marks(example, answers) if self._marks else self._by_prefixes(example, answers)
        _require_tools(example, layout.text)
        return layout

    def _by_prefixes(self, example: Example, answers: list[int]) -> _Layout:
        """An answer is what the whole has after the prompt, up to its last EOS."""
        last = answers[-1]
        whole, _ = self._render(example, last + 1)
        learnt = []
        for number in answers if self._loss == "all_assistant_turns" else answers[-1:]:
            if number == 0:
                raise _Refused(_NO_PROMPT)
            start = self._render(example, number, prompt=True)[0]
            until = whole if number == last else self._render(example, number + 1)[0]
            if not until.startswith(start):
                raise self._refused(_SHIFTS)
            end = self._end(until, len(start), len(until))
            if not whole.startswith(until[:end]):
                raise self._refused(_SHIFTS)
            learnt.append((len(start), end))
        return _Layout(whole, tuple(learnt))

    def _by_marks(self, example: Example, answers: list[int]) -> _Layout:
        """The template's `{% generation %}` blocks, joined where they touch, up to their EOS or the one behind them."""
        whole, marked = self._render(example, answers[-1] + 1)
        eos = cast(str, self._tokenizer.eos_token)
        learnt: list[tuple[int, int]] = []
        for start, stop in _joined(marked):
            end = self._end(whole, start, stop)
            if not whole.startswith(eos, end - len(eos)) and whole.startswith(eos, end):
                end += len(eos)
            if whole[start:end].removesuffix(eos).strip():
                learnt.append((start, end))
        if not learnt:
            raise _Refused(_NOTHING)
        ended = [number for number, (_, end) in enumerate(learnt) if whole.startswith(eos, end - len(eos))]
        if self._loss == "all_assistant_turns":
            if len({*ended, len(learnt) - 1}) < len(answers):
                raise self._refused(_NO_EOS)
        else:
            before = [number for number in ended if number < len(learnt) - 1]
            learnt = learnt[before[-1] + 1 if before else len(learnt) - 1 :]
        return _Layout(whole, tuple(learnt))

    def _end(self, text: str, start: int, stop: int) -> int:
        """Behind the last EOS between two places; the second place where there is none."""
        eos = cast(str, self._tokenizer.eos_token)
        found = text.rfind(eos, start, stop)
        return stop if found < 0 else found + len(eos)

    def _render(self, example: Example, turns: int, prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """The first turns as text, and the characters that the template marks as generated."""
        try:
            rendered, marked = render_jinja_template(
                conversations=[list(example.messages[:turns])],
                tools=list(example.tools) or None,
                chat_template=self._template,
                return_assistant_tokens_mask=self._marks and not prompt,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise _Refused(f"the chat template refuses it: {str(error)[:_REASON_CHARACTERS]}") from error
        return rendered[0], marked[0] if marked else []

    def _conversation(self, layout: _Layout, found: _Tokenized) -> list[Encoded]:
        ids = found.ids
        labels = [IGNORED] * len(ids)
        after = 0
        for number, (start, end) in enumerate(layout.learnt, 1):
            first = self._tokens_before(layout.text, found, start)
            after = self._tokens_before(layout.text, found, end)
            labels[first:after] = ids[first:after]
            if number == len(layout.learnt):
                ids, labels = ids[:after], labels[:after]
                if ids[-1] != self._eos:
                    ids, labels = [*ids, self._eos], [*labels, self._eos]
            elif not self._marks and ids[after - 1] != self._eos:
                raise self._refused(_NO_EOS)
        with_bos = self._with_bos(ids)
        return self._fitting(with_bos, [IGNORED] * (len(with_bos) - len(ids)) + labels)

    def _fitting(self, ids: list[int], labels: list[int]) -> list[Encoded]:
        if len(ids) > self._max_length:
            raise _Refused(f"longer than {self._max_length} tokens")
        return [Encoded(ids, labels)]

    def _tokens_before(self, text: str, found: _Tokenized, place: int) -> int:
        """How many of the tokens are the tokens of the text before a place.

        Raises:
            _Refused: the text before it alone would be tokenized differently.
        """
        if place == len(text):
            return len(found.ids)
        at, begin = found.anchor(place)
        before = text[begin:place]
        again = begin and len(before) <= _REMEMBERED_CHARACTERS
        tail = self._remembered(before) if again else self._ids_of(before)
        until = at + len(tail)
        if found.ids[at:until] != tail:
            raise _Refused(_SHARED)
        return until

    # -- tokens ------------------------------------------------------------------------------------------------------

    def _ids_of(self, text: str) -> list[int]:
        if self._core is not None:
            text.encode()  # the tokenizer's own complaint about a lone surrogate is a TypeError without a word on it
            return list(self._core.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _encodings(self, texts: list[str], places: bool) -> list[Any]:
        """The tokenizer's encodings, with the places of characters if asked for; None for each text to do alone."""
        if self._core is None:
            return [None] * len(texts)
        encode = self._core.encode_batch if places else self._core.encode_batch_fast
        try:
            return list(encode(texts, add_special_tokens=False))
        except TypeError:  # one of them is not valid Unicode
            return [None] * len(texts)

    def _tokenized(self, text: str, encoding: Any, places: bool) -> _Tokenized:
        """A text's tokens, and where the special ones are if asked for.

        Raises:
            UnicodeError: it is not valid Unicode.
        """
        if encoding is None:
            return _Tokenized(self._ids_of(text), [], [])
        ids: list[int] = encoding.ids
        if not places:
            return _Tokenized(ids, [], [])
        special, characters = [], []
        for place in [place for place, token in enumerate(ids) if token in self._special]:
            character = encoding.token_to_chars(place)[0]
            # What stands for an unknown character is a special token too, and cuts nothing.
            if text.startswith(self._special[ids[place]], character):
                special.append(place)
                characters.append(character)
        return _Tokenized(ids, special, characters)

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Puts BOS in front where the tokenizer would have, unless the text already begins with it."""
        return ids if self._bos is None or ids[:1] == [self._bos] else [self._bos, *ids]


@dataclass(frozen=True)
class _Tokenized:
    """A text's ids, the places of special tokens among them, and the character each of those begins at."""

    ids: list[int]
    special: list[int]
    characters: list[int]

    def anchor(self, place: int) -> tuple[int, int]:
        """The last special token that begins before a character: its place and its character; else the beginning."""
        number = bisect_left(self.characters, place) - 1
        return (self.special[number], self.characters[number]) if number >= 0 else (0, 0)


def _answers(messages: Sequence[Message]) -> list[int]:
    """Which turns are assistant turns that say or call something."""
    found = [
        number
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and (message["content"] or message.get("tool_calls"))
    ]
    if not found:
        raise _Refused(_NOTHING)
    return found


def _joined(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Stretches that touch as one."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(stretches):
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined


def _require_tools(example: Example, text: str) -> None:
    """Refuses a conversation whose tools, calls or results the template silently leaves out."""
    names = [tool["function"].get("name", "") for tool in example.tools if isinstance(tool["function"], dict)]
    shown = [[name] for name in names]
    for message in example.messages[: _answers(example.messages)[-1] + 1]:
        shown += [[call["function"]["name"]] for call in message.get("tool_calls", ())]
        if message["role"] == "tool":
            content = message["content"].strip()
            shown.append([content, json.dumps(content, ensure_ascii=False)[1:-1]])
    if not all(any(form in text for form in forms) for forms in shown):
        raise _Refused(_NO_TOOLS)


def _no_unicode(error: UnicodeError) -> str:
    return f"its text is not valid Unicode ({error})"


def resolve_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The Jinja text of a recipe's `data.chat_template`; None when `auto` finds the tokenizer has none of its own."""
    if name != "auto":
        return known_template(name)
    own = tokenizer.chat_template
    return own if isinstance(own, str) else None


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """One document, whole: [BOS] text EOS; every token but the first is learnt.

    Raises:
        ValueError: nothing in it to learn, or not valid Unicode.
    """
    return _one(Example(text=text), Encoder(tokenizer, None, _ANY_LENGTH))


def encode_messages(
    messages: Iterable[tuple[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    loss: LossOn = "all_assistant_turns",
) -> Encoded:
    """One conversation of (role, content) turns, whole.

    Raises:
        ValueError: unusable; says why.
    """
    turns = tuple({"role": role, "content": content} for role, content in messages)
    return _one(Example(turns), Encoder(tokenizer, template, _ANY_LENGTH, loss))


_ANY_LENGTH = 2**62


def _one(example: Example, encoder: Encoder) -> Encoded:
    (found,) = encoder.encode([example])
    if isinstance(found, Unusable):
        raise ValueError(found.reason)
    return found[0]


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of what turns text into ids: vocabulary, merges, normalizer, added tokens."""
    if tokenizer.is_fast:
        return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    digest = hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode())
    with tempfile.TemporaryDirectory(prefix="loram-") as folder:
        for name in sorted(tokenizer.save_vocabulary(folder)):
            digest.update(Path(name).read_bytes())
    return digest.hexdigest()


def _added_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The BOS token, where the tokenizer puts it in front of a text."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and list(tokenizer("")["input_ids"])[:1] == [bos] else None
