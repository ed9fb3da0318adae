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
    library, name = library_of(env), type(getattr(env, "unwrapped", env)).__name__
    if library is None:
        raise TypeError(f"{name} has no enable_save_replay method and is no gym or gymnasium environment")
    mode = getattr(env, "render_mode", None)
    if mode not in ("rgb_array", "rgb_array_list"):
        raise RuntimeError(f"saving replays of {name} needs render_mode='rgb_array' when it is made; it has {mode!r}")
    _require_video_writer()
    prefix = f"env{env_id}-{datetime.now():%Y%m%d-%H%M%S%f}-{os.getpid()}"
    recorder = _recorder_of_gym(env) if library == "gym" else importlib.import_module("gymnasium.wrappers").RecordVideo
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Overwriting existing videos")  # It does not.
        return recorder(env, folder, episode_trigger=_every_episode, name_prefix=prefix)


def _recorder_of_gym(env: Any) -> Any:
    """gym's ``RecordVideo``, but it does not close ``env`` after each episode that it has recorded."""
    gym, wrappers = importlib.import_module("gym"), importlib.import_module("gym.wrappers")

    class KeptOpen(gym.Wrapper):  # type: ignore[misc,name-defined,unused-ignore]
        def close(self) -> None:
            pass

    class Recorder(wrappers.RecordVideo):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self, env: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(KeptOpen(env), *args, **kwargs)

        def close(self) -> None:
            super().close()
            env.close()

    return Recorder


def _every_episode(episode: int) -> bool:
    return True


def _require_video_writer() -> None:
    try:
        import moviepy  # noqa: F401
    except ImportError as error:
        raise RuntimeError("saving replays needs moviepy: pip install 'envsup[video]'") from error
