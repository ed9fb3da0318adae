"""A small file for each failure, from which the episode that led to it can be run again.

A file is JSON: what a person wants to know as text, and the data as a pickle in base64 under "episode".  Loading it
unpickles that: load only files that you trust.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import os
import pickle
import secrets
import time
from pathlib import Path
from typing import Any, NamedTuple, Optional, Sequence, Union

from envsup.episode_log import EpisodeLog
from envsup.pickled import describe, dump

logger = logging.getLogger("envsup")

FORMAT = "envsup episode 1"
MAX_FILES = 1000
_NOTHING: Any = object()


class FailedEpisode(NamedTuple):
    """What led to a failure.

    Attributes:
        env_id: of the environment.
        method: what failed, "step" or "reset".
        seed: what the environment was seeded with before this episode, or before an earlier one of its life.
        dynamic_seed: what its ``seed`` method was given beside that.
        params: keyword arguments of the reset.
        actions: of the episode; the last one is that of the step that failed.
        error: the failure, as text.
        left_out: what of the parameters and the actions could not be pickled, as text; there is None in its place.
    """

    env_id: int
    method: str
    seed: Optional[int]
    dynamic_seed: Optional[bool]
    params: dict[str, Any]
    actions: list[Any]
    error: str
    left_out: Sequence[str] = ()


class CrashFiles:
    """Writes a file into a folder for each failure, ``MAX_FILES`` at most.

    Raises:
        OSError: if the folder cannot be made or written to.
    """

    def __init__(self, folder: Union[str, "os.PathLike[str]"]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise PermissionError(f"crash_dir {str(self.folder)!r} cannot be written to")
        self._owner = f"{os.getpid()}-{secrets.token_hex(3)}"  # Others may write into it too.
        self._numbers = itertools.count(1)

    def write(self, env_id: int, log: EpisodeLog, method: str, error: BaseException, action: Any = _NOTHING) -> None:
        """Write a file; what goes wrong with that is logged, and disturbs nothing else."""
        actions = list(log.actions) if action is _NOTHING else [*log.actions, action]
        number = next(self._numbers)
        if number > MAX_FILES:
            return
        try:
            told = describe(error).traceback
            episode = FailedEpisode(env_id, method, log.seed, log.dynamic_seed, dict(log.params), actions, told)
            path = self.folder / f"env{env_id}-{time.strftime('%Y%m%d-%H%M%S')}-{self._owner}-{number}.json"
            _write(path, _as_json(episode))
        except Exception:
            logger.warning("The failure of environment %s could not be written down.", env_id, exc_info=True)
        else:
            logger.info("The failure of environment %s is written down in %s.", env_id, path)


def _as_json(episode: FailedEpisode) -> str:
    data, left_out = _pickled(episode)
    text = {
        "format": FORMAT,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "env_id": episode.env_id,
        "method": episode.method,
        "error": episode.error,
        "seed": episode.seed,
        "reset_param": shown(episode.params),
        "steps": len(episode.actions),
        "left_out": left_out,
        "episode": base64.b64encode(data).decode("ascii"),
    }
    return json.dumps(text, indent=1)


def _pickled(episode: FailedEpisode) -> tuple[bytes, list[str]]:
    """The data, without what cannot be pickled, as actions for threads need not be; and that, as text."""
    params, actions = episode.params, episode.actions
    left_out: list[str] = []

    def kept(value: Any, name: str) -> Any:
        try:
            dump(value)
        except Exception:
            left_out.append(f"{name}: {shown(value)}")
            return None
        return value

    try:
        return dump((episode.dynamic_seed, params, actions)), left_out
    except Exception:
        params = {key: kept(value, f"the reset parameter {key}") for key, value in params.items()}
        actions = [kept(action, f"the action of step {t}") for t, action in enumerate(actions, 1)]
        return dump((episode.dynamic_seed, params, actions)), left_out


def shown(value: Any) -> str:
    """A value as text, whatever it thinks of that."""
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}, which cannot be turned into text>"


def _write(path: Path, text: str) -> None:
    """All of it or nothing, whatever happens meanwhile."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(text)
    unfinished.replace(path)


def load(path: Union[str, "os.PathLike[str]"]) -> FailedEpisode:
    """Read what ``CrashFiles`` wrote.  It is unpickled: load only what you trust.

    Raises:
        ValueError: if the file is no such file.
        OSError: if it cannot be read.
    """
    try:
        text = json.loads(Path(path).read_text())
        if text["format"] != FORMAT:
            raise ValueError(text["format"])
        dynamic_seed, params, actions = pickle.loads(base64.b64decode(text["episode"]))
        found = text["env_id"], text["method"], text["seed"]
        return FailedEpisode(*found, dynamic_seed, params, actions, text["error"], text.get("left_out", ()))
    except (ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{os.fspath(path)} is no file of crash_dir") from error
