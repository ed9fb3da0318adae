"""Videos of episodes, as the workers write them: by the recorder of the environment's own library.

Only the standard library is imported here: a worker loads a recorder when it is told to record.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import warnings
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Iterator, Optional, Union

from envsup.wrappers import class_name

logger = logging.getLogger("envsup")

_NAME = re.compile(r"env(\d+)-(\d{8}-\d{12})-\d+-episode-(\d+)\.mp4")


def replay_files(folder: Union[str, "os.PathLike[str]"]) -> dict[int, list[Path]]:
    """The videos that gym's and gymnasium's environments wrote below the path given to ``enable_save_replay``.

    Returns:
        For each environment that has written any, its files from the first to the last.  Those of an environment's own
        ``enable_save_replay`` have names of its own and are not among them.
    """
    found: dict[int, list[tuple[str, int, Path]]] = {}
    for path in Path(folder).glob("env*.mp4"):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            env_id, begun, episode = match.groups()
            found.setdefault(int(env_id), []).append((begun, int(episode), path))
    return {env_id: [path for *_, path in sorted(found[env_id])] for env_id in sorted(found)}


def library_of(env: Any) -> Optional[str]:
    """ "gymnasium" or "gym" if the environment is one of theirs, else None."""
    roots = {cls.__module__.partition(".")[0] for cls in type(env).__mro__}
    return next((name for name in ("gymnasium", "gym") if name in roots), None)


def record_video(env: Any, folder: str, env_id: int) -> Any:
    """Wrap ``env`` into its own library's ``RecordVideo``, which writes each episode as an mp4 into ``folder``.

    The names of the files hold the environment, when it was told to record, the process, and the episode since then:
    no life of a worker, and no run, writes over what another has written.

    Raises:
        RuntimeError: if ``env`` was not made with ``render_mode="rgb_array"`` or the other of ``recorded_modes``, or no
            video writer is there.
        TypeError: if ``env`` is of neither library.
    """
    library, name = library_of(env), class_name(env)
    if library is None:
        raise TypeError(f"{name} has no enable_save_replay method and is no gym or gymnasium environment")
    mode = getattr(env, "render_mode", None)
    modes = recorded_modes(library)
    if mode not in modes:
        needed = " or ".join(map(repr, modes))
        raise RuntimeError(f"saving replays of {name} needs render_mode={needed} when it is made; it has {mode!r}")
    _require_video_writer()
    prefix = f"env{env_id}-{datetime.now():%Y%m%d-%H%M%S%f}-{os.getpid()}"
    recorder = _recorder_of_gym() if library == "gym" else _recorder_of_gymnasium()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Overwriting existing videos")  # It does not.
        return recorder(env, folder, episode_trigger=_every_episode, name_prefix=prefix)


def recorded_modes(library: str) -> tuple[str, str]:
    """The render modes of which a library's ``RecordVideo`` makes videos."""
    version = importlib.import_module(library).__version__ if library == "gym" else ""
    return ("rgb_array", "single_rgb_array" if version.startswith("0.25.") else "rgb_array_list")


def _recorder_of_gym() -> Any:
    """gym's ``RecordVideo``, but it neither closes the environment after each episode nor draws bars of its own, it can
    be asked to render meanwhile, an episode that is cut short has a video of its own, and a video that cannot be
    written costs no episode."""
    wrappers = importlib.import_module("gym.wrappers")

    class Recorder(wrappers.RecordVideo):  # type: ignore[misc,name-defined,unused-ignore]
        recording: bool

        def reset(self, **kwargs: Any) -> Any:
            if self.recording:
                self.close_video_recorder()
                self.episode_id += 1
            return super().reset(**kwargs)

        def render(self, *args: Any, **kwargs: Any) -> Any:
            history = self.video_recorder.render_history if self.recording else []
            frames = history[:]
            history.clear()
            return frames or self.env.render(*args, **kwargs)

        def start_video_recorder(self) -> None:
            with _costing_nothing():
                os.makedirs(self.video_folder, exist_ok=True)
                super().start_video_recorder()

        def close_video_recorder(self) -> None:
            video, was_recording = self.video_recorder, self.recording
            self.recording = False
            with _costing_nothing():
                if was_recording:
                    _finish(video)

    return Recorder


def _finish(video: Any) -> None:
    """What gym's ``VideoRecorder.close`` does, but it closes no environment and draws no bar."""
    frames = getattr(video, "recorded_frames", None)
    try:
        if frames:
            _write(frames, video.frames_per_sec, video.path)
            video.write_metadata()
        elif not hasattr(video, "recorded_frames"):  # gym 0.25 has written them by then.
            video.close()
    finally:
        video._closed = True


def _write(frames: list[Any], fps: float, path: str) -> None:
    clip = importlib.import_module("moviepy.video.io.ImageSequenceClip").ImageSequenceClip(frames, fps=fps)
    clip.write_videofile(path, logger=None)


@contextmanager
def _costing_nothing() -> Iterator[None]:
    """What cannot be written is logged, and the episode goes on."""
    try:
        yield
    except OSError as error:
        logger.warning("A video could not be written: %s", error)


def _recorder_of_gymnasium() -> Any:
    """gymnasium's ``RecordVideo``, but it writes a video before the reset that follows: that may fail; and a video that
    cannot be written costs no episode."""
    wrappers = importlib.import_module("gymnasium.wrappers")

    class Recorder(wrappers.RecordVideo):  # type: ignore[misc,name-defined,unused-ignore]
        def reset(self, **kwargs: Any) -> Any:
            if self.recording:
                self.stop_recording()
            return super().reset(**kwargs)

        def stop_recording(self) -> None:
            with _costing_nothing():
                os.makedirs(self.video_folder, exist_ok=True)
                super().stop_recording()
            self.recorded_frames: list[Any] = []
            self.recording = False

    return Recorder


def _every_episode(episode: int) -> bool:
    return True


def _require_video_writer() -> None:
    try:
        import moviepy  # noqa: F401
    except ImportError as error:
        raise RuntimeError("saving replays needs moviepy: pip install 'envsup[video]'") from error
