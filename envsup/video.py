"""A video file that is written frame by frame, by the ffmpeg that moviepy brings along."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Union

import numpy as np

from envsup.arguments import positive
from envsup.frame import Picture


class VideoFile:
    """An mp4 that grows with every frame; works as a context manager that closes it.

    Close it after a supervisor that was launched meanwhile: a forked worker holds the pipe that ffmpeg reads from.

    Arguments:
        path: of the file; it is written over.
        fps: frames for each second of the video.

    Raises:
        RuntimeError: if the video writer is not installed.
        ValueError: if the name does not end in ".mp4", or ``fps`` is not positive.
        OSError: if the file cannot be written.
    """

    def __init__(self, path: Union[str, "os.PathLike[str]"], fps: float) -> None:
        try:
            import imageio_ffmpeg
        except ImportError as error:
            raise RuntimeError("writing a video needs moviepy: pip install 'envsup[video]'") from error
        self._write_frames = imageio_ffmpeg.write_frames
        self._path, self._fps = Path(path), positive("fps", fps)
        if self._path.suffix.lower() != ".mp4":
            raise ValueError(f"the name of a video must end in .mp4, and not as {self._path.name!r}")
        self._is_new = not self._path.exists()
        self._path.open("ab").close()  # Better now than after the first frame.
        self._writer: Any = None
        self._is_closed = False
        self._size = 0, 0
        self.frames = 0

    def __enter__(self) -> VideoFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, frame: Picture) -> None:
        """One more frame, uint8 of shape ``(height, width, 3)``: as large as the first, or it is cut and padded.

        Raises:
            ValueError: if it is no such frame, or the file is closed.
            OSError: if it could not be written.
        """
        if self._is_closed:
            raise ValueError(f"the video {str(self._path)!r} is closed")
        if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.shape[2:] != (3,) or not frame.size:
            what = f"{getattr(frame, 'dtype', type(frame).__name__)} of shape {np.shape(frame)}"
            raise ValueError(f"a frame is uint8 of shape (height, width, 3), and not {what}")
        if self._writer is None:
            height, width = self._size = frame.shape[0] + frame.shape[0] % 2, frame.shape[1] + frame.shape[1] % 2
            self._writer = self._write_frames(
                str(self._path), (width, height), fps=self._fps, macro_block_size=2, ffmpeg_log_level="error"
            )
            self._writer.send(None)
        self._writer.send(_fitted(frame, self._size).data)
        self.frames += 1

    def close(self) -> None:
        """Finish the file; none is left if there was no frame; may be called twice.

        Raises:
            OSError: if nothing could be written.
        """
        writer, self._writer = self._writer, None
        self._is_closed = True
        if writer is not None:
            writer.close()
            if not self._path.exists() or not self._path.stat().st_size:
                raise OSError(f"the video {str(self._path)!r} could not be written")
        elif self._is_new and not self.frames:
            self._path.unlink(missing_ok=True)


def _fitted(frame: Picture, size: tuple[int, int]) -> Picture:
    if frame.shape[:2] == size:
        return np.ascontiguousarray(frame)
    fitted: Picture = np.zeros((*size, 3), np.uint8)
    height, width = (min(pair) for pair in zip(frame.shape, size))
    fitted[:height, :width] = frame[:height, :width]
    return fitted
