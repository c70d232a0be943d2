"""`python -m tlora.runtime.profiling`: the verb, where typer and rich are not installed."""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path

from tlora.core.errors import TloraError
from tlora.runtime.benchmark.settings import flag
from tlora.runtime.profiling.settings import HELP, Settings

TYPES = {"output": Path, "seconds": float, "repeats": int, "tokens": int, "threads": int}
STARTED = time.monotonic()


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m tlora.runtime.profiling",
        description="Measure this device for the cost model.",
    )
    for field in fields(Settings):
        required = field.default is MISSING
        default = None if required else field.default
        text = HELP[field.name].replace("%", "%%")
        found.add_argument(
            flag(field.name),
            type=TYPES.get(field.name, str),
            default=default,
            required=required,
            metavar=field.name.upper(),
            help=text if default is None else f"{text} [{default}]",
        )
    return found


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:4.0f} s] {text}", file=sys.stderr, flush=True)


def main(args: Sequence[str] | None = None) -> int:
    args = sys.argv[1:] if args is None else list(args)
    given = vars(parser().parse_args(args))
    try:
        settings = Settings(**given)

        # torch loads with these.
        from tlora.costs.profile import write_profile
        from tlora.runtime.profiling import table
        from tlora.runtime.profiling.profiling import run_profile

        command = shlex.join(["python", "-m", "tlora.runtime.profiling", *args])
        profile = run_profile(settings, command, say)
        write_profile(profile, settings.output.expanduser())
        print("\n".join(table.text(profile)))
        print(f"The profile is in {settings.output}.")
    except TloraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
