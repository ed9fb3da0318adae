"""Workers that are processes."""

from __future__ import annotations

import os
import pickle
import select
import signal
import struct
from typing import Any, Iterable, Iterator, Optional, Sequence

import numpy as np

from envsup.arena import DONE, EXTRA, FAILED, INT, INT64, OBS, PICKLED, kind_of_numbers, put_action
from envsup.child import Child, Listener
from envsup.errors import WorkerDied
from envsup.frames import (
    AUTO_RESET,
    BUILD,
    CALL,
    EAGER,
    EXTRA_LENGTH,
    HEADER,
    HEADER_SIZE,
    STEP,
    STOP,
    FrameTable,
    StepForm,
)
from envsup.host import Call, Hosted
from envsup.launch import WorkerProcess
from envsup.pickled import dump, load_data, load_error
from envsup.request import BUILD_METHOD, Request
from envsup.spec import WorkerSpec

_READ_SIZE = 4096
_LONG_READ_SIZE = 1 << 20
_KIND_BYTES = {kind: bytes((kind,)) for kind in (INT, INT64)}
_PLAIN = {int, float, bool, str, bytes, np.int64, np.int32, np.float32, np.float64}


class ChildProcess(Child):
    """A worker process."""

    def __init__(self, hosted: list[Hosted], listener: Listener, launch_timeout: Optional[float] = None) -> None:
        super().__init__(hosted, listener, launch_timeout)
        self._process: Optional[WorkerProcess] = None
        self._buffer = bytearray()
        self._outbox = bytearray()
        self._seen = 0
        self._is_foreign = False
        self._closing = False

    @property
    def pid(self) -> Optional[int]:
        return None if self._process is None else self._process.pid

    def _start(self) -> None:
        process = self.listener.start_process(WorkerSpec(self.hosted, self.arena, self.life, probe=self.probe))
        self._process = process
        self.alive = True
        self._outbox = bytearray()
        self._closing = False
        self._is_foreign = bool(process.preamble)  # It was not forked, and has other modules than this process.
        self.listener.handle(process.reply_fd, self.receive)
        if process.exit_fd >= 0:
            self.listener.handle(process.exit_fd, self._on_exit)
        if process.preamble:
            self._post(process.preamble)

    def pack(self, call: Call) -> bytes:
        try:
            return self._dump(tuple(call))
        except Exception as error:
            raise TypeError(f"the arguments of {call.method} cannot be pickled: {error}") from error

    def _dump(self, value: Any) -> bytes:
        if not self._is_foreign or type(value) in _PLAIN:
            return dump(value)
        from envsup.carry import carry

        return carry(value)

    def _post_call(self, request: Request, packed: bytes) -> None:
        self._post(HEADER.pack(request.seq, CALL, 0, 0, len(packed)) + packed)

    def _post_build(self, request: Request, local: int) -> None:
        self._post(HEADER.pack(request.seq, BUILD, 0, local, 0))

    def form_steps(
        self, proc_ids: Sequence[int], slots: Sequence[int], reset_slots: Sequence[int], eager: bool
    ) -> StepForm:
        return StepForm(EAGER if eager else 0, [self._locals[i] for i in proc_ids], slots, reset_slots)

    def pack_steps(self, request: Request, form: StepForm, actions: Sequence[Any]) -> bytes:
        kind = kind_of_numbers(actions)
        if kind is not None:
            kinds = _KIND_BYTES[kind] * len(actions)
            if type(actions) is np.ndarray:
                return form.pack_bytes(request.seq, kinds, actions.tobytes())
            try:
                return form.pack(request.seq, kinds, actions)
            except struct.error:
                pass  # An int of more than 64 bits.
        return self._pack_any(request, form, actions)

    def _pack_any(self, request: Request, form: StepForm, actions: Sequence[Any]) -> bytes:
        arena = self.arena
        kinds = [put_action(arena, *which) for which in zip(request.slots, request.proc_ids, actions)]
        values = [action if kind <= INT64 else 0 for kind, action in zip(kinds, actions)]
        pickled = [self._pickle_action(action) for kind, action in zip(kinds, actions) if kind == PICKLED]
        return form.pack(request.seq, bytes(kinds), values, pickle.dumps(pickled) if pickled else b"")

    @classmethod
    def table_of(cls, forms: Sequence[StepForm], kind: int) -> Optional[FrameTable]:
        alike = len({form.count for form in forms}) == 1
        return FrameTable(forms, kind) if alike and len(forms) > 1 else None

    def _pickle_action(self, action: Any) -> bytes:
        try:
            return self._dump(action)
        except Exception as error:
            raise TypeError(f"the action cannot be pickled: {error}") from error

    def _post(self, packed: bytes | memoryview) -> None:
        process = self._process
        if process is None or self._outbox:
            self._outbox += packed
            return
        try:
            sent = os.write(process.request_fd, packed)
        except OSError as error:
            sent = self._unsent(error, packed)
        if sent < len(packed):
            self._outbox += packed[sent:]
            self.listener.handle(process.request_fd, self._flush, write=True)

    @staticmethod
    def _unsent(error: OSError, data: bytes | bytearray | memoryview) -> int:
        """How much of it counts as sent: if the worker is gone, that is noticed, and reported, elsewhere."""
        return 0 if isinstance(error, BlockingIOError) else len(data)

    def _flush(self) -> None:
        """The worker reads again: send on what had to wait."""
        assert self._process is not None
        try:
            sent = os.write(self._process.request_fd, self._outbox)
        except OSError as error:
            sent = self._unsent(error, self._outbox)
        del self._outbox[:sent]
        if not self._outbox:
            self.listener.handle(self._process.request_fd, None)

    def receive(self) -> None:
        process = self._process
        if process is None:
            return
        try:
            data = os.read(process.reply_fd, _LONG_READ_SIZE if self._buffer else _READ_SIZE)
        except BlockingIOError:
            return
        opened = self.open
        if len(opened) == 1 and not self._buffer:
            request = opened[0]
            if data == request.plain_reply and not request.expired:  # Nearly always.
                opened.clear()
                request.answered = len(request.proc_ids)
                self.listener.on_plain_steps(self, request, data[HEADER_SIZE:])
                request.is_spare = True
                return
        self._take_in(process, data)

    def _take_in(self, process: WorkerProcess, data: bytes) -> None:
        if not data:
            self.listener.handle(process.reply_fd, None)
            self._on_end_of_file()
        elif self._buffer:
            self._buffer += data
            self._parse_buffer()
        elif not self._take_ends(data):
            end = self._parse(data)
            if end < len(data):
                self._buffer += data[end:]

    def _take_ends(self, data: bytes) -> bool:
        """Take a reply to steps that ended episodes and to the resets that followed, if the arena has all of both.

        The ledger need not know of such resets.  Returns whether it was one.
        """
        request = self.open[0] if len(self.open) == 1 else None
        if request is None or request.plain_reply is None or request.expired:
            return False
        end = len(request.plain_reply)
        if data[:HEADER_SIZE] != request.plain_reply[:HEADER_SIZE] or len(data) <= end:
            return False
        statuses, env_ids = data[HEADER_SIZE:end], request.proc_ids
        rows = [row for row, status in enumerate(statuses) if status & DONE]
        if data[end:] != _resets(request.seq, [self._locals[env_ids[row]] for row in rows]):
            return False
        # A signal handler may have come in between, and sent something, or have lost the worker.
        if not self.listener.takes_ends(request) or not self.open or self.open[0] is not request:
            return False
        self.open.popleft()
        request.answered = len(env_ids)
        self.listener.on_ends(request, statuses, rows)
        request.is_spare = True
        return True

    def _parse_buffer(self) -> None:
        if len(self._buffer) >= HEADER_SIZE:
            size = HEADER_SIZE + HEADER.unpack_from(self._buffer)[4]
            if len(self._buffer) >= size:
                data, life = bytes(self._buffer), self.life
                self._buffer = bytearray()
                end = self._parse(data)
                if life == self.life:
                    self._buffer += data[end:]

    def _parse(self, data: bytes) -> int:
        """Report the whole frames at the start of ``data``; returns where they end."""
        pos, end, life = 0, len(data), self.life
        while end - pos >= HEADER_SIZE:
            seq, kind, status, count, length = HEADER.unpack_from(data, pos)
            start = pos + HEADER_SIZE
            if end - start < length:
                break
            pos = start + length
            if kind == BUILD and seq == 0:
                seq = self.open[0].seq if self.open else 0
            if not self.open or self.open[0].seq != seq:
                self._on_nonsense()
                return end
            if kind == STEP:
                statuses = data[start : start + count]
                request = self.answer_steps(statuses)
                if not request.expired:
                    self.listener.on_steps(self, request, statuses, self._extras(statuses, data, start + count))
            else:
                request = self.answer()
                if not request.expired:
                    self._report(request, status, data[start:pos])
            if self.life != life:
                return end  # The report led to a new worker: what follows is of the old one.
        return pos

    def _report(self, request: Request, status: int, body: bytes) -> None:
        data: Any = load_error(body) if status & FAILED else None
        if body and not status & FAILED:
            status, data = self._load(status, body)
        self.listener.on_reply(self, request, status, data)

    def _extras(self, statuses: bytes, data: bytes, pos: int) -> Iterator[tuple[int, Any]]:
        """For each step that has one: (status, what of it is not in the arena, or the error)."""
        for status in statuses:
            if not status & EXTRA:
                continue
            (length,) = EXTRA_LENGTH.unpack_from(data, pos)
            pos += EXTRA_LENGTH.size
            body = data[pos : pos + length]
            pos += length
            yield (status, load_error(body)) if status & FAILED else self._load(status, body)

    def _load(self, status: int, body: bytes) -> tuple[int, Any]:
        return load_data(status, body)

    def _on_end_of_file(self) -> None:
        process = self._process
        if process is not None and process.exit_fd < 0:
            process.kill()
            self._on_exit()

    def _on_nonsense(self) -> None:
        """A reply to nothing: something else wrote to the pipe, and nothing from it can be trusted."""
        process, message = self._process, f"{self.describe()} sent a reply that fits no request and was killed"
        self.kill()
        self._report_loss(message, process)

    def _on_exit(self) -> None:
        process = self._process
        if process is None or not process.has_ended():
            return
        self._drain(process)
        if self._process is not process:
            return
        stack = process.evidence.fatal_stack(process.exit_code)
        self._release()
        self._report_loss(f"{self._name(process)} {process.ending()}", process, stack)

    def _drain(self, process: WorkerProcess) -> None:
        """What the worker had written before it ended is as good as any reply."""
        while self._process is process and process.reply_fd >= 0:
            try:
                data = os.read(process.reply_fd, _LONG_READ_SIZE)
            except BlockingIOError:
                return
            if not data:
                return
            self._buffer += data
            self._parse_buffer()

    def _report_loss(self, message: str, process: Optional[WorkerProcess], stack: Optional[str] = None) -> None:
        lost = self.take_open()
        method, when = self._what_was_open(lost)
        pid, exit_code, stderr = None, None, None
        if process is not None:
            pid, exit_code, stderr = process.pid, process.exit_code, process.evidence.last_stderr()
        error = WorkerDied(message + when, self.proc_ids, pid, exit_code, method=method, stack=stack, stderr=stderr)
        self.listener.on_lost(self, lost, error)

    def _what_was_open(self, lost: Sequence[Request]) -> tuple[Optional[str], str]:
        """(the method that the worker was asked for when it ended, and what to say of that) of what it owed."""
        if not lost:
            return None, ""
        method = lost[0].method
        what = "being built" if method == BUILD_METHOD else f"asked for {method}"
        return method, f" while it was {what}{self._of_which(lost[0])}"

    def _of_which(self, request: Request) -> str:
        """Of several environments, the one that the worker was at, or those that it may have been at."""
        if len(self.hosted) == 1:
            return ""
        ids = request.proc_ids[request.answered :]
        if request.owner is None:
            ids = ids[:1]  # Each is answered as soon as it is done.
        return f" of {self.named(ids)}"

    def _name(self, process: WorkerProcess) -> str:
        return f"{self.name()} (pid {process.pid})"

    def check(self) -> bool:
        process = self._process
        if process is None:
            return True
        if process.has_ended():
            self._on_exit()
        return self._process is not process

    def receiving(self) -> bool:
        seen, self._seen = self._seen, len(self._buffer)
        return 0 < self._seen != seen

    def ended(self) -> bool:
        return self._process is None or self._process.has_ended()

    def stack(self) -> tuple[Optional[str], str]:
        process = self._process
        if process is None or process.has_ended():
            return None, ""
        return process.evidence.stack_now(process.pid, all(r.method != BUILD_METHOD for r in self.open))

    def last_stderr(self) -> Optional[str]:
        return None if self._process is None else self._process.evidence.last_stderr()

    def doomed(self) -> bool:
        return self._process is None or self._process.has_ended() or self._process.is_dying()

    def _release(self) -> None:
        """Forget the process: its descriptors, and what was on the way to it and from it."""
        process, self._process = self._process, None
        self.alive = False
        if process is None:
            return
        for fd in (process.reply_fd, process.exit_fd, process.request_fd):
            if fd >= 0:
                self.listener.handle(fd, None)
        process.close()
        self.listener.process_ended(process)
        self._buffer = bytearray()
        self._outbox = bytearray()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._release()

    def ask_to_stop(self) -> None:
        if not self._closing:
            self._closing = True
            self._post(HEADER.pack(0, STOP, 0, 0, 0))

    def stopped(self) -> bool:
        process = self._process
        if process is None:
            return True
        if self._outbox:
            self._flush()
        self._discard(process)
        if not process.has_ended():
            return False
        self._release()
        return True

    def _discard(self, process: WorkerProcess) -> None:
        """Read and drop replies: a worker that cannot write cannot leave."""
        try:
            while os.read(process.reply_fd, _LONG_READ_SIZE):
                pass
        except OSError:
            pass

    def terminate(self) -> None:
        if self._process is not None:
            self._process.signal(signal.SIGTERM)

    @staticmethod
    def wait_stopped(children: Sequence["ChildProcess"], timeout: float) -> None:
        poller = select.poll()
        for child in children:
            process = child._process
            if process is not None:
                for fd in (process.exit_fd, process.reply_fd):
                    if fd >= 0:
                        poller.register(fd, select.POLLIN)
                if child._outbox:
                    poller.register(process.request_fd, select.POLLOUT)
        poller.poll(timeout * 1000)


def _resets(seq: int, indices: Iterable[int]) -> bytes:
    """What follows the reply to steps if these environments were reset, and the arena has all that there is to say."""
    return b"".join([HEADER.pack(seq, AUTO_RESET, OBS, index, 0) for index in indices])
