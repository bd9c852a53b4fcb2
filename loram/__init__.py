"""LoRAM, "Train Small, Infer Large" (arXiv 2502.13533): train a LoRA on a pruned model, use it on the full one."""

__version__ = "0.1.0"
