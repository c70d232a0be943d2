"""`tlora`, with Ctrl-C pressed at the moment when it comes to import a module.

python interrupted_runner.py MODULE ARGUMENT...
"""

import signal
import sys


def press_at(module: str) -> None:
    """Once: what is imported while the first is dealt with is not interrupted again."""
    pressed = False

    def press(event: str, about: tuple[object, ...]) -> None:
        nonlocal pressed
        if event == "import" and about[0] == module and not pressed:
            pressed = True
            signal.raise_signal(signal.SIGINT)

    sys.addaudithook(press)


if __name__ == "__main__":
    _, where, *arguments = sys.argv
    sys.argv = ["tlora", *arguments]
    press_at(where)
    from tlora.cli.main import main

    main()
