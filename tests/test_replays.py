"""``enable_save_replay`` writes real videos, whatever becomes of the workers, and none of them over another."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from drawing import LENGTH, OwnReplay, drawing_env
from helpers_failures import kill_idle
from support import FORK, THREAD, Kind, Make, Maker, abnormal, step

from envsup.recording import replay_files

pytest.importorskip("gymnasium")
pytest.importorskip("moviepy")
imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:UserWarning")

WHOLE = LENGTH + 1
KINDS_OF_ENV = {
    "own": OwnReplay,
    "gym": partial(drawing_env, "gym"),
    "gymnasium": partial(drawing_env, "gymnasium"),
}
of_each_library = pytest.mark.parametrize("make_env", KINDS_OF_ENV.values(), ids=KINDS_OF_ENV)
Factory = Callable[..., Any]


def frames_of(path: Path) -> int:
    """How many frames a video has; fails if it is none."""
    return int(imageio_ffmpeg.count_frames_and_secs(str(path))[0])


def videos(folder: Path) -> dict[Path, bytes]:
    """All videos, and what is in them."""
    return {path: path.read_bytes() for path in folder.rglob("*.mp4")}


def whole_videos(folder: Path) -> dict[Path, bytes]:
    """Those of whole episodes: gym 0.25 writes a video while the episode goes on."""
    return {path: data for path, data in videos(folder).items() if _is_whole(path)}


def _is_whole(path: Path) -> bool:
    try:
        return frames_of(path) == WHOLE
    except RuntimeError:
        return False


@of_each_library
def test_a_killed_worker_and_its_successor_leave_all_their_videos(
    make_fork: Make, make_env: Factory, tmp_path: Path
) -> None:
    """The episode that was killed has none, or (gym 0.25) a part of one."""
    sup = make_fork([make_env] * 2)
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    sup.enable_save_replay([str(folder) for folder in folders])
    sup.launch()
    for _ in range(WHOLE):
        step(sup, {0: 1, 1: 1})
    before = whole_videos(tmp_path)
    assert len(before) == 2
    step(sup, {0: "kill", 1: 1})
    for _ in range(LENGTH):
        step(sup, {0: 1, 1: 1})
    sup.close()
    after = whole_videos(tmp_path)
    assert before.items() <= after.items(), "nothing was written over"
    assert len(after) == 4, "two episodes of each environment"
    assert {path.parent for path in after} == set(folders)


@pytest.mark.parametrize("library", ["gym", "gymnasium"])
@pytest.mark.parametrize(
    "kind", [FORK, Kind("group", {**FORK.kwargs, "envs_per_child": 2}), THREAD], ids=lambda kind: kind.name
)
def test_environments_that_are_built_anew_write_over_nothing(kind: Kind, library: str, tmp_path: Path) -> None:
    """Each life has one episode; in a group and in a thread all lives are of one process."""
    maker = Maker(kind)
    sup = maker([partial(drawing_env, library, 1)] * 2, retry_type="renew", max_try=3)
    sup.enable_save_replay(str(tmp_path))
    sup.launch()
    for _ in range(2 * LENGTH):
        step(sup, {0: 1, 1: 1})
    maker.close()
    found = replay_files(tmp_path)
    assert {env_id: [frames_of(path) for path in paths][:2] for env_id, paths in found.items()} == {
        0: [WHOLE, WHOLE],
        1: [WHOLE, WHOLE],
    }
    assert sorted(path for paths in found.values() for path in paths) == sorted(videos(tmp_path))


@of_each_library
def test_an_episode_that_is_run_again_is_a_whole_video(make_fork: Make, make_env: Factory, tmp_path: Path) -> None:
    sup = make_fork([make_env], recover="replay")
    sup.enable_save_replay(str(tmp_path))
    sup.launch()
    step(sup, {0: 1})
    pid = sup._children[0].pid
    kill_idle(sup, 0)
    for _ in range(LENGTH - 1):
        step(sup, {0: 1})
    assert sup._children[0].pid != pid
    sup.close()
    assert [frames_of(path) for path in videos(tmp_path)].count(WHOLE) == 1


@pytest.mark.parametrize("library", ["gym", "gymnasium"])
def test_an_episode_that_a_failed_step_cuts_short_has_a_video_of_its_own(library: str, tmp_path: Path) -> None:
    maker = Maker(FORK)
    sup = maker([partial(drawing_env, library)])
    sup.enable_save_replay(str(tmp_path))
    sup.launch()
    step(sup, {0: 1})
    assert abnormal(step(sup, {0: "raise"})[0])
    for _ in range(LENGTH):
        step(sup, {0: 1})
    maker.close()
    assert [frames_of(path) for path in replay_files(tmp_path)[0]][:2] == [2, WHOLE]


@pytest.mark.parametrize("library", ["gym", "gymnasium"])
def test_a_folder_that_is_gone_costs_no_episode(make_fork: Make, library: str, tmp_path: Path) -> None:
    """The end of an episode was a failed step, and the run ended in a reset that could not be done."""
    folder = tmp_path / "replays"
    sup = make_fork([partial(drawing_env, library)])
    sup.enable_save_replay(str(folder))
    sup.launch()
    step(sup, {0: 1})
    shutil.rmtree(folder)
    for n in range(2, 4 * LENGTH):
        assert not abnormal(step(sup, {0: 1})[0])
        if n == 2 * LENGTH:
            shutil.rmtree(folder, ignore_errors=True)
            folder.touch()  # Now it cannot be made.
    sup.close()
    assert folder.is_file()


def test_a_second_run_goes_on_in_the_same_folder(make_fork: Make, tmp_path: Path) -> None:
    sup = make_fork([partial(drawing_env, "gymnasium")])
    for runs in (1, 2):
        sup.enable_save_replay(str(tmp_path))
        sup.launch()
        step(sup, {0: 1})
        sup.close()
        (files,) = replay_files(tmp_path).values()
        assert [frames_of(path) for path in files] == [2] * runs


def test_replay_files_knows_names_and_order(tmp_path: Path) -> None:
    names = [
        "env1-20300101-000000000000-7-episode-0.mp4",
        "env0-20300101-000000000000-7-episode-2.mp4",
        "env0-20300101-000000000000-7-episode-10.mp4",
        "env0-20300102-000000000000-3-episode-0.mp4",
    ]
    for name in [*names, "env0-other.mp4", names[0].replace(".mp4", ".meta.json")]:
        (tmp_path / name).touch()
    assert replay_files(tmp_path) == {0: [tmp_path / name for name in names[1:]], 1: [tmp_path / names[0]]}
    assert replay_files(tmp_path / "nothing") == {}
