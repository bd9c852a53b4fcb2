"""loram scale RECIPE: the factor, for each kind of projection, at which the adapter helps the full model most.

Forward only, one layer of the model in memory at a time; what helps on held-out rows is folded into the adapter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loram.adapter.folder import Adapter
from loram.adapter.scale import Search, search, write_scaled
from loram.checkpoint import CheckpointReader, copy_side_files
from loram.data.cache import tokenized
from loram.data.encode import Encoder, resolve_template
from loram.data.packing import Batch, PackedRows, batches, trimmed
from loram.errors import DataError, InputError
from loram.memory.measured import peak_bytes, reset_peak
from loram.memory.units import size
from loram.models.layerwise import LayerwiseModel
from loram.models.loading import Precision, load_tokenizer, require_vocabulary, resolve_dtype
from loram.progress import logger
from loram.pruning.plan import PLAN_NAME, PruningPlan

from .training import pad_id
from .work import Work


def run(work: Work) -> None:
    """Does the stage's work."""
    section = work.recipe.scale
    folder, base = work.inputs["adapter"], work.inputs["base"]
    _require_base(work, folder, base)
    with Adapter(folder) as adapter:
        adapter.require_trained()
        if adapter.is_dora or not adapter.modules:
            what = "a DoRA, whose magnitudes belong to one scale" if adapter.is_dora else "whole tensors only"
            raise InputError(
                f"{folder} holds {what}, so there is nothing to scale.", fix="Leave scale.dataset out, or use a LoRA."
            )
        work.require_disk(2 * adapter.reader.nbytes, "scale")  # what is scaled becomes float32
        tokenizer = load_tokenizer(folder if (folder / "tokenizer_config.json").is_file() else base)
        chosen, check = _rows(work, tokenizer)
        reset_peak()
        precision = Precision(resolve_dtype("auto"))
        with LayerwiseModel(base, precision, work.memory, work.draft.scratch / "hidden", folder) as engine:
            require_vocabulary(engine.model, tokenizer)
            found = search(engine, chosen, check, section.grid, section.per_kind)
            if engine.spilled:
                logger.info("scale: %s of hidden states went through the disk", size(engine.spilled))
        work.draft.digests |= write_scaled(adapter, found.factors, work.out)
    copy_side_files(folder, work.out)
    if (folder / PLAN_NAME).is_file():
        PruningPlan.load(folder).save(work.out)
    _tell(work, found)
    work.draft.metrics |= found.metrics() | peak_bytes()


def _require_base(work: Work, folder: Path, base: Path) -> None:
    if not (folder / PLAN_NAME).is_file():
        work.note("the adapter has no plan.json, so only shapes were checked, not that the base is the right one")
        return
    with CheckpointReader(base) as reader:
        PruningPlan.load(folder).require_base(reader.identity(), str(base))


def _rows(work: Work, tokenizer: Any) -> tuple[list[Batch], list[Batch]]:
    """Packed rows to choose on, and others to check on, one a batch."""
    section = work.recipe.scale
    assert section.dataset is not None  # the stage is skipped without
    data = work.recipe.data
    encoder = Encoder(tokenizer, resolve_template(data.chat_template, tokenizer), section.max_length, data.loss)
    rows = PackedRows(
        tokenized(section.dataset, encoder, work.tokens), section.max_length, pad_id(tokenizer), section.seed
    )
    taken = min(len(rows), section.rows)
    if taken < 2:
        raise DataError(
            f"scale.dataset: {section.dataset.path} fills 1 packed row; one is needed to choose on, one to check on.",
            fix="Name a larger data set, or lower scale.max_length.",
        )
    checked = min(max(1, round(taken * section.check_share)), taken - 1)
    found = [trimmed(batch) for _, batch in zip(range(taken), batches(rows, 1), strict=False)]
    return found[:-checked], found[-checked:]


def _tell(work: Work, found: Search) -> None:
    """Notes, and a paragraph of the model card."""
    factors = ", ".join(f"{kind} × {factor:g}" for kind, factor in found.found.items() if factor != 1)
    (before, after), tokens = found.check, found.check[0].tokens
    if not factors:
        work.note("no factor of the grid lowers the loss; the adapter stays as it is")
        return
    change = f"{before.loss:.4f} → {after.loss:.4f} nats a token on {tokens:,} tokens that had no part in the choice"
    if not found.helps:
        work.note(f"{factors} does not hold up ({change}): all factors are 1, the adapter stays as it is")
        return
    work.note(f"{factors}: {change}")
    card = work.out / "README.md"
    if card.is_file():
        text = f"\nIts B matrices were scaled on the full model ({factors}): {change}.\n"
        card.write_text(card.read_text(encoding="utf-8") + text, encoding="utf-8")
