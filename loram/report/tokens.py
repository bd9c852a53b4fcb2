"""Tokenized examples for people: what is learnt in colour on a terminal, in [[…]] elsewhere."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

_LEARNT, _CONTEXT = "bold green", "dim"


def print_sets(sets: list[dict[str, Any]]) -> None:
    """Prints what `loram data show` found; plain text where stdout is no terminal or NO_COLOR is set."""
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    console = Console(no_color=not coloured, highlight=False, markup=False, emoji=False, soft_wrap=True)
    marks = "in green" if coloured else "in [[…]]"
    console.print(f"What the loss counts is {marks}.")
    for each in sets:
        console.print()
        for line in _summary(each):
            console.print(line)
        for number, example in enumerate(each["shown"]):
            learnt = sum(example["loss"])
            console.print(f"\n  example {number}: {len(example['input_ids']):,} tokens, {learnt:,} in the loss")
            console.print(_coloured(example["runs"]) if coloured else _marked(example["runs"]))


def _summary(each: dict[str, Any]) -> list[str]:
    share = each["loss_tokens"] / each["tokens"]
    lines = [
        f"{each['set']}: {each['path']} ({each['split']})",
        f"  {each['rows']:,} rows gave {each['examples']:,} examples, {each['tokens']:,} tokens, "
        f"{each['loss_tokens']:,} of them ({share:.0%}) in the loss",
        f"  tokens an example, at most {each['max_length']:,}: "
        + ", ".join(f"{name} {length:,}" for name, length in each["lengths"].items()),
    ]
    if "weight" in each:
        lines.append(f"  weight {each['weight']:g}: {each['examples_per_epoch']:,} examples an epoch")
    lines += [f"  dropped {of['count']:,}: {reason} (first {of['first']})" for reason, of in each["dropped"].items()]
    return lines


def _coloured(runs: list[dict[str, Any]]) -> Text:
    return Text.assemble(*((run["text"], _LEARNT if run["loss"] else _CONTEXT) for run in runs))


def _marked(runs: list[dict[str, Any]]) -> str:
    return "".join(f"[[{run['text']}]]" if run["loss"] else run["text"] for run in runs)
