"""The order of the stages: which artifact each needs, what it is called, and whether it has to be made."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loram import processes
from loram.artifact import Artifact, file_digest, fingerprint
from loram.data import sources
from loram.data.templates import known_template
from loram.errors import InputError, RecipeError
from loram.models import source
from loram.progress import logger
from loram.recipe import PERPLEXITY_FOLDER, TOKENS_FOLDER, Recipe, TrainingSection
from loram.store import ArtifactStore, Key
from loram.training.reporters import require_reporters

from .graph import BASELINE, STAGES, evaluated, small_model
from .work import Work

# Files of a model or adapter folder that tell about it, and change nothing that is computed from it.
_NO_INFLUENCE = {"manifest.json", "history.jsonl", "README.md", "LICENSE"}
# Of free memory that a stage may fill; the rest is for the process itself and the page cache.
_SHARE_OF_FREE = 0.8
_IN_SEVERAL_PROCESSES = {"align", "train"}
# Stages that nobody has to run by themselves.
_MADE_WHEN_NEEDED = {"base", "score", "anchor"}
# Those that start from what the stage that needs them starts from.
_BESIDE = {"score": "prune", "anchor": "train"}
# Bytes taken as free where the system does not tell.
_UNKNOWN = 8 << 30


@dataclass(frozen=True)
class Node:
    """A stage of a recipe; the baseline's stages are nodes of the baseline recipe."""

    stage: str
    recipe: Recipe
    baseline: bool = False

    @property
    def label(self) -> str:
        """The stage's name as shown to people."""
        return f"{self.stage} (baseline)" if self.baseline else self.stage


@dataclass(frozen=True)
class Made:
    """A finished stage: its artifact, and whether it was there already."""

    node: Node
    artifact: Artifact
    cached: bool


class Pipeline:
    """Runs stages of a recipe against a store.

    Args:
        recipe: the experiment.
        store: where artifacts are.
        given: a folder to use instead of an upstream stage's output (`--from`), for one stage's main input.
        download: whether a base that is a Hub id may be fetched.
        force: whether stages go on where memory or disk look too small.
        memory: bytes of host memory for what runs one layer at a time; None: most of what is free.
    """

    def __init__(
        self,
        recipe: Recipe,
        store: ArtifactStore,
        given: tuple[str, Path] | None = None,
        download: bool = True,
        force: bool = False,
        memory: int | None = None,
    ) -> None:
        self.recipe = recipe
        self.store = store
        self._given = given
        self._download = download
        self._force = force
        self.given_memory = memory
        self._fingerprints: dict[Path, str] = {}
        self._keys: dict[tuple[str, str], Key] = {}

    @property
    def tokens(self) -> Path:
        """The folder of tokenized data sets, shared by all recipes."""
        return self.store.root / TOKENS_FOLDER

    def nodes(self) -> list[Node]:
        """Every stage that `run` makes, upstream first."""
        return list(self._upstream_first(self._last()))

    def node(self, name: str) -> Node:
        """The node of a stage of the recipe itself."""
        return Node(name, self.recipe)

    def _last(self) -> Node:
        return self.node("evaluate" if self.recipe.evaluate.datasets else "merge")

    def _upstream_first(self, last: Node) -> Iterator[Node]:
        seen: set[str] = set()

        def visit(node: Node) -> Iterator[Node]:
            if self._external(node) is not None or self.key(node).fingerprint in seen:
                return
            seen.add(self.key(node).fingerprint)
            for _, upstream in self._inputs(node):
                yield from visit(upstream)
            yield node

        yield from visit(last)

    def _inputs(self, node: Node) -> Iterator[tuple[str, Node]]:
        for role, name in STAGES[node.stage].inputs(node.recipe).items():
            if name.startswith(BASELINE):
                yield role, Node(name.removeprefix(BASELINE), node.recipe.baseline(), baseline=True)
            else:
                yield role, Node(name, node.recipe, node.baseline)

    def _external(self, node: Node) -> Path | None:
        """The folder of a base that is used where it lies; None for what the store holds."""
        if node.stage == "base" and not source.needs_conversion(node.recipe.model):
            return source.find_folder(node.recipe.model, self._download)
        return None

    def _replaced(self, node: Node, role: str) -> Path | None:
        """The `--from` folder, if it stands in for this input."""
        if self._given is None or role != STAGES[node.stage].main:
            return None
        stage, folder = self._given
        return folder if stage in (node.stage, _BESIDE.get(node.stage)) else None

    def key(self, node: Node) -> Key:
        """What the artifact of a node is called: needs upstream fingerprints, not upstream artifacts."""
        marker = (node.stage, node.recipe.to_yaml())
        if marker not in self._keys:
            self._keys[marker] = self._key(node)
        return self._keys[marker]

    def _key(self, node: Node) -> Key:
        here = STAGES[node.stage]
        inputs = {}
        for role, upstream in self._inputs(node):
            folder = self._replaced(node, role) or self._external(upstream)
            inputs[role] = self.key(upstream).fingerprint if folder is None else self._folder_fingerprint(folder)
        settings = here.settings(node.recipe)
        value = {"stage": here.name, "version": here.version, "settings": settings, "inputs": inputs}
        return Key(node.recipe.name, here.name, here.version, settings, inputs, fingerprint(value))

    def _folder_fingerprint(self, folder: Path) -> str:
        """Of a folder used where it lies: its weights' identity and every other file, whatever a manifest says."""
        if folder not in self._fingerprints:
            from loram.checkpoint import CheckpointReader, side_files  # torch, which other runs can spare

            adapter = (folder / "adapter_config.json").is_file()
            name = "adapter_model.safetensors" if adapter else "model.safetensors"
            with CheckpointReader(folder, single=name) as reader:
                identity = reader.identity()
            files = {p.name: file_digest(p) for p in side_files(folder) if p.name not in _NO_INFLUENCE}
            self._fingerprints[folder] = fingerprint({"weights": identity, "files": files})
        return self._fingerprints[folder]

    def find(self, node: Node) -> Artifact | None:
        """The node's artifact, if it is finished."""
        return self.store.find(self.key(node))

    def folder(self, node: Node) -> Path:
        """Where a node's output lies; what nobody has to make by hand is made.

        Raises:
            InputError: the stage has not been run for this recipe; says how to.
        """
        external = self._external(node)
        if external is not None:
            return external
        if node.stage in _MADE_WHEN_NEEDED:
            return self.make(node).artifact.path
        artifact = self.find(node)
        if artifact is None:
            raise InputError(
                f"The output of '{node.stage}' is needed first, and this recipe has none under {self.store.root}.",
                fix=f"Run `loram {node.stage}` or `loram run` with the same recipe, or give --from FOLDER.",
            )
        return artifact.path

    def make(self, node: Node, remake: bool = False) -> Made:
        """Runs one stage unless its artifact is there, or always and from its beginning with `remake`.

        Its inputs must be there.

        Raises:
            LoramError: whatever the stage refuses; the store is left as it was.
        """
        main = STAGES[node.stage].main
        if self._given is not None and self._given[0] == node.stage and main not in dict(self._inputs(node)):
            raise InputError(
                f"'{node.stage}' starts from no {main} in this recipe, so --from has nothing to stand in for.",
                fix="Leave --from out, or set polish.start=recovered.",
            )
        key = self.key(node)
        found = None if remake else self.store.find(key)
        if found is not None:
            return Made(node, found, cached=True)
        if processes.count() > 1 and node.stage not in _IN_SEVERAL_PROCESSES:
            raise InputError(
                f"'{node.stage}' runs in one process.",
                fix=f"Run `loram {node.stage}` first, without torchrun or --launch.",
            )
        processes.join()
        with processes.first():
            inputs = {
                role: self._replaced(node, role) or self.folder(upstream) for role, upstream in self._inputs(node)
            }
        logger.info("%s …", node.label)
        with contextlib.ExitStack() as stack:
            with processes.first():
                opened = self.store.open(key, anew=remake) if processes.is_writer() else self.store.follow(key)
                draft = stack.enter_context(opened)
            importlib.import_module(f".{node.stage}", __package__).run(
                Work(
                    node.recipe,
                    inputs,
                    draft,
                    self.memory(),
                    self._force,
                    tokens=self.tokens,
                    perplexity=self.store.root / PERPLEXITY_FOLDER,
                    anew=remake,
                )
            )
            processes.wait()
        if not processes.is_writer():
            raise SystemExit(0)
        made = self.store.find(key)
        assert made is not None
        return Made(node, made, cached=False)

    def memory(self) -> int:
        """Bytes of host memory that layer-by-layer work may use."""
        from loram.memory.measured import available_memory

        if self.given_memory is not None:
            return self.given_memory
        return int((available_memory() or _UNKNOWN) * _SHARE_OF_FREE)

    def run(self, done: Callable[[Made], None]) -> list[Made]:
        """Makes everything the recipe asks for, skipping what is there."""
        check(self.recipe)
        results = []
        for node in self.nodes():
            results.append(self.make(node))
            done(results[-1])
        return results


def check(recipe: Recipe) -> None:
    """Refuses what would fail late: no training data, files or packages that are not there (before any work)."""
    if not (recipe.train if recipe.small else recipe.polishing).datasets:
        raise RecipeError("train.datasets is empty.", fix="Name a data set, e.g. train.datasets=rows.jsonl")
    if recipe.evaluate.datasets and recipe.evaluate.baseline and not recipe.train.datasets:
        raise RecipeError(
            "train.datasets is empty, which evaluate.baseline trains on.",
            fix="Name a data set, e.g. train.datasets=rows.jsonl, or leave evaluate.baseline out.",
        )
    known_template(recipe.data.chat_template)
    if recipe.evaluate.datasets:
        evaluated(recipe)
    sections: list[TrainingSection] = []
    if recipe.small:
        sections.append(recipe.train)
        if small_model(recipe) == "align":
            sections.append(recipe.align)
    if recipe.polish.max_steps != 0:
        sections.append(recipe.polishing)
    named = [set_ for section in sections for set_ in (*section.datasets, *section.eval_datasets.values())]
    named += recipe.evaluate.datasets.values()
    if recipe.small and recipe.prune.calibration is not None and recipe.prune.runs_model:
        named.append(recipe.prune.calibration)
    if recipe.scale.dataset is not None:
        named.append(recipe.scale.dataset)
    for dataset in named:
        sources.check(dataset)
    require_reporters([name for section in sections for name in section.report_to])
