"""The model card of a recovered adapter, filled in from what is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loram.pruning.plan import PruningPlan
from loram.recipe import Recipe


def model_card(
    recipe: Recipe, plan: PruningPlan, training: dict[str, Any], polishing: dict[str, Any] | None = None
) -> str:
    """Markdown with the front matter that model hubs read.

    Args:
        recipe: the experiment.
        plan: what was kept of the base.
        training: the train stage's metrics; empty when the adapter came from elsewhere.
        polishing: the polish stage's, if there was one.
    """
    train = recipe.train
    method = "DoRA" if train.use_dora else "LoRA"
    widths = plan.widths()
    removed = widths.removed_parameters()
    cut = [layer for layer in range(len(plan.layers)) if plan.is_cut(layer)]
    factored = [layer for layer in range(len(plan.layers)) if plan.layers[layer].ranks]
    if factored and not cut:
        how = (
            f"In layers {factored[0]} to {factored[-1]} of the base each linear was replaced by two of low rank "
            f"({removed:,} parameters fewer). The adapter was trained around those pairs and has the base's shapes."
        )
    elif cut:
        groups, neurons = _span(widths.kv_groups, cut), _span(widths.neurons, cut)
        how = (
            f"Layers {cut[0]} to {cut[-1]} of the base were cut to {groups} of {plan.architecture.kv_groups} KV groups "
            f"and {neurons} of {plan.architecture.neurons} FFN "
            f"neurons ({removed:,} parameters fewer). The adapter was trained on that smaller model and its matrices "
            "were scattered back to the full shapes, with zeros where the base had been cut."
            + (" The linears that were not cut were replaced by two of low rank each." if factored else "")
        )
    else:
        how = f"The base was not cut (ratio 0): this is an ordinary {method}."
    if recipe.recover.correction == "emloc":
        how += " B makes up for what the smaller model computed otherwise (EMLoC, arXiv 2506.12015)."
    facts = {
        "base model": f"`{plan.base_model}`",
        "rank, alpha": f"{train.lora_r}, {train.lora_alpha:g}" + (" (rsLoRA)" if train.use_rslora else ""),
        "base during training": train.quantizer,
        "learning rate": f"{train.learning_rate:g} ({train.lr_scheduler_type})",
        "data": ", ".join(f"`{dataset.path}` ({dataset.split})" for dataset in train.datasets) or "unknown",
    }
    if train.anchors:
        facts["anchors"] = f"the base's hidden states after {train.anchors} of its layers"
    if training:
        facts["steps"] = f"{training['steps']:,}"
        facts["tokens"] = f"{training['tokens']:,} ({training['loss_tokens']:,} in the loss)"
        facts["final training loss"] = f"{training['final_loss']:.4f}"
        for name in train.eval_datasets:
            if f"eval_{name}_perplexity" in training:
                facts[f"perplexity on {name}, pruned base"] = f"{training[f'eval_{name}_perplexity']:.3f}"
    if polishing is not None:
        how += " It was then trained on the full model."
        facts["steps on the full model"] = f"{polishing['steps']:,}"
        facts["tokens on the full model"] = f"{polishing['tokens']:,} ({polishing['loss_tokens']:,} in the loss)"
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""---
base_model: {plan.base_model}
library_name: peft
pipeline_tag: text-generation
tags: [lora, loram]
---

# {recipe.name}

A {method} adapter for `{plan.base_model}`, trained small and used large with LoRAM (arXiv 2502.13533).

{how}

| | |
|---|---|
{table}

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{plan.base_model}"), "this folder")
```

`plan.json` says which units were kept; `loram merge` uses it to check that the base is the right one.
"""


def _span(counts: Sequence[int], layers: Sequence[int]) -> str:
    """`5`, or `2 to 7` where the layers differ."""
    low, high = (of(counts[layer] for layer in layers) for of in (min, max))
    return str(low) if low == high else f"{low} to {high}"
