"""Row types: what each kind of row means, by name and by its columns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loram.data.rows import UnusableRow, interpret
from loram.recipe import RowType

USER, ANSWER = {"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("prompt_completion", {"prompt": "p", "completion": "c"}, (USER, ANSWER)),
        (
            "alpaca",
            {"instruction": "i", "input": "x", "output": "c"},
            ({"role": "user", "content": "i\n\nx"}, ANSWER),
        ),
        ("alpaca", {"instruction": "p", "input": "", "output": "c"}, (USER, ANSWER)),
        ("alpaca", {"instruction": "p", "input": None, "output": "c"}, (USER, ANSWER)),
        ("messages", {"messages": [USER, ANSWER]}, (USER, ANSWER)),
        ("messages", {"messages": json.dumps([USER, ANSWER])}, (USER, ANSWER)),
        ("messages", {"messages": [{**USER, "tool_calls": None, "name": None}]}, (USER,)),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "c"}]},
            (USER, ANSWER),
        ),
        (
            "sharegpt",
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "function_call", "value": "f"},
                    {"from": "observation", "value": "o"},
                ]
            },
            (
                {"role": "system", "content": "s"},
                {"role": "assistant", "content": "f"},
                {"role": "tool", "content": "o"},
            ),
        ),
    ],
)
def test_rows_become_turns_by_name_and_by_columns(kind: RowType, row: dict[str, Any], expected: Any) -> None:
    assert interpret(row, kind).messages == expected
    assert interpret(row, "auto").messages == expected


def test_text_is_text() -> None:
    assert interpret({"text": "t", "source": 3}, "auto").text == "t"
    assert interpret({"text": "t", "messages": []}, "text").text == "t"


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("bare", [False, True])
def test_calls_and_tools_take_one_form(as_json: bool, bare: bool) -> None:
    def given(value: Any) -> Any:
        return json.dumps(value) if as_json else value

    call = {"name": "add", "arguments": given({"a": 1})}
    tool = {"name": "add", "parameters": {}}
    row = {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": given([call if bare else {"function": call}])},
            {"role": "tool", "content": {"sum": 1}, "name": "add"},
        ],
        "tools": given([tool if bare else {"type": "function", "function": tool}]),
    }
    example = interpret(row, "messages")
    assert example.tools == (TOOL,)
    assert example.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert example.messages[2] == {"role": "tool", "content": '{"sum": 1}', "name": "add"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"q": 1}, "no known type"),
        ({"prompt": 3, "completion": "x"}, "'prompt' is not text"),
        ({"prompt": "p", "completion": None}, "'completion' is missing"),
        ({"instruction": "i", "input": 3, "output": "x"}, "'input' is not text"),
        ({"messages": "no"}, "'messages' must be a list"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "'content' is not text"),
        ({"messages": [{"role": "assistent", "content": "x"}]}, "did you mean 'assistant'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}, "no function name"),
        ({"messages": [{"role": "assistant", "tool_calls": "add"}]}, "'tool_calls' must be a list"),
        ({"messages": [USER], "tools": ["add"]}, "'tools' must be a list"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "unknown speaker 'robot'"),
    ],
)
def test_rows_of_no_known_form_are_unusable(row: dict[str, Any], words: str) -> None:
    with pytest.raises(UnusableRow, match=words):
        interpret(row, "auto")
