"""`python -m tlora.runtime.benchmark`: the verb, where typer and rich are not installed."""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path

from tlora.core.errors import TloraError
from tlora.runtime.benchmark.settings import HELP, Settings, flag, settings_of

TYPES = {
    "jobs": int,
    "steps": int,
    "repeats": int,
    "budget": int,
    "threads": int,
    "seconds": int,
    "compile_seconds": int,
    "dropout": float,
    "json": Path,
}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m tlora.runtime.benchmark",
        description="Measure many LoRA jobs fused, one at a time, with PEFT, and frozen.",
    )
    for field in fields(Settings):
        text = HELP[field.name].replace("%", "%%")
        if field.default is False:
            found.add_argument(flag(field.name), action="store_true", help=text)
            continue
        default = field.default if field.default is not MISSING else None
        if isinstance(default, tuple):
            text += f" [{','.join(map(str, default))}]"
            found.add_argument(
                flag(field.name), action="append", metavar=field.name.upper(), help=text
            )
            continue
        if default is not None:
            text += f" [{default}]"
        found.add_argument(
            flag(field.name),
            type=TYPES.get(field.name, str),
            default=default,
            metavar=field.name.upper(),
            help=text,
        )
    return found


STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:4.0f} s] {text}", file=sys.stderr, flush=True)


def main(args: Sequence[str] | None = None) -> int:
    args = sys.argv[1:] if args is None else list(args)
    given = vars(parser().parse_args(args))
    try:
        settings = settings_of(given)

        # torch loads with these.
        from tlora.runtime.benchmark import record, table
        from tlora.runtime.benchmark.bench import run_benchmark

        record.check_writable(settings.json)
        result = run_benchmark(settings, say, started=STARTED)
        command = shlex.join(["python", "-m", "tlora.runtime.benchmark", *args])
        line = record.as_line(record.record(result, command))
        print("\n".join(table.text(result)))
        if settings.json is None:
            print(line)
        else:
            record.append(line + "\n", settings.json)
            print(f"One line was added to {settings.json}.")
    except TloraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
