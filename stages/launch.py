"""`--launch FILE`: the same command in several processes, as an accelerate configuration file describes them.

On accelerators `accelerate launch` starts them. On CPUs, for which it wants MPI, torchrun does, with the environment
that accelerate would have set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from loram.errors import LoramError, MissingPackageError, RecipeError


def launch(config: Path, arguments: list[str]) -> None:
    """Runs `loram` with the arguments in every process and waits for all of them.

    Args:
        config: accelerate's YAML (`accelerate config` writes one; recipes/accelerate has some).
        arguments: of the command, without `--launch`.

    Raises:
        RecipeError: the file is missing or no such configuration.
        MissingPackageError: it asks for an engine that is not installed.
        LoramError: a process failed; the others were stopped.
    """
    settings = _read(config)
    if settings.get("distributed_type") == "DEEPSPEED":
        _require("deepspeed", config)
    module = ["-m", "loram_stages", *arguments]
    environment = dict(os.environ)
    if settings.get("use_cpu"):
        if settings.get("distributed_type") == "FSDP":
            raise RecipeError(
                f"--launch {config}: accelerate shards (FSDP) over accelerators only.",
                fix="On CPUs use distributed_type: MULTI_CPU, as recipes/accelerate/cpu2.yaml does.",
            )
        command = [sys.executable, "-m", "torch.distributed.run", *_torchrun(settings), *module]
        environment |= _cpu_environment(settings)
    else:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), *module]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        raise LoramError(
            f"A process of the run ended with exit code {code}, and the others were stopped with it.",
            fix="Its message is above. The same command goes on from the last checkpoint.",
        )


def _read(config: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"--launch {config} cannot be read: {error}", fix="See recipes/accelerate/.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"--launch {config} is not valid YAML: {error}", fix="See recipes/accelerate/.") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("num_processes"), int):
        raise RecipeError(
            f"--launch {config} is no accelerate configuration: it lacks num_processes.", fix="See recipes/accelerate/."
        )
    return settings


def _require(package: str, config: Path) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise MissingPackageError(f"--launch {config} needs {package}.", fix=f"pip install {package}")


def _torchrun(settings: dict[str, Any]) -> list[str]:
    machines = int(settings.get("num_machines", 1))
    options = ["--nproc-per-node", str(settings["num_processes"] // machines), "--nnodes", str(machines)]
    if machines == 1:
        return [*options, "--standalone"]
    return [
        *options,
        "--node-rank", str(settings.get("machine_rank", 0)),
        "--master-addr", str(settings.get("main_process_ip")),
        "--master-port", str(settings.get("main_process_port", 29500)),
    ]  # fmt: skip


def _cpu_environment(settings: dict[str, Any]) -> dict[str, str]:
    environment = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": settings.get("mixed_precision", "no")}
    # Processes share the cores; torchrun would give each a single thread.
    share = max(1, (os.cpu_count() or 1) // settings["num_processes"])
    environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(share))
    return environment
