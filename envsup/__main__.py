"""``python -m envsup [command] ...``: runs a command, the demonstration if none is named."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Mapping, Optional, Sequence

# Each is a module with ``main(argv) -> exit status``.
COMMANDS: Mapping[str, str] = {"demo": "envsup.demo", "bench": "envsup.bench", "replay": "envsup.replay"}
_INTERRUPTED = 130


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command that the first argument names; returns the exit status."""
    rest = list(sys.argv[1:] if argv is None else argv)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else "demo"
    if name not in COMMANDS:
        print(f"envsup: there is no command {name!r}; there is {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        status: int = importlib.import_module(COMMANDS[name]).main(rest)
        if sys.stdout is not None:  # As if it was closed from the start.
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return 1
    return status


def _drop_output() -> None:
    """Nobody reads standard output any more: what is left of it goes nowhere, so that exiting does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
