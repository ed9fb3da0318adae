"""The rounds of a vector environment: one at a time, and the errors for calls out of order."""

from __future__ import annotations

from typing import Any, Mapping, Optional, Sequence

from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded

from envsup.collect import StepArrays
from envsup.vector_supervisor import Round, VectorSupervisor, WaitTimeout


class Rounds:
    """What is sent by ``step_async`` or ``reset_async`` and waited for by ``step_wait`` or ``reset_wait``.

    Arguments:
        owner: the name of the class whose calls these are, for the errors.
    """

    def __init__(self, supervisor: VectorSupervisor, owner: str) -> None:
        self._supervisor = supervisor
        self._owner = owner
        self._round: Optional[Round] = None
        self._pending = ""
        self._needs_reset = True

    def begin(
        self,
        what: str,
        env_ids: Sequence[int],
        actions: Sequence[Any],
        resets: Mapping[int, dict[str, Any]],
        seeds: Optional[dict[int, int]] = None,
    ) -> None:
        """Send a "step" or a "reset"; see ``VectorSupervisor.begin``.  If this raises, a reset is needed."""
        try:
            self._round = self._supervisor.begin(env_ids, actions, resets, seeds)
        except BaseException:
            self._needs_reset = True
            raise
        self._pending = what

    def expect(self, what: str) -> Round:
        """The round that was sent.

        Raises:
            NoAsyncCallError: if there is none of that name.
        """
        self.assert_open()
        if self._round is None or self._pending != what:
            raise NoAsyncCallError(f"{what}_wait was called without {what}_async before it", what)
        return self._round

    def finish(self, timeout: Optional[float] = None) -> Optional[StepArrays]:
        """Wait for the replies; see ``VectorSupervisor.finish``.  If this raises anything else, a reset is needed.

        Raises:
            TimeoutError: if not all came within ``timeout`` seconds; this may be called again then.
        """
        assert self._round is not None
        try:
            arrays = self._supervisor.finish(self._round, timeout)
        except TimeoutError as error:
            raise WaitTimeout(f"{self._pending}_wait: {error}") from None
        except BaseException:
            self._round, self._needs_reset = None, True
            raise
        self._round = None
        if self._pending == "reset":
            self._needs_reset = False
        return arrays

    def drop(self) -> None:
        """Wait for what was sent, if anything was; nobody is to see the replies."""
        if self._round is not None:
            self.finish()

    def forget(self) -> None:
        """Nobody will wait for what was sent, as all is being closed."""
        self._round = None

    def assert_open(self) -> None:
        """Check that the workers run."""
        if self._supervisor.closed:
            raise ClosedEnvironmentError(f"the {self._owner} is closed")

    def assert_idle(self, what: str) -> None:
        """Check that a call of ``what`` would come in order: the workers run, and nothing is on its way."""
        self.assert_open()
        if self._round is not None:
            pending = self._pending
            raise AlreadyPendingCallError(f"{what} was called before {pending}_wait for {pending}_async", pending)

    def assert_reset(self) -> None:
        """Check that there has been a reset, and that no round since was interrupted."""
        if self._needs_reset:
            raise ResetNeeded("call reset() before step()")
