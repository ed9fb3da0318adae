"""One picture of all environments: a grid of what they draw in their workers."""

from __future__ import annotations

import math
from typing import Any, Mapping, Optional, Sequence, Union

import numpy as np

from envsup.frame import Picture
from envsup.history import short

_GAP = 4
_BACKGROUND, _DARK = 96, 32
_EMPTY = (96, 160)
"""Height and width of a tile if there is no frame at all to go by."""
Drawn = Union[Picture, BaseException]


def grid_of(drawn: Sequence[Drawn], captions: Optional[Sequence[str]] = None) -> Picture:
    """Frames side by side, all tiles as large as the largest; an error is a dark tile.

    Arguments:
        drawn: frames, uint8 of shape ``(height, width, 3)``, or why there is none.
        captions: a line for each to write into its tile; a dark tile says its number and why it is dark in any case.
            Nothing is written where pillow is not installed.

    Returns:
        uint8 of shape ``(height, width, 3)``; both are even, as video encoders like it.
    """
    frames = [frame for frame in drawn if isinstance(frame, np.ndarray)]
    height, width = (max((frame.shape[i] for frame in frames), default=_EMPTY[i]) for i in (0, 1))
    columns = math.ceil(math.sqrt(len(drawn)))
    rows = math.ceil(len(drawn) / columns)
    high, wide = (_GAP + count * (side + _GAP) for count, side in ((rows, height), (columns, width)))
    grid: Picture = np.full((high + high % 2, wide + wide % 2, 3), _BACKGROUND, np.uint8)
    for place, frame in enumerate(drawn):
        top, left = (_GAP + i * (side + _GAP) for i, side in zip(divmod(place, columns), (height, width)))
        grid[top : top + height, left : left + width] = _tile(frame, (height, width))
    notes = [_lines(place, frame, captions) for place, frame in enumerate(drawn)]
    _write(grid, notes, columns, (height, width))
    return grid


def _lines(place: int, frame: Drawn, captions: Optional[Sequence[str]]) -> list[str]:
    caption = None if captions is None else captions[place]
    if isinstance(frame, np.ndarray):
        return [] if caption is None else [caption]
    return [caption or str(place), short(frame)]


def _tile(frame: Drawn, size: tuple[int, int]) -> Picture:
    """A frame in the middle of a dark tile."""
    tile: Picture = np.full((*size, 3), _DARK, np.uint8)
    if isinstance(frame, np.ndarray):
        top, left = ((room - side) // 2 for room, side in zip(size, frame.shape))
        tile[top : top + frame.shape[0], left : left + frame.shape[1]] = frame
    return tile


def _write(grid: Picture, notes: Sequence[Sequence[str]], columns: int, size: tuple[int, int]) -> None:
    """Write lines into the tiles, cut off at their borders."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        return
    for place, lines in enumerate(notes):
        top, left = (_GAP + i * (side + _GAP) for i, side in zip(divmod(place, columns), size))
        tile = grid[top : top + size[0], left : left + size[1]]
        image = Image.fromarray(np.ascontiguousarray(tile))
        draw = ImageDraw.Draw(image)
        for row, line in enumerate(line.encode("ascii", "replace").decode() for line in lines):
            at = (4, 2 + 12 * row)
            draw.rectangle(draw.textbbox(at, line), fill=(_DARK,) * 3)
            draw.text(at, line, fill=(255, 255, 255))
        tile[:] = np.asarray(image)


def captions_of(stats: Mapping[int, Any]) -> list[str]:
    """What there is to say of each environment: steps, and the last return if there is one."""
    return [
        f"{env_id}: {figures.steps:,} steps"
        + ("" if figures.last_return is None else f", last return {figures.last_return:.4g}")
        for env_id, figures in stats.items()
    ]
