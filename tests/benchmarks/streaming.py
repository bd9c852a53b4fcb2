"""Prune, recover and merge at true sizes: throughput against `cp`, and peak memory.

    .venv/bin/python -m tests.benchmarks.streaming sparse-70b      # 138 GB apparent, a few hundred MB on disk
    .venv/bin/python -m tests.benchmarks.streaming dense-7b        # 13 GB of random weights; 45 GB of disk
    .venv/bin/python -m tests.benchmarks.streaming dense-70b --layers 8
    .venv/bin/python -m tests.benchmarks.streaming peft            # against merge_and_unload on 3B shapes

Works in a temporary folder below the current one and removes it. Each command is a process of its own, one at a time;
its time is that of the whole command, start-up and the final fsync included, and `cp`'s includes a sync of its files.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from loram.adapter.folder import Adapter
from loram.checkpoint import CheckpointReader
from tests.benchmarks import synthetic as make


def copy(base: Path, target: Path) -> tuple[float, str]:
    """Bytes read and written a second by cp and sync."""
    state = make.drop_caches()
    child = make.run(["sh", "-c", f"cp -r '{base}' '{target}' && sync"])
    rate = 2 * make.weights(base) / child.seconds
    shutil.rmtree(target)
    print(f"cp + sync: {child.seconds:.1f} s, {rate / 1e6:,.0f} MB/s read + written, {state}")
    return rate, state


def report(name: str, result: tuple[make.Child, dict[str, Any]], rate: float) -> None:
    child, summary = result
    moved = summary["metrics"]["bytes_read"] + summary["metrics"]["bytes_written"]
    mine = moved / child.seconds
    print(
        f"{name}: {child.seconds:.1f} s (stage {summary['seconds']:.1f} s, processor {child.cpu_seconds:.1f} s), "
        f"{moved / 1e9:.2f} GB read + written, {mine / 1e6:,.0f} MB/s = {mine / rate:.2f} × cp, "
        f"peak {child.peak_bytes / 1e9:.2f} GB"
    )


def dense(work: Path, config: dict[str, Any], ratio: float) -> None:
    """Prune and merge of a dense model, each after dropping the page cache, beside cp."""
    base, artifacts = work / "base", work / "artifacts"
    size = make.model(base, config, dense=True)
    print(f"base: {size / 1e9:.2f} GB in {len(list(base.glob('*.safetensors')))} shards")
    rate, _ = copy(base, work / "copy")
    for criterion in ("random", "magnitude"):
        prune = {"ratio": ratio, "criterion": criterion}
        recipe = make.recipe(work / "recipe.yaml", base, prune=prune)
        make.drop_caches()
        result = make.loram("prune", recipe, "--artifacts", artifacts)
        report(f"prune, {criterion}", result, rate)
        shutil.rmtree(artifacts)
    recovered = _recovered(work, base, ratio, recipe)
    rate, _ = copy(base, work / "copy")
    make.drop_caches()
    result = make.loram("merge", recipe, "--from", recovered, "--artifacts", artifacts)
    report("merge", result, rate)


def _recovered(work: Path, base: Path, ratio: float, recipe: Path) -> Path:
    make.adapter(work / "adapter", make.random_plan(base, ratio))
    _, result = make.loram("recover", recipe, "--from", work / "adapter", "--artifacts", work / "recovered")
    return Path(result["folder"])


def sparse(work: Path) -> None:
    """LLaMA-2-70B at its true size: prune at .85, then recover an adapter of rank 8."""
    base, artifacts = work / "base", work / "artifacts"
    size = make.model(base, make.LLAMA_2_70B, dense=False)
    print(f"base: {size / 1e9:.1f} GB apparent, {_on_disk(base) / 1e6:.1f} MB on disk")
    recipe = make.recipe(work / "recipe.yaml", base, prune={"ratio": 0.85, "criterion": "magnitude"})
    child, summary = make.loram("prune", recipe, "--artifacts", artifacts)
    pruned = Path(summary["folder"])
    print(
        f"prune, magnitude: {child.seconds:.1f} s, peak {child.peak_bytes / 1e9:.2f} GB; wrote "
        f"{make.weights(pruned) / 1e9:.2f} GB apparent, {_on_disk(pruned) / 1e6:.1f} MB on disk"
    )
    adapter = make.adapter(work / "adapter", make.random_plan(base, 0.85))
    child, summary = make.loram("recover", recipe, "--from", work / "adapter", "--artifacts", artifacts)
    print(
        f"recover: {child.seconds:.1f} s (stage {summary['seconds']:.1f} s), peak {child.peak_bytes / 1e9:.2f} GB; "
        f"{adapter / 1e6:.0f} MB became {make.weights(Path(summary['folder'])) / 1e6:.0f} MB"
    )


def _on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.safetensors"))


def peft(work: Path) -> None:
    """Our merge against PEFT's merge_and_unload + save_pretrained, and both against the float32 sum."""
    base = work / "base"
    size = make.model(base, make.LLAMA_3B, dense=True)
    print(f"base: {size / 1e9:.2f} GB")
    recipe = make.recipe(work / "recipe.yaml", base, prune={"ratio": 0.5, "criterion": "random"})
    recovered = _recovered(work, base, 0.5, recipe)
    make.drop_caches()
    theirs = make.run([sys.executable, "-c", _PEFT, str(base), str(recovered), str(work / "peft")])
    print(f"PEFT: {theirs.seconds:.1f} s, peak {theirs.peak_bytes / 1e9:.2f} GB")
    make.drop_caches()
    ours, summary = make.loram("merge", recipe, "--from", recovered, "--artifacts", work / "artifacts")
    print(
        f"loram: {ours.seconds:.1f} s, peak {ours.peak_bytes / 1e9:.2f} GB: {theirs.seconds / ours.seconds:.1f} × as "
        f"fast with {theirs.peak_bytes / ours.peak_bytes:.1f} × less memory"
    )
    _compare(base, recovered, Path(summary["folder"]), work / "peft")


_PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out, max_shard_size="5GB")
"""


def _compare(base: Path, recovered: Path, ours: Path, theirs: Path) -> None:
    same = exact = theirs_exact = total = 0
    with (
        CheckpointReader(base) as b, CheckpointReader(ours) as o, CheckpointReader(theirs) as t,
        Adapter(recovered) as adapter,
    ):  # fmt: skip
        for name in o.tensors:
            mine, other, expected = o.read(name), t.read(name), b.read(name)
            module = name.removesuffix(".weight")
            if module in adapter.modules:
                a, factor = adapter.factors(module)
                expected = (expected.float() + (factor.float() @ a.float()) * adapter.scale(module)).bfloat16()
            total += mine.numel()
            same += int((mine == other).sum())
            exact += int((mine == expected).sum())
            theirs_exact += int((other == expected).sum())
    assert mine.dtype == torch.bfloat16
    print(f"equal to PEFT's: {same / total:.4%} of {total:,} weights")
    print(f"equal to the float32 sum cast once: ours {exact / total:.6%}, PEFT's {theirs_exact / total:.4%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sparse-70b", "dense-7b", "dense-70b", "peft"])
    parser.add_argument(
        "--layers",
        type=int,
        help="fewer layers than the model has (7 or more)",
    )
    parser.add_argument("--ratio", type=float, default=0.5)
    arguments = parser.parse_args()
    config = make.LLAMA_2_7B if arguments.what == "dense-7b" else make.LLAMA_2_70B
    if arguments.layers:
        config = config | {"num_hidden_layers": arguments.layers}
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".benchmark-") as name:
        if arguments.what == "sparse-70b":
            sparse(Path(name))
        elif arguments.what == "peft":
            peft(Path(name))
        else:
            dense(Path(name), config, arguments.ratio)


if __name__ == "__main__":
    main()
