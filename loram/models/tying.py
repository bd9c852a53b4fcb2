"""Tied embeddings: what the config says against what is stored, so that what we write agrees with itself."""

from __future__ import annotations

from typing import Literal

from transformers import PretrainedConfig

from loram.checkpoint import CheckpointReader
from loram.models.architecture import Architecture


def head_tying(
    reader: CheckpointReader, architecture: Architecture, config: PretrainedConfig
) -> Literal["untied", "absent", "copy", "differs"]:
    """How the output head is stored.

    Returns:
        `untied`: the config ties nothing. `absent`: tied, and only the embedding is stored. `copy`: tied, and the
        stored head equals the embedding. `differs`: the config says tied, but a head of its own is stored; the
        head is what the model computes with, so the flag is wrong.
    """
    if not config.tie_word_embeddings:
        return "untied"
    head, embedding = f"{architecture.head}.weight", f"{architecture.embedding}.weight"
    if head not in reader:
        return "absent"
    return "copy" if reader.equal(head, embedding) else "differs"
