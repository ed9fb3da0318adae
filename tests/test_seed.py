"""CONTRACT section 3, seed, and what section 4 says of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import Make, observation_of, scripted
from worlds import Bare, NewGym, OldGym

from envsup.testing import ScriptedEnv


def test_int_gives_seed_plus_i(make: Make) -> None:
    sup = make(scripted(3))
    sup.seed(10)
    sup.launch()
    assert sup.seed_value == [10, 11, 12]


@pytest.mark.parametrize("seed", [[7, 3], (7, 3), np.array([7, 3]), {0: 7, 1: 3}])
def test_list_or_dict_gives_one_each(make_local: Make, seed: Any) -> None:
    sup = make_local()
    sup.seed(seed)
    sup.launch()
    assert sup.seed_value == [7, 3]


def test_dict_seeds_the_named_ones(make_local: Make) -> None:
    sup = make_local()
    sup.seed({1: 4})
    sup.launch()
    assert sup.seed_value == [-1, 4]


@pytest.mark.parametrize("seed", [[None, 5], {0: None, 1: 5}])
def test_none_entry_is_skipped(make_local: Make, seed: Any) -> None:
    sup = make_local()
    sup.seed(seed)
    sup.launch()
    assert sup.seed_value == [-1, 5]


@pytest.mark.parametrize("seed", [[], [1], [1, 2, 3]])
def test_list_of_another_length_is_an_assertion_error(make_fork: Make, seed: Any) -> None:
    with pytest.raises(AssertionError):
        make_fork().seed(seed)


@pytest.mark.parametrize("seed", [None, "12", 1.0, True, {1, 2}, [1, "2"], {0: 1.5}, np.array(5)])
def test_anything_else_is_a_type_error(make_fork: Make, seed: Any) -> None:
    with pytest.raises(TypeError, match="seed"):
        make_fork().seed(seed)


def test_seed_of_an_unknown_env_is_a_value_error(make_fork: Make) -> None:
    with pytest.raises(ValueError, match="no environment 2"):
        make_fork().seed({2: 1})


@pytest.mark.parametrize("dynamic_seed", [None, True, False])
def test_dynamic_seed_is_passed_on_unless_it_is_none(make_local: Make, dynamic_seed: Any) -> None:
    sup = make_local()
    sup.seed(1, dynamic_seed)
    sup.launch()
    assert sup.dynamic_seed == [dynamic_seed] * 2


def test_seed_is_sent_with_one_argument_without_dynamic_seed(make_local: Make) -> None:
    """As ``env.seed(s)``: OldGym's method takes no more."""
    sup = make_local([OldGym])
    sup.seed(4)
    sup.launch()
    assert sup.seeded == [4]


class Typed(ScriptedEnv):
    """Remembers the type of its seed."""

    def seed(self, seed: int, dynamic_seed: Any = None) -> None:
        """Note the type."""
        super().seed(seed, dynamic_seed)
        self.seed_type = type(seed).__name__

    seed_type = ""


@pytest.mark.parametrize("seed", [np.int64(3), [np.int32(3)], {0: np.uint8(3)}, np.array([3]), {np.int64(0): 3}])
def test_numpy_integers_arrive_as_int(make_local: Make, seed: Any) -> None:
    sup = make_local([Typed])
    sup.seed(seed)
    sup.launch()
    assert (sup.seed_value, sup.seed_type) == ([3], ["int"])


def test_seed_on_a_running_supervisor_reaches_the_workers_before_their_next_reset(
    make_local: Make, tmp_path: Path
) -> None:
    logs = [tmp_path / "0", tmp_path / "1"]
    sup = make_local([partial(ScriptedEnv, log=str(log)) for log in logs])
    sup.launch()
    sup.seed({0: 8})
    assert sup.seed_value == [-1, -1], "not at once"
    sup.reset()
    assert sup.seed_value == [8, -1]
    assert logs[0].read_text().splitlines()[-2:] == ["seed 8", "reset []"]
    sup.reset()
    assert logs[0].read_text().count("seed") == 1, "once"


def test_seed_on_a_running_supervisor_reaches_an_automatic_reset(make_local: Make) -> None:
    sup = make_local(scripted(1, length=1))
    sup.launch()
    sup.seed(9)
    sup.step({0: 1})
    assert observation_of(sup, 0) == [9, 1, 0, 0]


def test_seed_of_another_seed_keeps_those_that_are_not_named(make_local: Make) -> None:
    """A renewed worker gets its seed again."""
    sup = make_local(scripted(2, on_reset=["ok", "ok", "raise"]), retry_type="renew", max_try=2)
    sup.seed([5, 6])
    sup.launch()
    sup.seed({0: 8})
    sup.reset()
    sup.reset()
    assert sup.seed_value == [8, 6]


def test_without_seed_method_it_goes_into_the_first_reset_after_it_was_set_and_into_no_other(make_local: Make) -> None:
    sup = make_local([NewGym, NewGym])
    sup.seed(10)
    sup.launch()
    sup.reset()
    sup.seed(20)
    sup.reset()
    sup.reset()
    assert sup.seeds == [[10, None, 20, None], [11, None, 21, None]]


def test_reset_parameter_seed_of_the_caller_wins(make_local: Make) -> None:
    sup = make_local([NewGym])
    sup.seed(10)
    sup.launch([{"seed": 3}])
    assert sup.seeds == [[3]]


def test_env_that_can_take_no_seed_says_so(make_local: Make) -> None:
    sup = make_local([Bare])
    sup.seed(1)
    with pytest.raises(TypeError, match=r"Bare .*seed"):
        sup.launch()


def test_failed_reset_does_not_use_up_the_seed(make_local: Make) -> None:
    sup = make_local([partial(Moody, 1)], max_try=2)
    sup.seed(3)
    sup.launch()
    assert sup.seeds == [[3, 3]]


class Moody(NewGym):
    """Fails its first resets."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Fail, or reset."""
        result = super().reset(seed=seed, options=options)
        if len(self.seeds) <= self.failures:
            raise ValueError("moody")
        return result
