"""From a row's columns to its content: a conversation, maybe with tools, or plain text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

from loram.errors import did_you_mean
from loram.recipe import RowType

Message = dict[str, Any]
_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    "function_call": "assistant", "observation": "tool", "tool": "tool",
}  # fmt: skip
_COLUMNS = (
    ("messages", {"messages"}),
    ("sharegpt", {"conversations"}),
    ("prompt_completion", {"prompt", "completion"}),
    ("alpaca", {"instruction", "output"}),
    ("text", {"text"}),
)


@dataclass(frozen=True)
class Example:
    """A row's content: a conversation and the tools it may call, or plain text.

    `opens` and `closes`: whether a text begins and ends here; a long file comes in several stretches.
    """

    messages: tuple[Message, ...] = ()
    text: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    opens: bool = True
    closes: bool = True


class UnusableRow(Exception):
    """A row without the columns its type needs; the message says which."""


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
        return Example((_said("user", _text(values, "prompt")), _said("assistant", _text(values, "completion"))))
    if kind == "alpaca":
        extra = _text(values, "input") if values.get("input") else ""
        prompt = _text(values, "instruction") + (f"\n\n{extra}" if extra else "")
        return Example((_said("user", prompt), _said("assistant", _text(values, "output"))))
    key = "messages" if kind == "messages" else "conversations"
    turns = _parsed(values.get(key))
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UnusableRow(f"column '{key}' must be a list of turns")
    read = _message if kind == "messages" else _sharegpt_turn
    return Example(tuple(read(turn) for turn in turns), tools=_tools(values.get("tools")))


def _guess(values: dict[str, Any]) -> RowType:
    for kind, columns in _COLUMNS:
        if columns <= values.keys():
            return cast(RowType, kind)
    raise UnusableRow(f"its columns {sorted(map(str, values))} are of no known type")


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _text(values: dict[str, Any], column: str) -> str:
    value = values.get(column)
    if not isinstance(value, str):
        raise UnusableRow(f"column '{column}' is {'missing' if value is None else 'not text'}")
    return value


def _sharegpt_turn(turn: dict[str, Any]) -> Message:
    name = _text(turn, "from")
    if name not in _SHAREGPT_ROLES:
        raise UnusableRow(f"unknown speaker '{name}'{did_you_mean(name, _SHAREGPT_ROLES)}")
    return _said(_SHAREGPT_ROLES[name], _text(turn, "value"))


def _message(turn: dict[str, Any]) -> Message:
    """A turn with everything a template may read; a table's empty cells are left out."""
    role = _text(turn, "role")
    if role not in _ROLES:
        raise UnusableRow(f"unknown speaker '{role}'{did_you_mean(role, _ROLES)}")
    message = {key: value for key, value in turn.items() if value is not None}
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = [_call(call) for call in _list_of_objects(calls, "tool_calls")]
        message.setdefault("content", "")
    if role == "tool" and isinstance(message.get("content"), dict | list):
        message["content"] = json.dumps(message["content"], ensure_ascii=False)
    _text(message, "content")
    return message


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A call as templates expect it: `function` with a `name` and `arguments` as a mapping, not as JSON text."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableRow("a call in 'tool_calls' has no function name")
    arguments = _parsed(function.get("arguments")) or {}
    rest = {key: value for key, value in call.items() if key not in {"function", "name", "arguments"} and value}
    return {**rest, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    """The `tools` column: JSON schemas of functions, bare or inside `{type: function, function: …}`."""
    if not value:
        return ()
    tools = _list_of_objects(value, "tools")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)


def _list_of_objects(value: Any, column: str) -> list[dict[str, Any]]:
    items = _parsed(value)
    items = [_parsed(item) for item in items] if isinstance(items, list) else None
    if items is None or not all(isinstance(item, dict) for item in items):
        raise UnusableRow(f"column '{column}' must be a list of objects")
    return items


def _parsed(value: Any) -> Any:
    """JSON text as the value it stands for: columns of tables hold nested values so."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
