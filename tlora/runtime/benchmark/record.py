"""The JSON line of a benchmark, and where it came from."""

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import tlora
from tlora.core.errors import SpecError
from tlora.kernels.multi_lora.routes import update_inside
from tlora.runtime.benchmark.bench import Result
from tlora.runtime.benchmark.linears import LinearTime, overhead_pct
from tlora.runtime.benchmark.lineup import COMPILED, OWN, PLAIN
from tlora.runtime.benchmark.machine import device_name

PACKAGE = Path(tlora.__file__).parent


def record(result: Result, command: str) -> dict[str, object]:
    """The keys that are fixed for `bench`, and more beside them."""
    settings, rounds, graphs = result.settings, result.rounds, result.graphs
    pauses = result.pauses
    return {
        "v": 1,
        "kind": "bench",
        "commit": commit(),
        "command": command,
        "device": device_name(result.device),
        "versions": versions(),
        "shape": result.shape.name,
        "settings": {
            "jobs": settings.jobs,
            "ranks": settings.ranks,
            "batch": settings.batch,
            "lengths": settings.lengths,
            "steps": settings.steps,
            "dropout": settings.dropout,
            "nano_batch_tokens": settings.budget,
            "dtype": str(result.shape.dtype).removeprefix("torch."),
            "quantization": settings.quantization,
            "threads": settings.threads,
            "tokens": result.work.tokens,
            "repeats": settings.repeats,
            "seconds": settings.seconds,
            "arms": settings.kinds,
            "update_inside": update_inside(),
        },
        "complete": result.complete,
        "frozen": {
            "plain": rounded(result.rate(*PLAIN.values())),
            "compiled": rounded(result.rate(*COMPILED.values())),
            "own": rounded(result.rate(OWN)),
            "best": rounded(result.frozen),
        },
        "fused": {
            "tokens_per_s": rounded(result.fused),
            "step_ms": rounded(result.step_ms, 3),
            "nano_batches": result.nano_batches,
        },
        "one_at_a_time": {"tokens_per_s": rounded(result.one_at_a_time)},
        "peft_one_by_one": {"tokens_per_s": rounded(result.peft)},
        "fused_in_processes": {"tokens_per_s": rounded(result.fused_spread)},
        "peft_in_processes": {"tokens_per_s": rounded(result.peft_spread)},
        "ratio_peft_in_processes": rounded(result.ratio_peft_spread, 3),
        "ratio_both_in_processes": rounded(result.ratio_both_spread, 3),
        "frozen_fraction": rounded(result.frozen_fraction, 4),
        "ratio_peft": rounded(result.ratio_peft, 3),
        "ratio_one_at_a_time": rounded(result.ratio_one_at_a_time, 3),
        "engine_overhead_pct": rounded(result.engine_overhead_pct, 2),
        "device_waits_pct": rounded(result.device_waits_pct, 2),
        "linears": [linear(each) for each in result.linears],
        "linears_overhead_pct": rounded(overhead_pct(result.linears), 1),
        "attach_ms": rounded(pauses and pauses.attach_seconds * 1e3, 3),
        "attach_from_host_ms": rounded(pauses and pauses.attach_from_host_seconds * 1e3, 3),
        "detach_ms": rounded(pauses and pauses.detach_seconds * 1e3, 3),
        "peak_bytes": result.peak_bytes,
        "mfu": rounded(result.mfu, 4),
        "gemm_tflops": rounded(result.gemm_flops_per_s / 1e12, 6),
        "copy_gb_per_s": rounded(result.copy_bytes_per_s / 1e9, 1),
        "graphs": {
            "captures": graphs.captures,
            "compiled": graphs.compiled,
            "warm_up_runs": graphs.warm_up_runs,
            # Each of these jobs was attached, trained and detached.
            "attached_detached": graphs.jobs,
            "attached_detached_unchanged": graphs.jobs_unchanged,
        },
        "repeats": rounds.repeats,
        "noise_pct": rounded(rounds.noise_pct),
        "drift_pct": rounded(rounds.drift_pct),
        "arms": {
            name: {
                "tokens_per_s": rounded(result.work.tokens / rounds.median(name)),
                "spread_pct": rounded(rounds.spread_pct(name)),
                "repeats": len(rounds.seconds[name]),
            }
            for name in rounds.seconds
        },
        "notes": result.notes,
    }


def linear(each: LinearTime) -> dict[str, object]:
    return {
        "name": each.name,
        "in": each.in_features,
        "out": each.out_features,
        "ms_frozen": rounded(each.ms_frozen, 4),
        "ms_fused": rounded(each.ms_fused, 4),
        "floor_ms": rounded(each.floor_ms, 4),
        "count": each.count,
    }


def rounded(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)


def check_writable(path: Path | None) -> None:
    """Before minutes of measuring, not after."""
    if path is not None:
        append("", path)


def append(text: str, path: Path) -> None:
    try:
        with path.expanduser().open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}", field="--json") from None


def as_line(fields: dict[str, object]) -> str:
    return json.dumps(fields, allow_nan=False)


def commit() -> str | None:
    """Of the checkout that the package runs from. Where there is none, what TLORA_COMMIT says: a
    copy of the files on another machine has no history. None if nobody knows."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(PACKAGE), *args], capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # A virtual environment may lie inside of somebody else's repository.
    found = None
    if git("ls-files", "--error-unmatch", "__init__.py") is not None:
        found = git("describe", "--always", "--dirty", "--exclude=*")
    return found or os.environ.get("TLORA_COMMIT") or None


def versions() -> dict[str, str | None]:
    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    found = {name: version(name) for name in ("transformers", "peft", "triton")}
    return {
        "tlora": tlora.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **found,
    }
