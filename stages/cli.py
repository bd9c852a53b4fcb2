"""The command line. Results go to stdout, progress and messages to stderr; heavy imports happen inside commands.

Exit codes: 0 ok, 1 failed, 2 bad usage or recipe, 3 doesn't fit memory or disk, 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from loram.recipe import Recipe

    from .pipeline import Made, Pipeline

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train a LoRA on a pruned model, use it on the full one (LoRAM, arXiv 2502.13533).",
)
recipe_app = typer.Typer(no_args_is_help=True, help="Look at recipes.")
app.add_typer(recipe_app, name="recipe")
data_app = typer.Typer(no_args_is_help=True, help="Look at data.")
app.add_typer(data_app, name="data")

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file, e.g. recipes/tiny.yaml.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Recipe overrides.")]
Root = Annotated[Path, typer.Option("--artifacts", envvar="LORAM_ARTIFACTS", help="Where stage outputs are kept.")]
From = Annotated[
    Path | None, typer.Option("--from", help="Folder to start from instead of the upstream stage's output.")
]
Remake = Annotated[
    bool, typer.Option("--remake", help="Make it again from the beginning, even if it is there or begun.")
]
Force = Annotated[bool, typer.Option("--force", help="Go on although memory or disk look too small.")]
Memory = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Host memory to stay within (8GiB); default: most of what is free."),
]
Launch = Annotated[
    Path | None,
    typer.Option("--launch", metavar="FILE", help="Run in several processes, by an accelerate configuration file."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no messages, only the result.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and every training step.")]
_ROOT = Path("artifacts")


class Sharding(Enum):
    """How several devices share a model."""

    fsdp = "fsdp"
    ddp = "ddp"


class DataOf(Enum):
    """Where in the recipe a data set stands."""

    train = "train"
    align = "align"
    calibration = "calibration"
    scale = "scale"
    eval = "eval"


def main() -> None:
    """Entry point: runs a command and turns errors into one message and an exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    debug = "--debug" in sys.argv
    try:
        app()
    except KeyboardInterrupt:
        _fail("Interrupted.", 130)
    except Exception as error:
        from loram.errors import LoramError

        if debug:
            raise
        if isinstance(error, LoramError):
            _fail(str(error), error.exit_code)
        _fail(f"unexpected {type(error).__name__}: {error}\n  → Run again with --debug to see where.", 1)


def _fail(message: str, code: int) -> None:
    print(f"loram: {message}", file=sys.stderr)
    # The default traceback machinery is not wanted, and buffered results must still come out.
    sys.stdout.flush()
    raise SystemExit(code)


@app.command()
def score(
    recipe: RecipePath, overrides: Overrides = None, source: From = None, artifacts: Root = _ROOT,
    remake: Remake = False, force: Force = False, memory: Memory = None, as_json: AsJson = False,
    quiet: Quiet = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Score the base model's units by the recipe's criterion; `prune` does it where it is needed."""
    _stage("score", recipe, overrides, source, artifacts, remake, force, as_json, quiet, debug, memory)


@app.command()
def prune(
    recipe: RecipePath, overrides: Overrides = None, source: From = None, artifacts: Root = _ROOT,
    remake: Remake = False, force: Force = False, memory: Memory = None, as_json: AsJson = False,
    quiet: Quiet = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Cut the base model to the units that score highest."""
    _stage("prune", recipe, overrides, source, artifacts, remake, force, as_json, quiet, debug, memory)


@app.command()
def align(
    recipe: RecipePath, overrides: Overrides = None, source: From = None, artifacts: Root = _ROOT,
    launch: Launch = None,
    remake: Remake = False, force: Force = False, as_json: AsJson = False, quiet: Quiet = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Continue pre-training of the pruned model for a short while."""
    if launch is not None:
        _launch(launch)
        return
    _stage("align", recipe, overrides, source, artifacts, remake, force, as_json, quiet, debug)


@app.command()
def anchor(
    recipe: RecipePath, overrides: Overrides = None, source: From = None, artifacts: Root = _ROOT,
    remake: Remake = False, force: Force = False, memory: Memory = None, as_json: AsJson = False,
    quiet: Quiet = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Note what the full model computes otherwise on the training rows; `train` does it where it is needed."""
    _stage("anchor", recipe, overrides, source, artifacts, remake, force, as_json, quiet, debug, memory)


@app.command()
def train(
    recipe: RecipePath, overrides: Overrides = None, source: From = None, artifacts: Root = _ROOT,
    launch: Launch = None,
    remake: Remake = False, force: Force = False, as_json: AsJson = False, quiet: Quiet = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Train a LoRA on the quantized small model."""
    if launch is not None:
        _launch(launch)
        return
    _stage("train", recipe, overrides, source, artifacts, remake, force, as_json, quiet, debug)


@app.command()
def recover(
    recipe: RecipePath, overrides: Overrides = None, source: From = None, artifacts: Root = _ROOT,
    remake: Remake = False, force: Force = False, as_json: AsJson = False, quiet: Quiet = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Scatter the trained adapter back to the base model's shapes."""
    _stage("recover", recipe, overrides, source, artifacts, remake, force, as_json, quiet, debug)


@app.command()
def polish(
    recipe: RecipePath, overrides: Overrides = None, source: From = None, artifacts: Root = _ROOT,
    remake: Remake = False, force: Force = False, memory: Memory = None, as_json: AsJson = False,
    quiet: Quiet = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Train the recovered adapter a little more on the full model, one layer of it in memory."""
    _stage("polish", recipe, overrides, source, artifacts, remake, force, as_json, quiet, debug, memory)


@app.command()
def scale(
    recipe: RecipePath, overrides: Overrides = None, source: From = None, artifacts: Root = _ROOT,
    remake: Remake = False, force: Force = False, memory: Memory = None, as_json: AsJson = False,
    quiet: Quiet = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Find the factors of the adapter's scale that help the full model on held-out rows."""
    _stage("scale", recipe, overrides, source, artifacts, remake, force, as_json, quiet, debug, memory)


@app.command()
def merge(
    recipe: RecipePath, overrides: Overrides = None, source: From = None, artifacts: Root = _ROOT,
    remake: Remake = False, force: Force = False, as_json: AsJson = False, quiet: Quiet = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Merge the adapter onto the base model."""
    _stage("merge", recipe, overrides, source, artifacts, remake, force, as_json, quiet, debug)


@app.command()
def evaluate(
    recipe: RecipePath, overrides: Overrides = None, source: From = None, artifacts: Root = _ROOT,
    remake: Remake = False, force: Force = False, memory: Memory = None, as_json: AsJson = False,
    quiet: Quiet = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Perplexity of every variant; with --from, of one model or adapter folder."""
    if source is None:
        _stage("evaluate", recipe, overrides, None, artifacts, remake, force, as_json, quiet, debug, memory)
        return
    loaded, pipeline = _open(recipe, overrides, artifacts, quiet, debug, memory=memory)
    from .evaluate import evaluate_folder

    folder = _existing(source)
    results = evaluate_folder(
        loaded, folder, lambda: pipeline.folder(pipeline.node("base")), pipeline.memory(), pipeline.tokens
    )
    if as_json:
        _print_json(results)
        return
    for name, result in results.items():
        print(f"{name}: perplexity {result['perplexity']:.3f} on {result['tokens']:,} tokens")


@app.command()
def run(
    recipe: RecipePath, overrides: Overrides = None, artifacts: Root = _ROOT, force: Force = False,
    memory: Memory = None, as_json: AsJson = False, quiet: Quiet = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Run every stage of a recipe, skipping what is there."""
    _, pipeline = _open(recipe, overrides, artifacts, quiet, debug, force=force, memory=memory)
    show = not as_json

    def done(made: Made) -> None:
        if show:
            _print_made(made, details=not made.cached or made.node.stage == "evaluate")

    results = pipeline.run(done)
    if as_json:
        _print_json([_summary(made) for made in results])
    elif all(made.cached for made in results):
        print("Nothing to do: every stage of this recipe is up to date.")


@app.command()
def sweep(
    recipe: RecipePath,
    grid: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=A,B,C]...", help="Axes of the grid; with one value, an override for all."),
    ] = None,
    variants: Annotated[
        Path | None, typer.Option(help="YAML file, NAME: {section.key: value}: an axis that changes several keys.")
    ] = None,
    over: Annotated[
        str | None, typer.Option(help="Axis to take mean and deviation over in the table, e.g. train.seed.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="What the pictures show quality against: weight_bytes, flops, seconds, tokens, …"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for tables and pictures.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what is there and what would be made.")] = False,
    artifacts: Root = _ROOT, force: Force = False, memory: Memory = None, as_json: AsJson = False,
    quiet: Quiet = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Run a grid of recipes, sharing what is equal, and compare them in one table."""
    from loram.errors import RecipeError
    from loram.report.sweep import COSTS

    from . import sweep as sweeping

    points = sweeping.grid(recipe, grid or (), variants)
    if over is not None and over not in points[0].labels:
        raise RecipeError(f"--over {over}: no axis of the grid.", fix=f"Its axes: {', '.join(points[0].labels)}.")
    if against is not None and against not in COSTS:
        raise RecipeError(f"--against {against}: no stage records that.", fix=f"One of {', '.join(COSTS)}.")
    _, first = _open(recipe, points[0].overrides, artifacts, quiet, debug, force=force, memory=memory)

    def pipeline(of: Recipe) -> Pipeline:
        return type(first)(of, first.store, force=force, memory=first.given_memory)

    if dry_run:
        for point in points:
            print(", ".join(f"{axis}={value}" for axis, value in point.labels.items()) or "the recipe as it is")
        for stage, (there, missing) in sweeping.outstanding(points, pipeline).items():
            print(f"{stage:<19} {there} there, {missing} to make")
        return

    def done(point: sweeping.Point, made: Made) -> None:
        if not made.cached and not as_json:
            print(", ".join(point.labels.values()), end=": ")
            _print_made(made, details=False)

    results = sweeping.run(points, pipeline, done)
    folder = out or artifacts / points[0].recipe.name / sweeping.folder_of(points)
    _write_sweep(results, folder, over, against)
    if as_json:
        _print_json(results)
    else:
        print((folder / "results.md").read_text(encoding="utf-8"))
        print(folder)
    failed = [result for result in results if result["error"] is not None]
    if failed:
        _fail(f"{len(failed)} of {len(results)} points failed; the table says why.", 1)


def _write_sweep(results: list[dict[str, Any]], folder: Path, over: str | None, against: str | None) -> None:
    from loram.errors import InputError
    from loram.report import sweep as report
    from loram.report.table import markdown_table

    texts = {
        "results.json": json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        "results.csv": report.flat(results),
        "results.md": markdown_table(*report.table(results, over, against)) + "\n",
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"Cannot write to {folder}: {error}", fix="Choose another folder with --out.") from error
    try:
        report.draw(results, folder, over, against)
    except ImportError:
        logging.getLogger("loram").warning('no pictures without matplotlib: pip install "loram[plots]"')


@app.command()
def status(
    recipe: RecipePath, overrides: Overrides = None, artifacts: Root = _ROOT, as_json: AsJson = False,
    quiet: Quiet = False, debug: Debug = False,
) -> None:  # fmt: skip
    """List artifacts, and whether the recipe as it stands would reuse them."""
    _, pipeline = _open(recipe, overrides, artifacts, quiet, debug, download=False)
    lines = []
    used = set()
    for node in pipeline.nodes():
        key = pipeline.key(node)
        artifact = pipeline.find(node)
        used.add(key.folder)
        state = "ready" if artifact else "interrupted, resumable" if pipeline.store.unfinished(key) else "to make"
        lines.append(
            {"stage": node.label, "state": state, "folder": str(pipeline.store.root / key.recipe / key.folder)}
        )
    lines += [
        {"stage": artifact.manifest.stage, "state": "of other settings", "folder": str(artifact.path)}
        for artifact in pipeline.store.all(pipeline.recipe.name)
        if artifact.path.name not in used
    ]
    if as_json:
        _print_json(lines)
        return
    for line in lines:
        print(f"{line['stage']:<19} {line['state']:<23} {line['folder']}")


@app.command()
def plan(
    recipe: RecipePath, overrides: Overrides = None, artifacts: Root = _ROOT,
    device_memory: Annotated[str | None, typer.Option(help="Does training fit so much, e.g. 20GiB?")] = None,
    devices: Annotated[int, typer.Option(min=1, help="Devices that train together.")] = 1,
    sharding: Annotated[Sharding, typer.Option(help="How they share the model.")] = Sharding.fsdp,
    card: Annotated[str, typer.Option(help="Card whose datasheet bounds the speed.")] = "rtx-4090",
    disk: Annotated[
        str, typer.Option(help="Disk that polish reads from: sata, nvme-gen3, -gen4, -gen5, or bytes a second (2GB).")
    ] = "nvme-gen4",
    stored_reduction: Annotated[
        float | None, typer.Option(min=0, help="Find the smallest ratio with this reduction in stored bytes.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the memory into this .svg or .png.")] = None,
    as_json: AsJson = False, quiet: Quiet = False, debug: Debug = False,
) -> None:  # fmt: skip
    """What a recipe keeps of the base, what that saves, and what every stage needs; needs no weights."""
    loaded, pipeline = _open(recipe, overrides, artifacts, quiet, debug, download=False)
    from loram.memory.units import parse_size
    from loram.report import chart
    from loram.report.plan import render_plan

    from . import plan as planning

    if picture is not None:
        chart.require_picture(picture)
    question = planning.Question(
        None if device_memory is None else parse_size(device_memory),
        devices,
        sharding.value,
        card,
        stored_reduction,
        disk,
    )
    planned = planning.plan(loaded, pipeline, question)
    if picture is not None:
        chart.draw_memory(planned, picture)
    if as_json:
        _print_json(planned)
    else:
        print(render_plan(planned))
    planning.require_fit(planned)


@recipe_app.command("show")
def show_recipe(recipe: RecipePath, overrides: Overrides = None, debug: Debug = False) -> None:
    """Print the resolved recipe, every default spelled out."""
    from loram.recipe import load_recipe

    print(load_recipe(recipe, overrides or ()).to_yaml(), end="")


@data_app.command("show")
def show_data(
    recipe: RecipePath, overrides: Overrides = None,
    section: Annotated[DataOf, typer.Option(help="Which of the recipe's data.")] = DataOf.train,
    name: Annotated[str | None, typer.Option(help="One evaluation set of several.")] = None,
    rows: Annotated[int, typer.Option(min=0, help="How many examples of each set.")] = 3,
    source: Annotated[
        Path | None, typer.Option("--from", help="Model folder whose tokenizer to use instead of the base's.")
    ] = None,
    artifacts: Root = _ROOT, as_json: AsJson = False, quiet: Quiet = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Tokenize data as the stages do and print counts and examples with what the loss counts."""
    loaded, pipeline = _open(recipe, overrides, artifacts, quiet, debug)
    if name is not None and section is not DataOf.eval:
        raise typer.BadParameter("only evaluation sets have names; use it with --section eval")
    from loram.report.tokens import print_sets

    from . import data

    given = None if source is None else _existing(source)
    described = data.describe(loaded, pipeline, section.value, name, rows, given)
    if as_json:
        _print_json(described)
    else:
        print_sets(described)


def _version(value: bool) -> None:
    if value:
        from loram import __version__

        print(f"loram {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options before the command."""


def _open(
    recipe: Path,
    overrides: list[str] | None,
    artifacts: Path,
    quiet: bool,
    debug: bool,
    given: tuple[str, Path] | None = None,
    download: bool = True,
    force: bool = False,
    memory: str | None = None,
) -> tuple[Recipe, Pipeline]:
    """The recipe, checked before anything heavy is imported, and its pipeline."""
    from loram import processes
    from loram.progress import set_quiet, visible
    from loram.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    quiet = quiet or not processes.is_writer()
    set_quiet(quiet)
    if not visible():
        os.environ["TQDM_DISABLE"] = "1"  # the libraries' own bars
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if not debug:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        warnings.filterwarnings("ignore", category=FutureWarning)  # between the libraries, not for the user
    logging.getLogger("loram").setLevel(logging.DEBUG if debug else logging.ERROR if quiet else logging.INFO)
    from loram.memory.units import parse_size
    from loram.store import ArtifactStore

    from .pipeline import Pipeline

    budget = None if memory is None else parse_size(memory)
    return loaded, Pipeline(loaded, ArtifactStore(artifacts), given, download, force, budget)


def _launch(config: Path) -> None:
    """Runs this very command in every process of an accelerate configuration."""
    from .launch import launch

    arguments = iter(sys.argv[1:])
    kept = []
    for argument in arguments:
        if argument == "--launch":
            next(arguments)
        elif not argument.startswith("--launch="):
            kept.append(argument)
    launch(config, kept)


def _stage(
    name: str, recipe: Path, overrides: list[str] | None, source: Path | None, artifacts: Path, remake: bool,
    force: bool, as_json: bool, quiet: bool, debug: bool, memory: str | None = None,
) -> None:  # fmt: skip
    from loram import processes

    given = None if source is None else (name, _existing(source))
    loaded, pipeline = _open(recipe, overrides, artifacts, quiet, debug, given, force=force, memory=memory)
    skipped = {}
    if loaded.align.max_steps == 0:
        skipped["align"] = "align.max_steps is 0; training starts from the pruned model"
    if loaded.polish.max_steps == 0:
        skipped["polish"] = "polish.max_steps is 0; the recovered adapter stays as it is"
    if loaded.scale.dataset is None:
        skipped["scale"] = "scale.dataset is not set; the adapter is merged as it is"
    if name in skipped:
        if as_json:
            _print_json({"stage": name, "skipped": skipped[name]})
        else:
            print(f"{name}: skipped ({skipped[name]})")
        return
    made = pipeline.make(pipeline.node(name), remake)
    if not processes.is_writer():
        return
    if as_json:
        _print_json(_summary(made))
    else:
        _print_made(made, details=True)


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        from loram.errors import RecipeError

        raise RecipeError(f"No folder at {folder}.", fix="Check the path after --from.")
    return folder


def _print_made(made: Made, details: bool) -> None:
    manifest = made.artifact.manifest
    when = "up to date" if made.cached else f"{manifest.seconds:.1f} s"
    print(f"{made.node.label:<18} {when:<11} {made.artifact.path}")
    if details:
        for note in manifest.notes:
            print("\n".join(f"  {line}" for line in note.splitlines()))
    sys.stdout.flush()


def _summary(made: Made) -> dict[str, Any]:
    manifest = made.artifact.manifest
    return {
        "stage": made.node.label,
        "folder": str(made.artifact.path),
        "fingerprint": manifest.fingerprint,
        "cached": made.cached,
        "seconds": manifest.seconds,
        "metrics": manifest.metrics,
        "notes": manifest.notes,
    }


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))
