"""Which tokens a row becomes and which are learnt, against a plain method that tokenizes every turn's prompt."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from loram.data.encode import Encoder, Unusable, encode_messages, encode_text, resolve_template, tokenizer_digest
from loram.data.rows import Example, Message, interpret
from loram.data.templates import TEMPLATES
from loram.data.tokens import IGNORED, Encoded
from loram.models.source import byte_tokenizer
from loram.recipe import LossOn

BYTES = byte_tokenizer()
TURNS = (("system", "S"), ("user", "one"), ("assistant", "ANSWER1"), ("user", "two"), ("assistant", "ANSWER2"))
# The same conversation format with and without marks of what is generated; the second as some models write it, with EOS
# behind the block.
PLAIN = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{{ m['content'] + eos_token }}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ANSWER = "{{ m['content'] + eos_token }}"
MARKED = {
    "EOS inside": PLAIN.replace(ANSWER, "{% generation %}" + ANSWER + "{% endgeneration %}"),
    "EOS behind": PLAIN.replace(ANSWER, "{%- generation -%}{{ m['content'] }}{%- endgeneration -%}{{ eos_token }}"),
    "text after EOS inside": PLAIN.replace(
        ANSWER + "{{ '\n' }}", "{% generation %}" + ANSWER + "{{ '\n' }}{% endgeneration %}"
    ),
    "two blocks": PLAIN.replace(
        ANSWER,
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% generation %}{{ eos_token }}{% endgeneration %}",
    ),
}


def trained_tokenizer(kind: str) -> Any:
    """A small BPE with real merges: byte level as GPT-2's, or with a word mark in front as SentencePiece's."""
    if kind == "bytes":
        return BYTES
    special = ["<|pad|>", "<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
    core = Tokenizer(models.BPE(byte_fallback=False, unk_token="<|pad|>"))
    if kind == "gpt2":
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
    elif kind == "prepend":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "gpt2" else list("abcdeé \n▁:#-<|>?!ANSWER12onetwpgusim")
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(
        ["a bad cab deed\n\nbee:\n a bc\n\n\n### abc de?", "one two ANSWER1 ANSWER2 " * 3], trainer
    )
    core.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    if kind == "prepend":
        core.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    )


TOKENIZERS = {kind: trained_tokenizer(kind) for kind in ("bytes", "gpt2", "prepend", "metaspace")}


def reference(messages: tuple[Message, ...], tokenizer: Any, template: str, loss: LossOn) -> Encoded | None:
    """Labels by tokenizing prompt and whole of every turn; None where no mask exists."""
    adds = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]

    def ids_of(turns: tuple[Message, ...], prompt: bool) -> list[int]:
        text = tokenizer.apply_chat_template(
            list(turns), chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return [tokenizer.bos_token_id, *ids] if adds and ids[:1] != [tokenizer.bos_token_id] else ids

    ids: list[int] = []
    labels: list[int] = []
    answers = [n for n, turn in enumerate(messages) if turn["role"] == "assistant" and turn["content"]]
    for number in answers if loss == "all_assistant_turns" else answers[-1:]:
        if number == 0:
            return None
        prompt, whole = ids_of(messages[:number], True), ids_of(messages[: number + 1], False)
        if whole[: len(prompt)] != prompt or prompt[: len(ids)] != ids:
            return None
        completion = whole[len(prompt) :]
        eos = tokenizer.eos_token_id
        if eos in completion:
            completion = completion[: len(completion) - completion[::-1].index(eos)]
        else:
            completion = [*completion, eos]
        labels += [IGNORED] * (len(prompt) - len(ids)) + completion
        ids = prompt + completion
    return Encoded(ids, labels) if ids else None


CONTENT = st.text(st.sampled_from("ab cde\n:#?é"), max_size=12) | st.sampled_from(["", " a", "\n\nb", "a <|im_end|> b"])
CONVERSATION = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), CONTENT), max_size=7)


@settings(max_examples=300)
@given(
    CONVERSATION,
    st.sampled_from(sorted(TOKENIZERS)),
    st.sampled_from(
        [PLAIN, *TEMPLATES.values(), "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"]
    ),
    st.sampled_from(["all_assistant_turns", "last_assistant_turn"]),
)
def test_labels_are_those_of_the_plain_method(
    turns: list[tuple[str, str]], kind: str, template: str, loss: LossOn
) -> None:
    messages = tuple({"role": role, "content": content} for role, content in turns)
    tokenizer = TOKENIZERS[kind]
    # The alpaca template leaves tool results out, which the plain method does not notice.
    if template == TEMPLATES["alpaca"]:
        messages = tuple(message for message in messages if message["role"] != "tool")
    (found,) = Encoder(tokenizer, template, 10**6, loss).encode([Example(messages)])
    expected = reference(messages, tokenizer, template, loss)
    if expected is None:
        assert isinstance(found, Unusable)
        return
    assert found == [expected]
    learnt = [place for place, label in enumerate(expected.labels) if label != IGNORED]
    assert expected.labels[-1] == tokenizer.eos_token_id
    assert [expected.input_ids[place] for place in learnt] == [expected.labels[place] for place in learnt]


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text("ab cd?", max_size=8)), max_size=6),
    st.sampled_from(sorted(TOKENIZERS)),
    st.sampled_from(sorted(MARKED)),
    st.sampled_from(["all_assistant_turns", "last_assistant_turn"]),
)
def test_generation_marks_and_prefixes_give_the_same_labels(
    turns: list[tuple[str, str]], kind: str, marked: str, loss: LossOn
) -> None:
    messages = tuple({"role": role, "content": content.strip()} for role, content in [("user", "p"), *turns])
    by_marks, by_prefix = (
        Encoder(TOKENIZERS[kind], template, 10**6, loss).encode([Example(messages)])[0]
        for template in (MARKED[marked], PLAIN)
    )
    assert by_marks == by_prefix or (isinstance(by_marks, Unusable) and isinstance(by_prefix, Unusable))


def test_a_template_with_marks_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from loram.data import encode

    renders: list[int] = []
    render = encode.render_jinja_template

    def count(**arguments: Any) -> Any:
        renders.append(1)
        return render(**arguments)

    monkeypatch.setattr(encode, "render_jinja_template", count)
    encode_messages(TURNS, BYTES, MARKED["EOS inside"])
    assert len(renders) == 1
    encode_messages(TURNS, BYTES, PLAIN)
    assert len(renders) == 1 + 4  # the whole, two prompts, and the first answer's end


@pytest.mark.parametrize("template", [*TEMPLATES.values(), *MARKED.values(), None])
@pytest.mark.parametrize(
    ("loss", "learnt"),
    [("all_assistant_turns", ["ANSWER1", "ANSWER2"]), ("last_assistant_turn", ["ANSWER2"])],
)
def test_loss_is_on_the_chosen_assistant_turns_only(template: str | None, loss: LossOn, learnt: list[str]) -> None:
    encoded = encode_messages(TURNS, BYTES, template, loss)
    text = BYTES.decode([label for label in encoded.labels if label != IGNORED])
    assert text == "".join(answer + BYTES.eos_token for answer in learnt)
    assert len(encoded.labels) == len(encoded.input_ids)
    assert encoded.input_ids[-1] == BYTES.eos_token_id
    assert BYTES.decode(encoded.input_ids).count("ANSWER1") == 1


TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]
CALL = {"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
TOOL_ROW: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "RESULT"},
        {"role": "assistant", "content": "It is 5."},
    ],
    "tools": TOOLS,
}


@pytest.mark.parametrize("marked", [False, True])
def test_calls_are_learnt_and_results_are_not(marked: bool) -> None:
    template = TEMPLATES["chatml"]
    if marked:
        body = "{% if message['role'] == 'assistant' %}"
        assert body in template
        template = template.replace(body, body + "{% generation %}").replace(
            "{{ eos_token + '\n' }}", "{{ eos_token }}{% endgeneration %}{{ '\n' }}"
        )
    (found,) = Encoder(BYTES, template, 10**6).encode([interpret(TOOL_ROW, "auto")])
    assert not isinstance(found, Unusable), found
    text = BYTES.decode([label for label in found[0].labels if label != IGNORED])
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    assert text == call + BYTES.eos_token + "It is 5." + BYTES.eos_token
    whole = BYTES.decode(found[0].input_ids)
    assert "RESULT" in whole
    assert '"description": "adds"' in whole


@pytest.mark.parametrize("template", [TEMPLATES["alpaca"], None, PLAIN])
def test_a_template_that_leaves_tools_out_is_noticed(template: str | None) -> None:
    for row in (
        TOOL_ROW | {"tools": None},
        {"messages": [TOOL_ROW["messages"][0], TOOL_ROW["messages"][3]], "tools": TOOLS},
    ):
        (found,) = Encoder(BYTES, template, 10**6).encode([interpret(row, "auto")])
        assert isinstance(found, Unusable)
        assert "leaves out tools" in found.reason


@pytest.mark.parametrize(
    ("template", "turns", "words"),
    [
        ("{{ messages | length }}{{ messages[-1]['content'] }}", TURNS[1:3], "changes earlier text"),
        (
            "{% for m in messages %}{{ m['content'] }}{% endfor %}",
            TURNS,
            "does not end every answer with EOS; data.loss",
        ),
        ("{{ raise_exception('Roles must alternate') }}", TURNS, "refuses it: Roles must alternate"),
        ("{{ messages[0]['nothing'] + 'x' }}", TURNS, "refuses it: "),
        (PLAIN, TURNS[2:], "no prompt"),
        (PLAIN, TURNS[:2], "nothing to learn"),
        (PLAIN, (), "nothing to learn"),
        (None, (("user", "x"), ("assistant", "")), "nothing to learn"),
        (PLAIN, (("user", "x\ud800"), ("assistant", "y")), "not valid Unicode"),
        (None, (("user", "x\ud800"), ("assistant", "y")), "not valid Unicode"),
    ],
)
def test_an_unusable_conversation_says_why(
    template: str | None, turns: tuple[tuple[str, str], ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        encode_messages(turns, BYTES, template)


def test_one_bad_row_leaves_the_others_of_its_batch_alone() -> None:
    good, bad = Example(text="good"), Example(text="bad \ud800")
    chat = Example(({"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}))
    results = Encoder(BYTES, PLAIN, 100).encode([good, bad, chat, good])
    assert isinstance(results[1], Unusable)
    assert results[1].broken
    assert results[0] == results[3] == [encode_text("good", BYTES)]
    assert results[2] == [encode_messages((("user", "p"), ("assistant", "c")), BYTES, PLAIN)]


def test_an_answer_that_joins_the_prompts_last_token_is_not_guessed() -> None:
    template = (
        "{% for m in messages %}{{ m['content'] }}{% if loop.index is even %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="join the prompt's last token"):
        encode_messages((("user", "a ba"), ("assistant", "d cab")), TOKENIZERS["gpt2"], template)


def test_long_texts_are_split_and_long_conversations_refused() -> None:
    encoder = Encoder(BYTES, PLAIN, 10)
    pieces, chat = encoder.encode([Example(text="x" * 28), Example(tuple({"role": r, "content": c} for r, c in TURNS))])
    assert not isinstance(pieces, Unusable)
    assert [len(piece) for piece in pieces] == [10, 10, 9]
    assert [token for piece in pieces for token in piece.input_ids] == encode_text("x" * 28, BYTES).input_ids
    assert all(piece.labels[0] == IGNORED and piece.labels[1:] == piece.input_ids[1:] for piece in pieces)
    assert chat == Unusable("longer than 10 tokens")


def test_stretches_of_a_text_begin_and_end_once() -> None:
    tokenizer = TOKENIZERS["prepend"]
    encoder = Encoder(tokenizer, None, 1000)
    first, second = encoder.encode([Example(text="a bad", closes=False), Example(text="cab", opens=False)])
    assert not isinstance(first, Unusable)
    assert not isinstance(second, Unusable)
    ids = first[0].input_ids + second[0].input_ids
    assert ids.count(tokenizer.bos_token_id) == ids.count(tokenizer.eos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert ids[-1] == tokenizer.eos_token_id


def test_limits_stored_with_a_tokenizer_do_not_cut() -> None:
    tokenizer = byte_tokenizer()
    digest = tokenizer_digest(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    assert len(encode_text("some longer text", tokenizer)) == 17
    assert tokenizer_digest(tokenizer) == digest


def test_unknown_template_is_refused() -> None:
    from loram.errors import RecipeError

    with pytest.raises(RecipeError, match="did you mean 'chatml'"):
        resolve_template("chatlm", BYTES)
    assert resolve_template("auto", BYTES) == cast(str, BYTES.chat_template)
