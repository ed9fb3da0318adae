"""What the options of our commands take."""

from __future__ import annotations

import argparse
from typing import Callable


def at_least(least: int) -> Callable[[str], int]:
    """For argparse: an int that is not below ``least``."""

    def convert(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return value

    convert.__name__ = "int"  # How argparse names it when the text is no number.
    return convert


def seconds(text: str) -> float:
    """For argparse: a time that is longer than nothing and ends."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


seconds.__name__ = "float"
