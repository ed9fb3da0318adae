"""A supervisor of scripted environments against a small model of it, driven by Hypothesis."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, NamedTuple, Optional, Union

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import FORK, THREAD, abnormal

from envsup import EnvState, EnvSupervisor
from envsup.testing import ScriptedEnv

ENVS, LENGTH, EPISODES = 3, 3, 3
FAULTS = ("raise", "none", "unpicklable error")
Action = Union[int, str]


class Answer(NamedTuple):
    """What recv has to return: the method, the observation (None for a failure) and whether it ends the episode."""

    method: str
    obs: Optional[list[float]]
    done: bool = False


class EnvModel:
    """One environment as it should be."""

    def __init__(self, seed: Optional[int], param: dict[str, Any]) -> None:
        self.seed, self.param = seed, param
        self.new_seed = False
        self.count = 0
        self.state = EnvState.VOID
        self.ready: Optional[list[float]] = None
        self.due: deque[Answer] = deque()
        # Sent without blocking since nothing was due: what is done next must not depend on who is faster.
        self.sent: list[Answer] = []
        self.build()

    def build(self) -> None:
        """In a new worker."""
        self.in_worker = -1 if self.seed is None else self.seed
        self.episode, self.t = -1, 0

    def observation(self, number: float) -> list[float]:
        return [self.in_worker, self.episode, self.t, number]

    def reset(self) -> Answer:
        if self.new_seed:
            self.new_seed = False
            assert self.seed is not None
            self.in_worker = self.seed
        self.episode, self.t = self.episode + 1, 0
        return Answer("reset", self.observation(0))

    def step(self, action: Action) -> list[Answer]:
        """The answers to a step, that of the reset that it causes included."""
        if action == "kill":
            self.build()
            return [Answer("step", None), self.reset()]
        if action in FAULTS:
            self.t += action == "none"
            return [Answer("step", None), self.reset()]
        self.t += 1
        done = action == "done" or self.t >= LENGTH
        answers = [Answer("step", self.observation(0 if isinstance(action, str) else action), done)]
        if done:
            self.count += 1
            if self.count < EPISODES:
                answers.append(self.reset())
        return answers

    def send(self, answers: list[Answer]) -> None:
        """Answers are due, and come out of recv."""
        self.due.extend(answers)
        self.sent.extend(answers)

    def deliver(self, answer: Answer) -> None:
        """An answer reaches the user."""
        if answer.obs is None:
            self.state = EnvState.ERROR
            return
        self.ready = answer.obs
        if answer.method == "reset":
            self.state = EnvState.RUN
        elif answer.done:
            self.state = EnvState.DONE


ids = st.sets(st.integers(0, ENVS - 1), min_size=1)
plain = st.integers(1, 9)


class Comparison(RuleBasedStateMachine):
    """Does the same to a supervisor and to the model."""

    kind = THREAD
    actions: st.SearchStrategy[Action] = st.one_of(plain, st.sampled_from(("done", *FAULTS)))

    def __init__(self) -> None:
        super().__init__()
        fns = [partial(ScriptedEnv, length=LENGTH)] * ENVS
        self.sup = EnvSupervisor(env_fn=fns, episode_num=EPISODES, max_try=3, **self.kind.kwargs)
        self.seeds: list[Optional[int]] = [None] * ENVS
        self.model: list[EnvModel] = []

    @initialize()
    def start(self) -> None:
        self.launch()

    def teardown(self) -> None:
        self.sup.close()

    def quiet(self) -> bool:
        """Whether no answer is due."""
        return not any(m.due for m in self.model)

    # -- opening and closing --

    @precondition(lambda self: not self.model)
    @rule()
    def launch(self) -> None:
        self.sup.launch(reset_param=[{"level": i} for i in range(ENVS)])
        self.model = [EnvModel(seed, {"level": i}) for i, seed in enumerate(self.seeds)]
        for m in self.model:
            m.deliver(m.reset())

    @precondition(lambda self: bool(self.model))
    @rule()
    def close(self) -> None:
        self.sup.close()
        self.model, self.seeds = [], [None] * ENVS

    @precondition(lambda self: self.quiet())
    @rule(seed=st.one_of(st.integers(0, 99), st.lists(st.integers(0, 99), min_size=ENVS, max_size=ENVS)))
    def seed(self, seed: Union[int, list[int]]) -> None:
        self.sup.seed(seed)
        self.seeds = [seed + i for i in range(ENVS)] if isinstance(seed, int) else [*seed]
        for m, s in zip(self.model, self.seeds):
            m.seed, m.new_seed = s, True

    # -- blocking calls --

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data(), chosen=ids)
    def step(self, data: st.DataObject, chosen: set[int]) -> None:
        chosen = {i for i in chosen if not self.model[i].sent}
        if not chosen:
            return
        actions = {i: data.draw(self.actions) for i in data.draw(st.permutations(sorted(chosen)))}
        timesteps = self.sup.step(actions)
        assert [int(t.env_id) for t in timesteps] == list(actions)
        for (i, action), timestep in zip(actions.items(), timesteps):
            first, *rest = self.model[i].step(action)
            self.compare(timestep, first)
            for answer in (first, *rest):
                self.model[i].deliver(answer)

    @precondition(lambda self: bool(self.model))
    @rule(chosen=ids, level=st.integers(0, 9))
    def reset(self, chosen: set[int], level: int) -> None:
        chosen = {i for i in chosen if not self.model[i].sent}
        if not chosen:
            return
        self.sup.reset({i: {"level": level} for i in chosen})
        for i in chosen:
            self.model[i].param = {"level": level}
            self.model[i].deliver(self.model[i].reset())

    @precondition(lambda self: bool(self.model) and self.quiet())
    @rule()
    def attributes(self) -> None:
        assert [r[-1] for r in self.sup.resets] == [m.param for m in self.model]
        assert self.sup.call("add", 2, b=3) == [5] * ENVS
        assert self.sup.t == [m.t for m in self.model]

    # -- asynchronous calls --

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data(), chosen=ids)
    def send_steps(self, data: st.DataObject, chosen: set[int]) -> None:
        # Behind a step that ends the episode or fails, the order depends on who is faster.
        chosen = {
            i
            for i in chosen
            if all(a.method == "step" and a.obs is not None and not a.done for a in self.model[i].sent)
        }
        if not chosen:
            return
        actions = {i: data.draw(self.actions) for i in sorted(chosen)}
        assert self.sup.step(actions, block=False) is None
        for i, action in actions.items():
            self.model[i].send(self.model[i].step(action))

    @precondition(lambda self: bool(self.model))
    @rule(chosen=ids)
    def send_resets(self, chosen: set[int]) -> None:
        chosen = {i for i in chosen if not self.model[i].sent}
        if not chosen:
            return
        self.sup.reset({i: {} for i in chosen}, block=False)
        for i in chosen:
            self.model[i].param = {}
            self.model[i].send([self.model[i].reset()])

    @precondition(lambda self: bool(self.model) and not self.quiet())
    @rule()
    def receive(self) -> None:
        payload = self.sup.recv(timeout=60)
        m = self.model[payload.proc_id]
        assert m.due, f"an answer that nobody asked for: {payload}"
        answer = m.due.popleft()
        assert payload.method == answer.method
        assert (payload.err is not None) is (answer.obs is None)
        if answer.method == "step":
            self.compare(payload.data, answer)
        else:
            assert payload.data.tolist() == answer.obs
        m.deliver(answer)
        if self.quiet():
            for m in self.model:
                m.sent.clear()

    @precondition(lambda self: bool(self.model) and not self.quiet())
    @rule()
    def receive_everything(self) -> None:
        while not self.quiet():
            self.receive()

    @precondition(lambda self: bool(self.model) and self.quiet())
    @rule()
    def nothing_more_comes(self) -> None:
        assert len(self.sup._inbox) == 0
        assert not any(child.open for child in self.sup._children)

    # -- what is seen --

    def compare(self, timestep: Any, answer: Answer) -> None:
        assert abnormal(timestep) is (answer.obs is None), timestep
        if answer.obs is not None:
            assert timestep.obs.tolist() == answer.obs
            assert bool(timestep.done) is answer.done
            assert timestep.reward.tolist() == answer.obs[3:]

    @invariant()
    def states(self) -> None:
        sup = self.sup
        assert sup.closed is (not self.model)
        if not self.model:
            assert set(sup.env_states.values()) == {EnvState.VOID}
            assert sup.ready_obs_id == []
            assert set(sup._env_episode_count.values()) == {0}
            return
        assert sup.env_states == {i: m.state for i, m in enumerate(self.model)}
        running = [i for i, m in enumerate(self.model) if m.state is EnvState.RUN]
        assert sup.ready_obs_id == running
        assert sup.ready_obs.tolist() == [self.model[i].ready for i in running]
        if self.quiet():
            assert sup._env_episode_count == {i: m.count for i, m in enumerate(self.model)}
            assert sup.done is all(m.state is EnvState.DONE for m in self.model)


class ForkComparison(Comparison):
    """With workers that may be killed."""

    kind = FORK
    actions = st.one_of(plain, st.sampled_from(("done", "kill", *FAULTS)))


SETTINGS = settings(
    derandomize=True,
    deadline=None,
    max_examples=40,
    stateful_step_count=25,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestThreads = Comparison.TestCase
TestThreads.settings = SETTINGS
TestForked = ForkComparison.TestCase
TestForked.settings = settings(SETTINGS, max_examples=25)
pytestmark = pytest.mark.timeout(180)
