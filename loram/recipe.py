"""The whole experiment as one frozen, typed value, read from YAML with dotted overrides.

Field names follow Hugging Face (`learning_rate`, `lora_alpha`, `bnb_4bit_use_double_quant`). A field marked
`watching()` does not change any result, so it does not enter a stage's fingerprint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)

from loram.errors import RecipeError, did_you_mean
from loram.overrides import apply, explain

Method = Literal["cut", "low_rank", "low_rank_attention", "low_rank_ffn"]
Criterion = Literal["random", "magnitude", "activation", "adapter_gradient"]
Budget = Literal["layer", "model"]
Quantizer = Literal["nf4", "fp4", "int8", "hqq4", "hqq3", "hqq2", "none"]
DType = Literal["auto", "float32", "bfloat16"]
Correction = Literal["none", "emloc"]
LoraInit = Literal["default", "gaussian", "pissa", "loftq"]
Reporter = Literal["tensorboard", "wandb", "trackio", "mlflow"]
RowType = Literal["auto", "text", "prompt_completion", "messages", "alpaca", "sharegpt"]
LossOn = Literal["all_assistant_turns", "last_assistant_turn"]
Evaluated = Literal["pruned", "aligned", "adapter", "recovered", "polished", "scaled", "merged"]

Seed = Annotated[int, Field(ge=0, lt=2**32)]

# Beside the recipes' folders in the artifacts, shared by all of them: tokenized data sets, and measured perplexities.
TOKENS_FOLDER = "tokens"
PERPLEXITY_FOLDER = "perplexity"

# A field that only changes what is shown or kept on the way, never the stage's result.
_WATCHING: dict[str, JsonValue] = {"watching": True}


def watching(default: Any) -> Any:
    """A recipe field without influence on results (log intervals and the like)."""
    return Field(default, json_schema_extra=_WATCHING)


# A field that came when there were artifacts already; its default is what they were made with.
_LATER: dict[str, JsonValue] = {"later": True}


def later(default: Any) -> Any:
    """A recipe field that is left out of settings while it has its default, so that what was made before is found."""
    return Field(default, json_schema_extra=_LATER)


class Section(BaseModel):
    """A frozen part of the recipe; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def settings(self) -> dict[str, Any]:
        """Every field that changes the result, as plain JSON values."""
        kept: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            if field.json_schema_extra == _WATCHING:
                continue
            value = getattr(self, name)
            if field.json_schema_extra == _LATER and value == field.default:
                continue
            kept[name] = value.settings() if isinstance(value, Section) else self._plain(value)
        return kept

    @staticmethod
    def _plain(value: Any) -> Any:
        if isinstance(value, Section):
            return value.settings()
        if isinstance(value, Mapping):
            return {key: Section._plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [Section._plain(item) for item in value]
        return value


class ModelSection(Section):
    """The base model.

    `path` is a local folder, a Hub id, a GGUF file, `package:NAME` (one inside an installed Python distribution),
    or `random:` (a model with random weights of the geometry in `config`, for trying things out).
    """

    path: str
    revision: str | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    seed: Seed = 0

    @model_validator(mode="after")
    def _random_needs_a_config(self) -> Self:
        if self.path == "random:" and "model_type" not in self.config:
            raise ValueError("path 'random:' needs a config with at least model_type")
        return self


class DatasetSection(Section):
    """One data set: `stdlib:docstrings`, `stdlib:text`, a file, a folder, a saved data set, or a Hub id.

    `name`, `split` and `revision` are the Hub's; folders have splits too. `data_files` are patterns inside the folder
    or the Hub repository. `columns` renames the file's columns to the ones `type` expects (`{prompt: question,
    completion: answer}`). `limit` keeps that many rows, drawn with `seed`. `weight` is how often an epoch has each
    example where several sets are mixed.
    """

    path: str
    name: str | None = None
    split: str = "train"
    type: RowType = "auto"
    data_files: tuple[str, ...] = ()
    columns: dict[str, str] = Field(default_factory=dict)
    weight: Annotated[float, Field(gt=0)] = 1.0
    revision: str | None = None
    limit: Annotated[int, Field(gt=0)] | None = None
    seed: Seed = 0

    @model_validator(mode="before")
    @classmethod
    def _a_path_alone_will_do(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("data_files", mode="before")
    @classmethod
    def _one_pattern_will_do(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else () if value is None else value


def _unweighted(dataset: DatasetSection) -> DatasetSection:
    if dataset.weight != 1:
        raise ValueError("weight only counts in align.datasets and train.datasets, where sets are mixed")
    return dataset


def _one_or_many(value: Any) -> Any:
    """A list of data sets may be written as one path or one mapping."""
    return [] if value is None else [value] if isinstance(value, str | Mapping) else value


def _is_a_word(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ValueError("a set's name becomes part of a metric's: letters, digits, '_' and '-' only")
    return name


MixedDatasets = Annotated[list[DatasetSection], BeforeValidator(_one_or_many)]
PlainDataset = Annotated[DatasetSection, AfterValidator(_unweighted)]
NamedDatasets = dict[Annotated[str, AfterValidator(_is_a_word)], PlainDataset]


class DataSection(Section):
    """What all stages share about text: how a conversation becomes tokens, and which of them are learnt."""

    chat_template: str = "auto"
    """`auto` (the tokenizer's own), `alpaca`, `chatml`, or the path of a Jinja file."""
    loss: LossOn = "all_assistant_turns"
    """Of a conversation: every assistant turn, or the last one only."""


class PruneSection(Section):
    """Structured pruning by the paper's geometry: whole KV groups and FFN neurons."""

    ratio: Annotated[float, Field(ge=0, lt=1)] = 0.5
    method: Method = "cut"
    """How the layers become smaller: whole units are `cut`; or every linear becomes two of `low_rank` with as many
    parameters, the best ones for what the calibration rows show it; or only those of attention or the FFN do, and of
    the other units are cut."""
    criterion: Criterion = "activation"
    """By which units are kept, and factors best: `random` (units only), weight `magnitude`, or on calibration rows what
    moves the residual stream (`activation`) or what the loss pulls at (`adapter_gradient`)."""
    budget: Budget = later("layer")
    """What the ratio holds for: every cut layer keeps as many units, or all of them together keep as many parameters,
    those with the most score in each, wherever they are (at least one unit of a kind in a layer)."""
    keep_first_layers: Annotated[int, Field(ge=0)] = 4
    keep_last_layers: Annotated[int, Field(ge=0)] = 2
    multiple_of: Annotated[int, Field(gt=0)] = 1
    seed: Seed = 0
    calibration: PlainDataset | None = None
    calibration_rows: Annotated[int, Field(gt=0)] = 64
    """Packed rows of `calibration_length` tokens."""
    calibration_length: Annotated[int, Field(gt=1)] = 512

    @model_validator(mode="after")
    def _running_the_model_needs_calibration(self) -> Self:
        if self.runs_model and self.calibration is None:
            raise ValueError(f"criterion '{self.criterion}' needs prune.calibration (a data set to run the model on)")
        return self

    @model_validator(mode="after")
    def _factors_are_not_drawn(self) -> Self:
        if self.factors and self.criterion == "random":
            raise ValueError(f"method '{self.method}' needs a criterion for its factors: magnitude, activation, …")
        return self

    @model_validator(mode="after")
    def _what_is_not_cut_has_no_budget(self) -> Self:
        if self.budget == "model" and (self.method == "low_rank" or self.criterion == "random"):
            raise ValueError(
                "budget 'model' weighs the scores of units: not of method 'low_rank' or criterion 'random'"
            )
        return self

    @property
    def cuts(self) -> bool:
        """Units go, so scores decide which."""
        return self.method != "low_rank" and self.ratio > 0

    @property
    def factors(self) -> bool:
        """Linears become two."""
        return self.method != "cut" and self.ratio > 0

    @property
    def runs_model(self) -> bool:
        """The model runs on calibration rows, for scores or for factors."""
        return self.criterion in ("activation", "adapter_gradient") and self.ratio > 0

    @property
    def scores_rows(self) -> bool:
        """It does for scores."""
        return self.runs_model and self.cuts


class TrainingSection(Section):
    """Settings of the one training loop, shared by align and train."""

    datasets: MixedDatasets = Field(default_factory=list)
    """Mixed by their weights; a single path or mapping will do."""
    max_steps: Annotated[int, Field(ge=-1)] = -1
    """Optimizer steps; -1: as many as `num_train_epochs` gives."""
    num_train_epochs: Annotated[float, Field(gt=0)] = 1.0
    per_device_train_batch_size: Annotated[int, Field(gt=0)] = 4
    """Rows that go through the model at once."""
    auto_find_batch_size: bool = False
    """On out of memory, go on with fewer rows at once; the rows of an optimizer step stay the same."""
    gradient_accumulation_steps: Annotated[int, Field(gt=0)] = 1
    tokens_per_step: Annotated[int, Field(gt=0)] | None = None
    """Instead of `gradient_accumulation_steps`: an optimizer step takes rows until they have this many loss tokens."""
    max_length: Annotated[int, Field(gt=1)] = 512
    """Tokens in a packed row; longer examples are dropped (completions) or split (text)."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    lr_scheduler_type: str = "cosine"
    warmup_steps: Annotated[float, Field(ge=0)] = 0
    """Steps, or a share of all steps when below 1."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    optim: str = "adamw_torch"
    seed: Seed = 0
    dtype: DType = "auto"
    """Compute dtype; `auto` is bfloat16 where the hardware has it, else float32."""
    activation_checkpointing: bool = True
    """Decoder layers keep their input alone and are computed again in backward."""
    checkpoint_every: Annotated[int, Field(gt=0)] = 1
    """Of the decoder layers, every so many do so; the others keep what they computed."""
    activation_offloading: bool = False
    """What is kept for backward waits in host memory (on a GPU; elsewhere it is there anyway)."""
    early_stopping_patience: Annotated[int, Field(gt=0)] | None = None
    """Stop after this many evaluations in a row without a new lowest loss."""
    load_best_model_at_end: bool = False
    """The result is the evaluated state with the lowest loss, not the last one."""
    metric_for_best_model: str | None = None
    """The evaluation set that decides; needs no name where there is one only."""
    logging_steps: Annotated[int, Field(gt=0)] = watching(1)
    """What `report_to` names gets every so many steps; the history gets every step."""
    report_to: list[Reporter] = watching([])
    max_loss_spike: Annotated[float, Field(gt=1)] | None = watching(None)
    """Stop with an error when the loss stays above this many times its running median."""
    loss_spike_patience: Annotated[int, Field(gt=0)] = watching(3)
    """Steps in a row that count as such a spike."""
    save_steps: Annotated[int, Field(gt=0)] = watching(200)
    eval_steps: Annotated[int, Field(gt=0)] | None = watching(None)
    """Evaluate every so many steps; none: only at the end."""
    eval_datasets: NamedDatasets = Field(default_factory=dict, json_schema_extra=_WATCHING)
    """Held-out sets by name; their loss and perplexity are `eval_<name>_loss` and `eval_<name>_perplexity`."""

    @property
    def selects(self) -> bool:
        """Evaluations decide about the result: when training ends, or which state is kept."""
        return self.early_stopping_patience is not None or self.load_best_model_at_end

    def settings(self) -> dict[str, Any]:
        """Where evaluations decide, how often and on what they are made counts too."""
        if not self.selects:
            return super().settings()
        return super().settings() | {"eval_steps": self.eval_steps, "eval_datasets": self._plain(self.eval_datasets)}

    @model_validator(mode="after")
    def _a_step_has_one_size(self) -> Self:
        if self.tokens_per_step is not None and self.gradient_accumulation_steps != 1:
            raise ValueError("set tokens_per_step or gradient_accumulation_steps, not both")
        return self

    @model_validator(mode="after")
    def _selecting_needs_evaluations(self) -> Self:
        if self.selects and (not self.eval_datasets or self.eval_steps is None):
            raise ValueError(
                "early_stopping_patience and load_best_model_at_end need an evaluation set and eval_steps to decide by"
            )
        return self

    @model_validator(mode="after")
    def _scheduler_is_known(self) -> Self:
        known = {"linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"}
        if self.lr_scheduler_type not in known:
            hint = did_you_mean(self.lr_scheduler_type, known)
            raise ValueError(f"unknown lr_scheduler_type '{self.lr_scheduler_type}'{hint}; one of {sorted(known)}")
        return self


class AlignSection(TrainingSection):
    """Continual pre-training of the pruned model; `max_steps: 0` skips it."""

    learning_rate: Annotated[float, Field(gt=0)] = 5e-5
    max_steps: Annotated[int, Field(ge=-1)] = 0
    train_embeddings: bool = False
    train_lm_head: bool = False
    float8: bool = False
    """Products of the linears in 8-bit floating point, on NVIDIA Ada, Hopper or newer (`loram[float8]`: torchao)."""

    @model_validator(mode="after")
    def _needs_data(self) -> Self:
        if self.max_steps != 0 and not self.datasets:
            raise ValueError("align.datasets is needed unless align.max_steps is 0")
        return self


class TrainSection(TrainingSection):
    """LoRA or DoRA on the quantized pruned model (QLoRA, arXiv 2305.14314)."""

    quantizer: Quantizer = "nf4"
    """Of the projections: `nf4`, `fp4`, `int8` (bitsandbytes), `hqq4`, `hqq3`, `hqq2` (HQQ), or `none`."""
    bnb_4bit_use_double_quant: bool = True
    quantize_embeddings: bool = False
    """Embedding and head in the quantizer's 4-bit format too; otherwise they keep the compute dtype."""
    lora_r: Annotated[int, Field(gt=0)] = 8
    lora_alpha: Annotated[float, Field(gt=0)] = 16
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    use_rslora: bool = False
    rank_pattern: dict[str, Annotated[int, Field(gt=0)]] = Field(default_factory=dict)
    """Other ranks by module name, its end, or a regular expression of it, as PEFT's: `{"layers.0.self_attn.q_proj": 32,
    "down_proj": 4}`; the first that matches counts."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    init_lora_weights: LoraInit = "default"
    """`default` (A random, B zero), `gaussian` (A normally distributed), or a start that moves part of the weight into
    the adapter: `pissa` its principal components (arXiv 2404.02948), `loftq` what quantization lost (2310.08659)."""
    use_dora: bool = False
    """A magnitude for every output row besides (DoRA, arXiv 2402.09353)."""
    target_modules: Annotated[list[str], Field(min_length=1)] | Literal["all"] = "all"
    """Projections to adapt by name (`q_proj`); `all`: every projection of the decoder layers."""
    lora_lm_head: bool = False
    lora_embedding: bool = False
    modules_to_save: list[Literal["embedding", "lm_head"]] = Field(default_factory=list)
    """Trained whole, in float32, and kept with the adapter."""
    anchors: Annotated[int, Field(ge=0)] = later(0)
    """After how many of the decoder layers (evenly spread, the last among them) the small model goes on from the full
    model's hidden states on the training rows, so that the adapter learns the task and not to make up for what the
    small model computes otherwise; 0: none. The `anchor` stage makes them."""
    loraplus_lr_ratio: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of every B as a multiple of A's, which is `learning_rate` (LoRA+, arXiv 2402.12354)."""
    neftune_noise_alpha: Annotated[float, Field(gt=0)] | None = None
    """Noise on the embeddings while training, within α/√(tokens of a row × hidden size) (NEFTune, arXiv 2310.05914)."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4

    @field_validator("max_steps")
    @classmethod
    def _zero_steps_train_nothing(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 steps would train nothing; set a positive number, or -1 for whole epochs")
        return value

    @property
    def moves_weights(self) -> bool:
        """Whether the start moves part of each weight into the adapter."""
        return self.init_lora_weights in ("pissa", "loftq")

    @model_validator(mode="after")
    def _methods_go_together(self) -> Self:
        moved = self.moves_weights
        if self.init_lora_weights == "loftq" and self.quantizer == "none":
            raise ValueError("init_lora_weights 'loftq' makes up for quantization, so it needs a quantizer")
        if moved and self.use_dora:
            raise ValueError(
                f"init_lora_weights '{self.init_lora_weights}' changes the weight whose norms DoRA's magnitudes are; "
                "use one of the two"
            )
        if self.lora_embedding and self.use_dora:
            raise ValueError("a DoRA cannot be put on the embedding; use lora_embedding without use_dora")
        whole = set(self.modules_to_save)
        for name, adapted in (("embedding", self.lora_embedding), ("lm_head", self.lora_lm_head)):
            if name in whole and adapted:
                raise ValueError(f"{name} is to be trained whole (modules_to_save) and to be adapted; choose one")
        if self.quantize_embeddings and (whole or self.lora_embedding):
            raise ValueError("a quantized embedding or head cannot train whole, nor a quantized embedding be adapted")
        return self

    @model_validator(mode="after")
    def _anchors_stand_for_what_an_adapter_would_make_up_for(self) -> Self:
        if self.anchors and self.selects:
            raise ValueError(
                "evaluations are made without anchors, so they cannot choose the state of what trains with them: leave "
                "out early_stopping_patience and load_best_model_at_end, or set anchors to 0"
            )
        if self.anchors and self.moves_weights:
            raise ValueError(
                f"init_lora_weights '{self.init_lora_weights}' starts from other weights than anchors are made with; "
                "use one of the two"
            )
        return self

    @model_validator(mode="after")
    def _quantized_embeddings_need_a_quantizer(self) -> Self:
        if self.quantize_embeddings and self.quantizer not in ("nf4", "fp4"):
            raise ValueError("quantize_embeddings needs quantizer nf4 or fp4")
        return self


class RecoverSection(Section):
    """From the small model's adapter to the full model's."""

    correction: Correction = "none"
    """`emloc`: B makes up for what the small model's projections compute otherwise than the full one's, on inputs that
    A sees (EMLoC, arXiv 2506.12015)."""
    correction_limit: Annotated[float, Field(gt=0)] | None = 3.0
    """The most of it in a direction of A, as a multiple of what the adapter does there; null: no limit."""


class PolishSection(TrainingSection):
    """Steps of the recovered adapter on the full model, one decoder layer of it in memory; `max_steps: 0` skips them.

    Without `datasets`, those of `train`. Layers are always computed again in backward.
    """

    max_steps: Annotated[int, Field(ge=-1)] = 0
    start: Literal["recovered", "fresh"] = "recovered"
    """`fresh`: a new adapter with `train`'s LoRA settings, and nothing is pruned: plain LoRA on a model larger than
    memory."""
    quantizer: Quantizer = "none"
    """Of the projections while the adapter is polished."""
    bnb_4bit_use_double_quant: bool = True

    @model_validator(mode="after")
    def _all_layers_are_computed_again(self) -> Self:
        if self.checkpoint_every != 1 or self.activation_offloading or not self.activation_checkpointing:
            raise ValueError(
                "polish keeps the inputs of all layers and computes every layer again; leave activation_checkpointing, "
                "checkpoint_every and activation_offloading as they are"
            )
        return self

    @model_validator(mode="after")
    def _a_fresh_adapter_is_trained(self) -> Self:
        if self.start == "fresh" and self.max_steps == 0:
            raise ValueError(
                "start 'fresh' with max_steps 0 would train nothing; set max_steps, or -1 for whole epochs"
            )
        return self


class ScaleSection(Section):
    """Factors of the adapter's scale on the full model, found on held-out rows; skipped without a `dataset`."""

    dataset: PlainDataset | None = None
    rows: Annotated[int, Field(gt=1)] = 64
    """Packed rows of `max_length` tokens, at most."""
    max_length: Annotated[int, Field(gt=1)] = 512
    grid: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)] = [
        0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0
    ]  # fmt: skip
    """Factors to try; 1 is tried always."""
    per_kind: bool = True
    """After the one factor for all modules, one for each kind of projection."""
    check_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Of the rows, those that have no part in the choice: on them the loss must be lower, or all factors are 1."""
    seed: Seed = 0
    """Of the order of the rows, and so of which are which."""


class EvaluateSection(Section):
    """Token-weighted perplexity of every variant on every set."""

    datasets: NamedDatasets = Field(default_factory=dict)
    max_length: Annotated[int, Field(gt=1)] = 1024
    dtype: DType = "auto"
    baseline: bool = False
    """Also train the same LoRA on the whole model (ratio 0) and show it: the upper bound."""
    variants: list[Evaluated] = later(list(get_args(Evaluated)))
    """What is evaluated beside the base and the baseline, of what the recipe makes: the small model as `pruned`, as
    `aligned` and with its `adapter`; the base with the adapter as `recovered`, `polished`, `scaled`; and `merged`."""

    @field_validator("variants")
    @classmethod
    def _in_the_order_of_the_pipeline(cls, value: list[Evaluated]) -> list[Evaluated]:
        return [role for role in get_args(Evaluated) if role in value]


class Recipe(Section):
    """One experiment: base → score → prune → align → anchor → train → recover → polish → scale → merge → evaluate."""

    name: str
    model: ModelSection
    data: DataSection = DataSection()
    prune: PruneSection = PruneSection(ratio=0.0)
    align: AlignSection = AlignSection()
    train: TrainSection = TrainSection()
    recover: RecoverSection = RecoverSection()
    polish: PolishSection = PolishSection()
    scale: ScaleSection = ScaleSection()
    evaluate: EvaluateSection = EvaluateSection()

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
            raise ValueError("a recipe's name becomes a folder: letters, digits, '.', '_' and '-' only")
        if value in (TOKENS_FOLDER, PERPLEXITY_FOLDER):
            raise ValueError(f"'{value}' is a folder that all recipes share; choose another name")
        return value

    @model_validator(mode="after")
    def _factors_have_no_principal_components_to_give(self) -> Self:
        if self.prune.factors and self.train.moves_weights:
            raise ValueError(
                f"train.init_lora_weights '{self.train.init_lora_weights}' changes whole weights, and prune.method "
                f"'{self.prune.method}' keeps factors of them; use one of the two"
            )
        return self

    @model_validator(mode="after")
    def _a_fresh_adapter_is_on_the_projections(self) -> Self:
        train = self.train
        if self.polish.start == "fresh" and (
            train.lora_lm_head or train.lora_embedding or train.modules_to_save or train.moves_weights
        ):
            raise ValueError(
                "polish.start 'fresh' adapts the projections of the decoder layers only: leave out train.lora_lm_head, "
                "train.lora_embedding, train.modules_to_save and the inits pissa and loftq"
            )
        return self

    @property
    def small(self) -> bool:
        """A small model is made and trained on; not if a fresh adapter is trained on the full one."""
        return self.polish.start == "recovered"

    @property
    def polishing(self) -> PolishSection:
        """`polish`, with the data sets it takes from `train`."""
        own = self.polish
        return own if own.datasets else own.model_copy(update={"datasets": self.train.datasets})

    @model_validator(mode="after")
    def _a_correction_needs_the_weights_that_were_trained_around(self) -> Self:
        if self.recover.correction != "none" and self.train.moves_weights:
            raise ValueError(
                f"recover.correction '{self.recover.correction}' compares the small model's weights with the full "
                f"one's, and train.init_lora_weights '{self.train.init_lora_weights}' moves part of them into the "
                "adapter; use one of the two"
            )
        return self

    @model_validator(mode="after")
    def _an_anchored_adapter_has_nothing_to_correct(self) -> Self:
        if self.recover.correction != "none" and self.train.anchors:
            raise ValueError(
                f"recover.correction '{self.recover.correction}' makes the full model compute what the small one did, "
                "and with train.anchors the adapter was trained for the full one; use one of the two"
            )
        return self

    @model_validator(mode="after")
    def _a_dora_has_one_scale(self) -> Self:
        if self.scale.dataset is not None and self.train.use_dora:
            raise ValueError("scale.dataset: the magnitudes of a DoRA (train.use_dora) belong to one scale; use a LoRA")
        return self

    def baseline(self) -> Recipe:
        """The same experiment without pruning or alignment: plain (Q)LoRA on the full model."""
        return self.model_copy(
            update={
                "prune": PruneSection(ratio=0.0, criterion="random"),
                "align": AlignSection(),
                "train": self.train.model_copy(update={"anchors": 0}),
                "recover": RecoverSection(),
                "polish": PolishSection(),
                "scale": ScaleSection(),
                "evaluate": self.evaluate.model_copy(update={"baseline": False}),
            }
        )

    def changed(self, overrides: Sequence[str]) -> Recipe:
        """With `section.key=value` overrides; RecipeError where they make no recipe."""
        return _validated(self.model_dump(mode="json"), overrides, self.name)

    def to_yaml(self) -> str:
        """The resolved recipe, every default spelled out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a YAML recipe and applies overrides.

    Args:
        path: the YAML file.
        overrides: `section.key=value` strings; values are parsed as YAML.

    Raises:
        RecipeError: file missing, bad YAML, unknown key, or a value outside its range.
    """
    if not path.is_file():
        near = sorted(p.as_posix() for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        listed = f"it holds {', '.join(near)}" if near else "and there is no recipe beside it"
        raise RecipeError(f"No recipe at {path}.", fix=f"Check the path ({path.parent.as_posix()}/: {listed}).")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise RecipeError(f"{path} is not valid YAML: {error}", fix="Correct the line it names.") from error
    if not isinstance(raw, dict):
        raise RecipeError(f"{path} is not a recipe: its top level must be a mapping.", fix="See recipes/README.md.")
    return _validated(raw, overrides, str(path))


def _validated(raw: dict[str, Any], overrides: Sequence[str], what: str) -> Recipe:
    for override in overrides:
        apply(raw, override, Recipe)
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise RecipeError(
            f"{what} is not a valid recipe:\n{explain(error, Recipe)}", fix="See recipes/README.md."
        ) from error
