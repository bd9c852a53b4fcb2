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

from loram.progress import logger
from loram.report.picture import save

Result = Mapping[str, Any]

COSTS = ("seconds", "flops", "tokens", "weight_bytes", "host_peak_bytes", "device_peak_bytes")
"""Numbers that stages record and quality can be shown against."""


def table(
    results: Sequence[Result], over: str | None = None, against: str | None = None
) -> tuple[list[str], list[list[str]]]:
    """Header and rows: axes, perplexity of every variant on every set, shares of full LoRA's gain, and seconds.

    Seconds are those of all stages but the baseline's.

    Args:
        results: of all points.
        over: an axis whose values are runs of the same experiment (a seed): one row for all of them, each number with
            its mean and standard deviation (n - 1).
        against: one of `COSTS`, as one more column.
    """
    axes = [axis for axis in _axes(results) if axis != over]
    costs = list(dict.fromkeys((against or "seconds", "seconds")))
    measured = list(dict.fromkeys(column for result in results for column in _numbers(result, costs)))
    rows = []
    for labels, group in _grouped(results, axes).items():
        sound = [_numbers(result, costs) for result in group if result["error"] is None]
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


def draw(results: Sequence[Result], folder: Path, over: str | None = None, against: str | None = None) -> list[Path]:
    """A picture of each set: what the last adapter on the base is worth.

    That is its share of full LoRA's gain where every point has one, else its loss in nats a token. Needs matplotlib.

    Args:
        results: of all points.
        folder: where the pictures go, `SET.svg`.
        over: an axis to take the mean over.
        against: one of `COSTS`; each value of the first axis is a line then, its points marked
            with what else they are. Without it the first numeric axis, or bars where there is none.

    Raises:
        InputError: a file cannot be written.
    """
    from matplotlib.figure import Figure

    sound = [result for result in results if result["error"] is None]
    sets = list(dict.fromkeys(name for result in sound for of in result["variants"].values() for name in of))
    axes = [axis for axis in _axes(sound) if axis != over]
    numeric = next((axis for axis in axes if all(_is_number(result["labels"][axis]) for result in sound)), None)
    if against is not None:
        counted = [result for result in sound if cost(result, against) is not None]
        if len(counted) < len(sound):
            logger.warning(
                "%d points are not in the pictures: no stage of theirs records '%s'", len(sound) - len(counted), against
            )
        sound, lines = counted, axes[:1]
    else:
        lines = [axis for axis in axes if axis != numeric]
    drawn = []
    for name in sets:
        what, worth = _worth(sound, name)
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        plot = figure.add_subplot()
        for labels, group in _grouped(sound, lines).items():
            text = _literal(", ".join(labels) or "all")
            if against is not None:
                _line(plot, text, _points(group, axes, lambda of: cost(of, against) or 0, worth))
            elif numeric is not None:
                _line(plot, text, _points(group, [numeric], lambda of: float(of["labels"][numeric]), worth))
            else:
                plot.barh(text, statistics.fmean(map(worth, group)))
        if along := against or numeric:
            plot.set_xlabel(_literal(along))
            plot.set_ylabel(what)
            if lines:
                plot.legend(frameon=False)
        else:
            plot.invert_yaxis()
            plot.set_xlabel(what)
        path = folder / f"{name}.svg"
        save(figure, path, "--out")
        drawn.append(path)
    return drawn


def _literal(text: str) -> str:
    """What matplotlib takes as it is: no formula between dollar signs, no legend entry hidden by an underscore."""
    return text.replace("$", r"\$").removeprefix("_")


def _line(plot: Any, text: str, points: Sequence[tuple[float, float, str]]) -> None:
    """A line through points (x, y, mark) from left to right."""
    ordered = sorted(points)
    plot.plot([x for x, _, _ in ordered], [y for _, y, _ in ordered], marker="o", label=text)
    for x, y, mark in ordered:
        plot.annotate(_literal(mark), (x, y), xytext=(4, 4), textcoords="offset points", fontsize="small")


def _points(
    group: Sequence[Result], axes: Sequence[str], place: Callable[[Result], float], worth: Callable[[Result], float]
) -> list[tuple[float, float, str]]:
    """For each combination of the axes: mean place, mean worth, and the values of all axes but the first."""
    return [
        (statistics.fmean(map(place, of)), statistics.fmean(map(worth, of)), ", ".join(values[1:]))
        for values, of in _grouped(group, axes).items()
    ]


def cost(result: Result, name: str) -> float | None:
    """One of `COSTS`, of all stages but the baseline's: their sum, of peaks the highest; None if none records it."""
    stages = (of for label, of in result["stages"].items() if not label.endswith("(baseline)"))
    found = [float(of[name]) for of in stages if _is_number(of.get(name))]
    return (max if "_peak_" in name else sum)(found) if found else None


def _axes(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(axis for result in results for axis in result["labels"]))


def _grouped(results: Sequence[Result], axes: Sequence[str]) -> dict[tuple[str, ...], list[Result]]:
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(tuple(result["labels"][axis] for axis in axes), []).append(result)
    return groups


def _numbers(result: Result, costs: Sequence[str]) -> dict[str, float]:
    """What the table shows of a point, by column."""
    variants = result["variants"]
    sets = list(dict.fromkeys(name for of in variants.values() for name in of))
    prefix = {name: f"{name}: " if len(sets) > 1 else "" for name in sets}
    found = {f"{prefix[name]}{label}": of[name]["perplexity"] for name in sets for label, of in variants.items()}
    for label, of in result["share_of_full_lora_gain"].items():
        found |= {f"{prefix[name]}{label}, share": share for name, share in of.items()}
    found |= {column: value for column in costs if (value := cost(result, column)) is not None}
    return found


def _cell(values: Sequence[float], column: str) -> str:
    if not values:
        return ""
    whole = column == "seconds" or min(values) >= 1000
    form = "{:.0%}" if column.endswith("share") else "{:,.0f}" if whole else "{:.3f}"
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


def _is_number(text: Any) -> bool:
    try:
        float(text)
    except (TypeError, ValueError):
        return False
    return True
