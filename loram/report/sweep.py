"""The results of a sweep as a table, as CSV and as pictures.

A result is a mapping with `labels` (axis → value), `error`, `variants` (name → set → loss and perplexity),
`share_of_full_lora_gain` (name → set → share) and `stages` (name → seconds and numbers).
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loram.errors import InputError

Result = Mapping[str, Any]


def table(results: Sequence[Result], over: str | None = None) -> tuple[list[str], list[list[str]]]:
    """Header and rows: axes, perplexity of every variant on every set, shares of full LoRA's gain, and seconds.

    Args:
        results: of all points.
        over: an axis whose values are runs of the same experiment (a seed): one row for all of them, each number with
            its mean and standard deviation (n - 1).
    """
    axes = [axis for axis in _axes(results) if axis != over]
    measured = list(dict.fromkeys(column for result in results for column in _numbers(result)))
    rows = []
    for labels, group in _grouped(results, axes).items():
        sound = [_numbers(result) for result in group if result["error"] is None]
        failed = [str(result["error"]).splitlines()[0] for result in group if result["error"] is not None]
        cells = [_cell([numbers[column] for numbers in sound if column in numbers], column) for column in measured]
        rows.append([*labels, *cells, "; ".join(failed)])
    header = [*axes, *measured, "error"]
    if not any(row[-1] for row in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    return header, rows


def flat(results: Sequence[Result]) -> str:
    """Everything as CSV, a point a row; columns are dotted names."""
    rows = [_flattened(result) for result in results]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def draw(results: Sequence[Result], folder: Path, over: str | None = None) -> list[Path]:
    """A picture of each set: what the last adapter on the base is worth, by the first numeric axis, or as bars.

    That is its share of full LoRA's gain where every point has one, else its loss in nats a token. Needs matplotlib.

    Raises:
        InputError: a file cannot be written.
    """
    from matplotlib.figure import Figure

    sound = [result for result in results if result["error"] is None]
    sets = list(dict.fromkeys(name for result in sound for of in result["variants"].values() for name in of))
    axes = [axis for axis in _axes(sound) if axis != over]
    numeric = next((axis for axis in axes if all(_is_number(result["labels"][axis]) for result in sound)), None)
    others = [axis for axis in axes if axis != numeric]
    drawn = []
    for name in sets:
        what, worth = _worth(sound, name)
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        plot = figure.add_subplot()
        for labels, group in _grouped(sound, others).items():
            text = ", ".join(labels) or "all"
            if numeric is None:
                plot.barh(text, statistics.fmean(map(worth, group)))
                continue
            by_value: dict[float, list[float]] = {}
            for result in group:
                by_value.setdefault(float(result["labels"][numeric]), []).append(worth(result))
            places = sorted(by_value)
            plot.plot(places, [statistics.fmean(by_value[place]) for place in places], marker="o", label=text)
        if numeric is None:
            plot.invert_yaxis()
            plot.set_xlabel(what)
        else:
            plot.set_xlabel(numeric)
            plot.set_ylabel(what)
            if others:
                plot.legend(frameon=False)
        path = folder / f"{name}.svg"
        try:
            figure.savefig(path)
        except OSError as error:
            raise InputError(f"Cannot write {path}: {error}", fix="Choose another folder with --out.") from error
        drawn.append(path)
    return drawn


def _axes(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(axis for result in results for axis in result["labels"]))


def _grouped(results: Sequence[Result], axes: Sequence[str]) -> dict[tuple[str, ...], list[Result]]:
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(tuple(result["labels"][axis] for axis in axes), []).append(result)
    return groups


def _numbers(result: Result) -> dict[str, float]:
    """What the table shows of a point, by column."""
    variants = result["variants"]
    sets = list(dict.fromkeys(name for of in variants.values() for name in of))
    prefix = {name: f"{name}: " if len(sets) > 1 else "" for name in sets}
    found = {f"{prefix[name]}{label}": of[name]["perplexity"] for name in sets for label, of in variants.items()}
    for label, of in result["share_of_full_lora_gain"].items():
        found |= {f"{prefix[name]}{label}, share": share for name, share in of.items()}
    if result["stages"]:
        found["seconds"] = sum(stage["seconds"] for stage in result["stages"].values())
    return found


def _cell(values: Sequence[float], column: str) -> str:
    if not values:
        return ""
    form = "{:.0%}" if column.endswith("share") else "{:,.0f}" if column == "seconds" else "{:.3f}"
    mean = form.format(statistics.fmean(values))
    return f"{mean} ± {form.format(statistics.stdev(values))}" if len(values) > 1 else mean


def _flattened(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: "" if value is None else value}
    inner = [_flattened(item, f"{prefix}.{name}" if prefix else str(name)) for name, item in value.items()]
    return {name: item for part in inner for name, item in part.items()}


def _worth(results: Sequence[Result], name: str) -> tuple[str, Callable[[Result], float]]:
    """What a picture shows of the last variant that is an adapter on the base, and its words."""

    def share(result: Result) -> float | None:
        shares = result["share_of_full_lora_gain"]
        return _last(shares).get(name) if shares else None

    def loss(result: Result) -> float:
        return float(_last({k: v for k, v in result["variants"].items() if k.startswith("base + ")})[name]["loss"])

    if any(share(result) is None for result in results):
        return f"nats a token on {name}", loss
    return f"share of full LoRA's gain on {name}", lambda result: float(share(result) or 0)


def _last(of: Mapping[str, Any]) -> Any:
    return list(of.values())[-1]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
