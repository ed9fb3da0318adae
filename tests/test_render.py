"""``render_grid``: one picture of all environments; and the video of the demonstration."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
from drawing import drawing_env
from helpers_failures import kill_idle
from support import Clock, Make, abnormal, in_thread, step, wait_until_only_open

from envsup import render
from envsup.__main__ import main
from envsup.frame import frame_of
from envsup.recording import record_video, recorded_modes, replay_files
from envsup.render import grid_of
from envsup.testing import Gate, ScriptedEnv
from envsup.video import VideoFile

GAP, BACKGROUND, DARK = render._GAP, render._BACKGROUND, render._DARK
Z = slice(None)


class Painter(ScriptedEnv):
    """Draws what it is given; of no library."""

    def __init__(self, picture: Any, gate: Optional[Gate] = None) -> None:
        super().__init__(gate=gate)
        self._picture = picture

    def render(self) -> Any:
        """The picture, or wait, or raise."""
        if self._picture is Ellipsis:
            assert self.gate is not None
            self.gate.hang()
        if isinstance(self._picture, Exception):
            raise self._picture
        return self._picture


class Paint:
    """A picture that pickles as a few numbers: ``colour`` all over."""

    def __init__(self, height: int, width: int, colour: int) -> None:
        self.shape, self.colour = (height, width, 3), colour

    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.full(self.shape, self.colour, np.uint8)


class OldDraw:
    """Draws as environments of gym up to 0.25 do."""

    render_mode = None

    def render(self, mode: str = "human") -> Any:
        """A picture if one is asked for."""
        return np.full((2, 3, 3), 7, np.uint8) if mode == "rgb_array" else None


class Single:
    """Draws as environments of gym 0.25 do that were made to draw one picture at a time."""

    render_mode = "single_rgb_array"

    def render(self) -> Any:
        """A picture."""
        return np.full((2, 3, 3), 7, np.uint8)


def tile(grid: Any, row: int, column: int, size: tuple[int, int]) -> Any:
    """The pixels of a tile."""
    top, left = GAP + row * (size[0] + GAP), GAP + column * (size[1] + GAP)
    return grid[top : top + size[0], left : left + size[1]]


# -- frames --


@pytest.mark.parametrize("library", ["gym", "gymnasium"])
def test_frame_of_a_library(library: str) -> None:
    pytest.importorskip(library)
    frame = frame_of(drawing_env(library))
    assert frame.shape == (32, 48, 3)
    assert frame.dtype == np.uint8
    draws_unasked = "single_rgb_array" in recorded_modes(library)  # gym 0.25.
    for mode in ("human",) if draws_unasked else (None, "human"):
        with pytest.raises(RuntimeError, match=f"render_mode={mode!r}"):
            frame_of(drawing_env(library, render_mode=mode)) if mode else frame_of(_undrawn(library))


def _undrawn(library: str) -> Any:
    from envsup import env_fns

    return env_fns("CartPole-v1", 1, api=library)[0]()  # type: ignore[arg-type]


def test_frame_of_gym_up_to_25() -> None:
    """The mode was not given where a metaclass hides it; another mode for a single picture was not known."""
    hidden = type("HiddenDraw", (OldDraw,), {"render": lambda self, *args, **kwargs: OldDraw().render(*args, **kwargs)})
    for env in (OldDraw(), hidden(), Single()):
        assert frame_of(env).tolist() == [[[7] * 3] * 3] * 2


def test_frame_of_an_environment_of_di_engine() -> None:
    """All of its tiles were dark: it draws nothing itself, the environment inside does."""
    gymnasium = pytest.importorskip("gymnasium")
    silent = type("Silent", (gymnasium.Env,), {"_env": drawing_env("gymnasium")})()
    plain = type("Plain", (), {"_env": OldDraw()})()
    drawing = type("Drawing", (Single,), {"_env": drawing_env("gymnasium")})()
    assert [frame_of(env).shape for env in (silent, plain, drawing)] == [(32, 48, 3), (2, 3, 3), (2, 3, 3)]


@pytest.mark.parametrize(
    ("drawn", "pixel"),
    [
        (np.full((2, 2), 5, np.uint8), [5, 5, 5]),
        (np.full((2, 2, 1), 6, np.uint8), [6, 6, 6]),
        (np.full((2, 2), True), [255, 255, 255]),
        (np.full((2, 2, 4), [1, 2, 3, 4], np.uint8), [1, 2, 3]),
        ([np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 9, np.uint8)], [9, 9, 9]),
    ],
)
def test_forms_of_a_frame(drawn: Any, pixel: list[int]) -> None:
    frame = frame_of(Painter(drawn))
    assert (frame.shape, frame[1, 1].tolist()) == ((2, 2, 3), pixel)


@pytest.mark.parametrize("drawn", ["text", np.zeros((2, 2, 3)), np.zeros((0, 2, 3), np.uint8)])
def test_what_is_no_frame(drawn: Any) -> None:
    with pytest.raises(TypeError, match="no picture of uint8"):
        frame_of(Painter(drawn))


@pytest.mark.parametrize("drawn", [None, []])
def test_nothing_is_no_frame(drawn: Any) -> None:
    with pytest.raises(RuntimeError, match="Painter draws nothing"):
        frame_of(Painter(drawn))


def test_large_frames_are_made_smaller() -> None:
    frame = np.arange(100, dtype=np.uint8).repeat(3).reshape(1, 100, 3).repeat(60, 0)
    small = frame_of(Painter(frame), max_side=40)
    assert small.shape == (20, 34, 3)
    assert small[0, :, 0].tolist() == list(range(0, 100, 3))
    assert frame_of(Painter(frame), max_side=100).shape == frame.shape


# -- the grid --


def test_frames_of_different_sizes_are_in_the_middle_of_equal_tiles() -> None:
    sizes = [(40, 60), (20, 60), (40, 30)]
    grid = grid_of([np.full((*size, 3), 200 + i, np.uint8) for i, size in enumerate(sizes)])
    assert grid.shape == (3 * GAP + 80, 3 * GAP + 120, 3)
    assert grid.dtype == np.uint8
    assert (tile(grid, 0, 0, sizes[0]) == 200).all()
    low, narrow = tile(grid, 0, 1, sizes[0]), tile(grid, 1, 0, sizes[0])
    assert (low[10:30] == 201).all()
    assert (low[:10] == DARK).all()
    assert (narrow[:, 15:45] == 202).all()
    assert (narrow[:, 45:] == DARK).all()
    assert (tile(grid, 1, 1, sizes[0]) == BACKGROUND).all()


def test_sides_are_even_and_a_single_frame_is_a_grid() -> None:
    assert grid_of([np.zeros((5, 7, 3), np.uint8)]).shape == (14, 16, 3)
    assert grid_of([ValueError("no")]).shape == (104, 168, 3)


def test_dark_tiles_have_their_number_written_in(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    drawn = [ValueError("no"), ValueError("no")]
    grid = grid_of(drawn)
    one, other = (tile(grid, 0, i, (96, 160)) for i in (0, 1))
    assert (one > 200).any()
    assert (one != other).any(), "the number is another"
    assert (grid_of(drawn, ["same", "same"])[:, : 2 * GAP + 160] != grid[:, : 2 * GAP + 160]).any()
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert (tile(grid_of(drawn), 0, 0, (96, 160)) == DARK).all()


# -- of a supervisor --


def test_all_kinds_of_environments(make: Make) -> None:
    """One draws, one is small, one fails, and one cannot draw."""
    pictures = [Paint(40, 60, 200), Paint(20, 60, 100), ValueError("no paint")]
    sup = make([*(partial(Painter, picture) for picture in pictures), ScriptedEnv])
    with pytest.raises(AssertionError):
        sup.render_grid()
    sup.launch()
    grid = sup.render_grid(captions=False)
    assert (tile(grid, 0, 0, (40, 60)) == 200).all()
    assert (tile(grid, 0, 1, (40, 60))[10:30] == 100).all()
    assert all(tile(grid, 1, i, (40, 60))[-1, -1].tolist() == [DARK] * 3 for i in (0, 1))
    assert sup.render_grid(max_side=30, captions=False).shape == (3 * GAP + 40, 3 * GAP + 60, 3)
    assert sup.t == [0] * 4
    with pytest.raises(ValueError, match="max_side"):
        sup.render_grid(max_side=0)


def test_steps_in_flight_are_none_of_its_business(make_local: Make) -> None:
    sup = make_local([partial(Painter, Paint(40, 60, 200))] * 2, envs_per_child=2)
    sup.launch()
    sup.step({0: 5}, block=False)
    before = sup.render_grid()
    assert sup.recv(timeout=10).data.obs.tolist() == [-1, 0, 1, 5]
    assert (sup.render_grid() == before).all(), "what is written counts the step"


def test_an_environment_that_hangs_is_a_dark_tile(make_local: Make, clock: Clock) -> None:
    with Gate() as gate:
        factories = [partial(Painter, Paint(40, 60, 200)), partial(Painter, ..., gate)]
        sup = make_local(factories, clock=clock, reset_timeout=5)
        sup.launch()
        with in_thread(partial(sup.render_grid, captions=False)) as outcome:
            gate.wait_until_reached()
            wait_until_only_open(sup, {1})
            clock.advance(6)
            gate.release()
        assert (tile(outcome[0], 0, 0, (40, 60)) == 200).all()
        assert tile(outcome[0], 0, 1, (40, 60))[-1, -1].tolist() == [DARK] * 3
        assert sup.t == [0, 0]


# -- the video --


def video_of(path: Path, size: tuple[int, int]) -> Any:
    """The frames of a video: bytes of (frame, height, width, 3)."""
    ffmpeg = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    command = [ffmpeg, "-v", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60, stdin=subprocess.DEVNULL)
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, *size, 3)


def test_video_file(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    with VideoFile(tmp_path / "a.mp4", 20) as video:
        for size, colour in (((63, 64), 200), ((63, 64), 50), ((40, 90), 120)):
            video.add(np.full((*size, 3), colour, np.uint8))
    frames = video_of(tmp_path / "a.mp4", (64, 64))
    assert frames.shape == (3, 64, 64, 3)
    assert np.abs(frames[:, 20, 20, 0].astype(int) - [200, 50, 120]).max() < 10
    with VideoFile(tmp_path / "b.mp4", 20):
        pass
    assert not (tmp_path / "b.mp4").exists()


@pytest.mark.parametrize(
    "frame",
    [
        None,
        np.zeros((8, 8, 3)),
        np.zeros((8, 8), np.uint8),
        np.zeros((8, 8, 4), np.uint8),
        np.zeros((0, 8, 3), np.uint8),
    ],
)
def test_video_takes_frames_alone(frame: Any, tmp_path: Path) -> None:
    """Others were written as noise, or not at all."""
    pytest.importorskip("imageio_ffmpeg")
    with VideoFile(tmp_path / "a.mp4", 20) as video, pytest.raises(ValueError, match="a frame is uint8"):
        video.add(frame)
    assert not (tmp_path / "a.mp4").exists()


@pytest.mark.parametrize(("name", "error"), [("a.gif", ValueError), ("a", ValueError), ("folder.mp4", OSError)])
def test_video_that_cannot_be_written_is_an_error(name: str, error: type[Exception], tmp_path: Path) -> None:
    """It was nowhere, and nobody said so."""
    pytest.importorskip("imageio_ffmpeg")
    (tmp_path / "folder.mp4").mkdir()
    with pytest.raises(error):
        VideoFile(tmp_path / name, 20)
    with pytest.raises(ValueError, match="fps"):
        VideoFile(tmp_path / "a.mp4", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.mp4"]


def test_video_that_came_to_nothing_is_an_error(tmp_path: Path) -> None:
    """The encoder had ended without a frame, and the file was empty."""
    pytest.importorskip("imageio_ffmpeg")

    def drop(*_: Any, **__: Any) -> Iterator[None]:
        while True:
            yield

    video = VideoFile(tmp_path / "a.mp4", 20)
    video._write_frames = drop
    video.add(np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(OSError, match=r"a\.mp4' could not be written"):
        video.close()


def test_video_that_is_closed_takes_no_more(tmp_path: Path) -> None:
    """It began anew, and wrote over what was there."""
    pytest.importorskip("imageio_ffmpeg")
    video = VideoFile(tmp_path / "a.mp4", 20)
    video.add(np.zeros((8, 8, 3), np.uint8))
    video.close()
    video.close()
    with pytest.raises(ValueError, match="closed"):
        video.add(np.zeros((8, 8, 3), np.uint8))
    assert len(video_of(tmp_path / "a.mp4", (8, 8))) == 1


def test_demonstration_writes_a_video(tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    pytest.importorskip("imageio_ffmpeg")
    command = [sys.executable, "-m", "envsup", "--steps", "60", "--num-envs", "2", "--render", "a.mp4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\nvideo                a.mp4 (60 frames)\n")
    frames = video_of(tmp_path / "a.mp4", (134 + 2 * GAP, 2 * 200 + 3 * GAP))
    assert len(frames) == 60
    assert len({frame.tobytes() for frame in frames}) > 30, "they move"


def test_frames_are_bounded_however_long_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from envsup.demo import Film

    taken: list[Any] = []
    sup: Any = SimpleNamespace(render_grid=lambda max_side: "grid")
    video: Any = SimpleNamespace(add=taken.append)
    film = Film(sup, video, 10_001)
    for received in range(1, 10_002):
        film.after_step(received)
    assert 190 <= len(taken) <= 200


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a.gif", "must end in .mp4"),
        ("/no/such/folder/a.mp4", "--render: FileNotFoundError"),
        (".mp4", "--render: ValueError"),
    ],
)
def test_what_cannot_be_written(path: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) if path.endswith("gif") else pytest.MonkeyPatch.context():
        assert main(["--steps", "10", "--num-envs", "1", "--render", path]) == 2
    assert message in capfd.readouterr().err


def test_missing_video_writer(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert main(["--steps", "10", "--num-envs", "1", "--render", "a.mp4"]) == 2
    output, errors = capfd.readouterr()
    assert (output, "pip install 'envsup[video]'" in errors) == ("", True)


def test_vector_environments_draw_too() -> None:
    pytest.importorskip("gymnasium")
    from envsup.vector_worker import AdaptedEnv

    assert frame_of(AdaptedEnv(drawing_env("gymnasium"), False), 16).shape == (11, 16, 3)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:UserWarning")
@pytest.mark.parametrize("which", [0, 1], ids=["single", "list"])
@pytest.mark.parametrize("library", ["gym", "gymnasium"])
def test_environments_that_are_recorded_are_drawn_as_well(
    make_fork: Make, library: str, which: int, tmp_path: Path
) -> None:
    """Of gym 0.25 nothing was recorded in the mode "rgb_array_list", which it does not have, and nobody said so."""
    pytest.importorskip("moviepy")
    mode = recorded_modes(library)[which]
    sup = make_fork([partial(drawing_env, library, render_mode=mode)])
    sup.enable_save_replay(str(tmp_path))
    sup.launch()
    for t in (1, 2):
        step(sup, {0: 1})
        assert (tile(sup.render_grid(captions=False), 0, 0, (32, 48)) == 60 * t).all()
    sup.close()
    ((path,),) = replay_files(tmp_path).values()
    assert len(video_of(path, (32, 48))) == 3


@pytest.mark.parametrize(("version", "other"), [("0.25.1", "single_rgb_array"), ("0.26.2", "rgb_array_list")])
def test_mode_that_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch, version: str, other: str) -> None:
    gym = pytest.importorskip("gym")
    monkeypatch.setattr(gym, "__version__", version)
    wrong = drawing_env("gym", render_mode="ansi")
    with pytest.raises(RuntimeError, match=f"'rgb_array' or '{other}' when it is made; it has 'ansi'"):
        record_video(wrong, "nowhere", 0)


def test_a_worker_that_has_died_is_a_new_one_and_drawn(make_fork: Make) -> None:
    sup = make_fork([partial(Painter, Paint(40, 60, 200))])
    sup.launch()
    kill_idle(sup, 0)
    assert (tile(sup.render_grid(captions=False), 0, 0, (40, 60)) == 200).all()
    assert abnormal(step(sup, {0: 1})[0]), "the episode was lost"
