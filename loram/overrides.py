"""`section.key=value` on a mapping that pydantic validates, and what it says about one that is not valid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from loram.errors import RecipeError, did_you_mean


def apply(raw: dict[str, Any], override: str, schema: type[BaseModel]) -> None:
    """Sets one key of a mapping that is to become a `schema`, in place; mappings and lists on the way are made.

    Raises:
        RecipeError: no `key=value`, no YAML, or no such place in what is there.
    """
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise RecipeError(f"'{override}' is not an override.", fix="Write it as section.key=value.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"The value of '{override}' is not valid YAML.", fix="Quote it.") from error
    *parents, last = key.split(".")
    node: Any = raw
    for depth, parent in enumerate(parents, 1):
        child = _child(node, parent, override)
        if child is None:
            child = _put(node, parent, [] if _holds_list(parents[:depth], schema) else {}, override)
        elif _holds_list(parents[:depth], schema) and not isinstance(child, list):
            child = _put(node, parent, [child], override)
        elif isinstance(node, list) and isinstance(child, str):
            child = _put(node, parent, {"path": child}, override)
        if not isinstance(child, dict | list):
            raise RecipeError(f"'{parent}' in '{override}' has no keys below it.", fix="Check the dotted path.")
        node = child
    _put(node, last, value, override)


def _child(node: Any, key: str, override: str) -> Any:
    """What a mapping or list holds under a key; None where there is nothing yet."""
    if isinstance(node, dict):
        return node.get(key)
    number = _position(node, key, override)
    return node[number] if number < len(node) else None


def _put(node: Any, key: str, value: Any, override: str) -> Any:
    if isinstance(node, dict):
        node[key] = value
    else:
        number = _position(node, key, override)
        node[number : number + 1] = [value]
    return value


def _position(items: list[Any], key: str, override: str) -> int:
    """The place in a list that a key names; one behind the last appends."""
    if not key.isdigit() or int(key) > len(items):
        raise RecipeError(
            f"'{key}' in '{override}' is no item of a list of {len(items)}.",
            fix=f"Count from 0; {len(items)} adds an item.",
        )
    return int(key)


def _holds_list(path: Sequence[str], schema: type[BaseModel]) -> bool:
    """Whether the schema's field at a dotted path is a list of sections."""
    section = schema
    for part in path[:-1]:
        found = _sections_in(section.model_fields[part].annotation) if part in section.model_fields else []
        if not found:
            return False
        section = found[0]
    field = section.model_fields.get(path[-1])
    return field is not None and get_origin(field.annotation) is list and bool(_sections_in(field.annotation))


def explain(error: ValidationError, schema: type[BaseModel]) -> str:
    """What is wrong, a line a problem: where, and for a key that is not known the nearest one that is."""
    lines = []
    for problem in error.errors():
        where = [str(part) for part in problem["loc"]]
        dotted = ".".join(where)
        if problem["type"] == "extra_forbidden":
            known = _fields_at(where[:-1], schema)
            lines.append(f"  {dotted}: unknown key{did_you_mean(where[-1], known)}")
        else:
            lines.append(f"  {dotted or 'recipe'}: {problem['msg'].removeprefix('Value error, ')}")
    return "\n".join(lines)


def _fields_at(path: Sequence[str], schema: type[BaseModel]) -> list[str]:
    """Names of the fields of the section a dotted path leads to."""
    section = schema
    for part in path:
        field = section.model_fields.get(part)
        candidates = [] if field is None else _sections_in(field.annotation)
        if candidates:
            section = candidates[0]
    return list(section.model_fields)


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in _sections_in(part)]
