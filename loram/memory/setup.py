"""What decides how much memory a training step takes, besides the model's sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loram.adapter.patterns import matched
from loram.memory.formats import FLOAT32
from loram.models.architecture import Projection

Method = Literal["adapter", "align", "all"]
Quantization = Literal["nf4", "fp4", "int8", "hqq4", "hqq3", "hqq2", "none"]
Optimizer = Literal["adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"]
Device = Literal["cuda", "cpu"]

ADAPTER_BYTES = FLOAT32
"""PEFT keeps adapter weights in float32 whatever the model's dtype (`autocast_adapter_dtype`)."""


def fits_float8(rows: int, columns: int) -> bool:
    """Whether a linear [rows, columns] can be multiplied in 8 bits: kernels take multiples of 16."""
    return rows % 16 == 0 == columns % 16


@dataclass(frozen=True)
class TrainingSetup:
    """One training step: `batch` rows of `length` tokens through forward, loss, backward and optimizer.

    `labelled_positions`: positions of a row whose logits are computed (`loram.training.loss`); None: all but one.
    `compute_bytes`: 2 is bfloat16 autocast, 4 float32 without autocast. `weight_bytes`: of a parameter that is not
    quantized; None: as `compute_bytes`, which is what the stages do.
    `method`: which parameters train: a LoRA, all but embedding and head (`align`), or all.
    `targets`: last names of the projections that carry a LoRA (`q_proj`), or `all`; `lora_head`: the head too;
    `dora`: with magnitudes; `lora_embedding`: the embedding too; `rank_pattern`: other ranks by module name.
    `saved_embedding`, `saved_head`: trained whole, as float32 copies beside the originals.
    `checkpoint_every`: of the layers, every so many are recomputed. `offloading`: what is kept waits on the host.
    `packed`: rows hold several examples, so attention runs by document (`loram.models.attention`).
    `accumulating`: gradients of earlier micro-batches are there already.
    `quantize_embeddings`: embedding and head in the 4-bit format too, the head then computed in chunks.
    `float8`: products of linears that train are computed in 8 bits.
    `device`: where kernels differ (attention, optimizer), which ones to count.
    """

    batch: int
    length: int
    labelled_positions: int | None = None
    compute_bytes: Literal[2, 4] = 2
    weight_bytes: Literal[2, 4] | None = None
    method: Method = "adapter"
    quantizer: Quantization = "nf4"
    double_quant: bool = True
    lora_r: int = 8
    lora_dropout: bool = False
    targets: tuple[str, ...] | Literal["all"] = "all"
    lora_head: bool = False
    dora: bool = False
    lora_embedding: bool = False
    rank_pattern: tuple[tuple[str, int], ...] = ()
    saved_embedding: bool = False
    saved_head: bool = False
    activation_checkpointing: bool = True
    checkpoint_every: int = 1
    offloading: bool = False
    optimizer: Optimizer = "adamw_torch"
    packed: bool = True
    accumulating: bool = False
    quantize_embeddings: bool = False
    float8: bool = False
    device: Device = "cuda"

    def __post_init__(self) -> None:
        if min(self.batch, self.length, self.lora_r) < 1:
            raise ValueError("batch, length and lora_r are at least 1")
        if self.method != "adapter" and self.quantizer != "none":
            raise ValueError(f"quantized weights cannot train, so method '{self.method}' needs quantizer 'none'")
        if self.method == "all" and self.quantize_embeddings:
            raise ValueError("a quantized embedding cannot train")
        if self.labelled_positions is not None and not 0 <= self.labelled_positions <= self.length:
            raise ValueError(f"labelled_positions {self.labelled_positions} are not within {self.length} tokens")

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def labelled(self) -> int:
        """Rows of the logits matrix."""
        return self.batch * (self.length - 1 if self.labelled_positions is None else self.labelled_positions)

    def recomputes(self, layer: int) -> bool:
        """Whether a decoder layer keeps its input alone."""
        return self.activation_checkpointing and layer % self.checkpoint_every == 0

    @property
    def autocast(self) -> bool:
        return self.compute_bytes != FLOAT32

    @property
    def parameter_bytes(self) -> int:
        """Of one parameter of the model that is not quantized."""
        return self.weight_bytes or self.compute_bytes

    @property
    def gradient_bytes(self) -> int:
        """Of one gradient element: torch gives a gradient its parameter's dtype."""
        return ADAPTER_BYTES if self.method == "adapter" else self.parameter_bytes

    def adapts(self, projection: Projection) -> bool:
        """Whether a projection carries a LoRA."""
        if self.method != "adapter":
            return False
        return self.targets == "all" or projection.name.rpartition(".")[2] in self.targets

    def rank(self, module: str) -> int:
        """Of a module's adapter, by its full name."""
        return matched(self.rank_pattern, module, self.lora_r)

    @property
    def adapts_head(self) -> bool:
        return self.method == "adapter" and self.lora_head

    @property
    def trains_layers(self) -> bool:
        """Projections, biases and norms move themselves."""
        return self.method != "adapter"

    @property
    def trains_vocabulary(self) -> bool:
        return self.method == "all"

    @property
    def trains_head(self) -> bool:
        """All of its weights."""
        return self.trains_vocabulary or self.saved_head

    @property
    def trains_embedding(self) -> bool:
        """All of its weights."""
        return self.trains_vocabulary or self.saved_embedding

    @property
    def vocabulary_bytes(self) -> int:
        """Of one parameter of an embedding or head that trains."""
        return ADAPTER_BYTES if self.method == "adapter" else self.parameter_bytes
