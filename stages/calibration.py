"""The rows on which prune and score run the base model."""

from __future__ import annotations

from loram.data.cache import tokenized
from loram.data.encode import Encoder, resolve_template
from loram.data.packing import Batch, PackedRows, alone
from loram.models.loading import load_tokenizer

from .training import count_pass
from .work import Work


def calibration(work: Work) -> list[Batch]:
    """Packed rows of the calibration set, one a batch, without padding."""
    prune = work.recipe.prune
    assert prune.calibration is not None  # the recipe refuses what needs it without
    tokenizer = load_tokenizer(work.inputs["base"])
    template = resolve_template(work.recipe.data.chat_template, tokenizer)
    encoder = Encoder(tokenizer, template, prune.calibration_length, work.recipe.data.loss)
    rows = PackedRows(tokenized(prune.calibration, encoder, work.tokens), prune.calibration_length, 0)
    chosen = [rows[number] for number in range(min(len(rows), prune.calibration_rows))]
    tokens = sum(int(row["tokens"]) for row in chosen)
    gradients = prune.criterion == "adapter_gradient"
    count_pass(work, work.inputs["base"], None, prune.calibration_length, tokens, gradients)
    work.note(f"calibrated on {len(chosen)} rows of {prune.calibration.path}, {tokens:,} tokens")
    return [alone(row) for row in chosen]
