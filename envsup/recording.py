"""Videos of episodes, as the workers write them: by the recorder of the environment's own library.

Only the standard library is imported here: a worker loads a recorder when it is told to record.
"""

from __future__ import annotations

import importlib
import os
import re
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any, Optional, Union

from envsup.wrappers import innermost

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
        RuntimeError: if ``env`` was not made with ``render_mode="rgb_array"``, or no video writer is there.
        TypeError: if ``env`` is of neither library.
    """
    library, name = library_of(env), type(innermost(env)).__name__
    if library is None:
        raise TypeError(f"{name} has no enable_save_replay method and is no gym or gymnasium environment")
    mode = getattr(env, "render_mode", None)
    if mode not in ("rgb_array", "rgb_array_list"):
        raise RuntimeError(f"saving replays of {name} needs render_mode='rgb_array' when it is made; it has {mode!r}")
    _require_video_writer()
    prefix = f"env{env_id}-{datetime.now():%Y%m%d-%H%M%S%f}-{os.getpid()}"
    recorder = _recorder_of_gym() if library == "gym" else _recorder_of_gymnasium()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Overwriting existing videos")  # It does not.
        return recorder(env, folder, episode_trigger=_every_episode, name_prefix=prefix)


def _recorder_of_gym() -> Any:
    """gym's ``RecordVideo``, but it neither closes the environment after each episode nor draws bars of its own, it can
    be asked to render meanwhile, and an episode that is cut short has a video of its own."""
    wrappers = importlib.import_module("gym.wrappers")

    class Recorder(wrappers.RecordVideo):  # type: ignore[misc,name-defined,unused-ignore]
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

        def close_video_recorder(self) -> None:
            video = self.video_recorder
            if self.recording and getattr(video, "recorded_frames", None):
                _write(video.recorded_frames, video.frames_per_sec, video.path)
                video.write_metadata()
                video._closed = True
            super().close_video_recorder()

    return Recorder


def _write(frames: list[Any], fps: float, path: str) -> None:
    clip = importlib.import_module("moviepy.video.io.ImageSequenceClip").ImageSequenceClip(frames, fps=fps)
    clip.write_videofile(path, logger=None)


def _recorder_of_gymnasium() -> Any:
    """gymnasium's ``RecordVideo``, but it writes a video before the reset that follows: that may fail."""
    wrappers = importlib.import_module("gymnasium.wrappers")

    class Recorder(wrappers.RecordVideo):  # type: ignore[misc,name-defined,unused-ignore]
        def reset(self, **kwargs: Any) -> Any:
            if self.recording:
                self.stop_recording()
            return super().reset(**kwargs)

    return Recorder


def _every_episode(episode: int) -> bool:
    return True


def _require_video_writer() -> None:
    try:
        import moviepy  # noqa: F401
    except ImportError as error:
        raise RuntimeError("saving replays needs moviepy: pip install 'envsup[video]'") from error
