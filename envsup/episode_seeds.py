"""Seeds derived from the seed of a run, so that no two episodes or lives share one."""

from __future__ import annotations

import numpy as np

_MASK = 2**31 - 1  # Many environments take no larger seed.


def derived_seed(seed: int, *path: int) -> int:
    """The seed of what ``path`` names, such as (environment, episode): a function of these numbers alone.

    By ``numpy.random.SeedSequence``; below 2**31.
    """
    entropy = [abs(seed), int(seed < 0), len(path)]
    return int(np.random.SeedSequence(entropy, spawn_key=path).generate_state(1, np.uint32)[0]) & _MASK
