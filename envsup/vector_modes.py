"""What gymnasium's vector environments let one choose: when to reset and what, and how to batch the spaces."""

from __future__ import annotations

import numbers
from enum import Enum
from typing import TYPE_CHECKING, Any, Optional, Sequence, Union

import numpy as np
from gymnasium import Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from envsup.vector_worker import Traits

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode as AutoresetMode
else:
    try:
        from gymnasium.vector import AutoresetMode
    except ImportError:  # gymnasium 1.0

        class AutoresetMode(Enum):
            """When an environment whose episode has ended is reset: at the next step, the same, or by the caller."""

            NEXT_STEP = "NextStep"
            SAME_STEP = "SameStep"
            DISABLED = "Disabled"


def spaces_of(spaces: Sequence[Any], mode: Any) -> tuple[Any, Any]:
    """(observation space of the batch, that of a single environment), given those of all environments.

    Raises:
        ValueError, TypeError: if there is no such mode.
    """
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, Space) for space in mode):
            raise TypeError(f"observation_mode is to hold two spaces, not {type(mode[0])} and {type(mode[1])}")
        return mode
    if mode == "same":
        return batch_space(spaces[0], len(spaces)), spaces[0]
    if mode == "different":
        return batch_differing_spaces(list(spaces)), spaces[0]
    raise ValueError(f"observation_mode is 'same', 'different' or a pair of spaces, not {mode!r}")


def check_spaces(traits: Sequence[Traits], mode: Any, single: Any) -> None:
    """Check that the environments can be batched.

    Raises:
        RuntimeError: if the spaces of one differ from those of the first.
    """
    for env_id, trait in enumerate(traits):
        space = trait.observation_space
        same = space == single if mode == "same" else is_space_dtype_shape_equiv(space, single)
        if not same:
            hint = "; if that is intended, use observation_mode='different'" if mode == "same" else ""
            raise RuntimeError(f"environment {env_id} has the observation space {space}, not {single}{hint}")
        if trait.action_space != traits[0].action_space:
            raise RuntimeError(
                f"environment {env_id} has the action space {trait.action_space}, not {traits[0].action_space}"
            )


def seeds_of(seed: Union[int, Sequence[Optional[int]], None], num_envs: int) -> dict[int, int]:
    """The seeds of those environments that are to have one.

    Raises:
        ValueError: for another number of seeds than of environments.
    """
    if seed is None:
        return {}
    if isinstance(seed, numbers.Integral):
        return {i: int(seed) + i for i in range(num_envs)}
    seeds: Sequence[Optional[int]] = seed  # type: ignore[assignment]
    if len(seeds) != num_envs:
        raise ValueError(f"there are {len(seeds)} seeds for {num_envs} environments")
    return {i: s for i, s in enumerate(seeds) if s is not None}


def to_reset(options: Optional[dict[str, Any]], num_envs: int) -> tuple[Optional[dict[str, Any]], list[int]]:
    """(the options for the environments, which of them to reset).

    Raises:
        TypeError: if ``options["reset_mask"]`` is no array of bool.
        ValueError: if it has another length, or no True.
    """
    if options is None or "reset_mask" not in options:
        return options, list(range(num_envs))
    mask = options["reset_mask"]
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        raise TypeError(f"options['reset_mask'] must be a numpy array of bool, not {mask!r}")
    if mask.shape != (num_envs,) or not mask.any():
        raise ValueError(f"options['reset_mask'] must have the shape ({num_envs},) and one True, not {mask}")
    others = {key: value for key, value in options.items() if key != "reset_mask"}
    return others, [int(i) for i in np.flatnonzero(mask)]
