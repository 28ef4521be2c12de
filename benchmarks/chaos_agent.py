"""Kills, stops and resizes the workers of a pool while it computes.

A plan drawn from a seed says what happens in which step. An agent carries it out, from
a thread of its own, and notes what it hit, in which phase, and when the successor was
ready. To aim, it reads the pool's private state; it changes nothing there.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Seconds to wait for the moment an event is aimed at, then any moment will do.
AIM_S = 0.5
# Seconds within which there has to be a living worker, and the rest to be delivered.
PATIENCE_S = 120.0
# Seconds after which a worker goes on that is to go on, even if the step does not end:
# it may be the only one.
PAUSE_S = 2.0
# Seconds between two looks of the agent.
LOOK_S = 0.001


@dataclass(frozen=True, slots=True)
class Event:
    """What is to happen.

    Attributes:
        step: when.
        kind: "kill", "stop", "resize" or "template" (its end).
        aim: "any" moment of the step, or "reading", "averaging", "starting" or
            "between" two calls.
        delay: part of a usual step to wait first.
        pause: steps after which a stopped worker goes on; None: it never does, unless
            it was stopped while starting: nobody can tell that from slow imports.
        workers: their number after a resize.
    """

    step: int
    kind: str
    aim: str
    delay: float
    pause: int | None
    workers: int


@dataclass(slots=True)
class Hit:
    """What did happen, to which process, and when its successor was ready."""

    event: Event
    step: int
    moment: float
    pid: int = 0
    phase: str = ""
    worker: int = -1
    incarnation: int = -1
    ready: float | None = None
    is_open: bool = False  # the successor is still looked for


def plan(
    steps: int, kinds: dict[str, int], workers: int, seed: int, tail: int = 0
) -> list[Event]:
    """As many events of each kind as asked for, evenly over the steps.

    Args:
        steps: of the training.
        kinds: kind of event -> how many.
        workers: resizes go from half of it to one and a half times.
        seed: of all choices.
        tail: steps at the end without an event.
    """
    draw = random.Random(seed)
    order = [kind for kind, number in kinds.items() for _ in range(number)]
    draw.shuffle(order)
    events: list[Event] = []
    for index, kind in enumerate(order):
        step = index * max(1, steps - tail) // len(order)
        event = _event(draw, kind, step, workers)
        if event.aim == "starting" and events:
            event = _event_after(events[-1], event)
        events.append(event)
    return events


def _event(draw: random.Random, kind: str, step: int, workers: int) -> Event:
    aims = ("any", "any", "reading", "averaging", "starting", "between")
    is_pausing = draw.random() < 0.5
    return Event(
        step=step,
        kind=kind,
        aim=draw.choice(aims) if kind in ("kill", "stop") else "any",
        delay=draw.random(),
        pause=draw.randrange(1, 16) if is_pausing else None,
        workers=draw.randint(max(1, workers // 2), workers + workers // 2),
    )


def _event_after(before: Event, event: Event) -> Event:
    """The same, in the step of the event before: its victim's successor starts."""
    fields = {name: getattr(event, name) for name in Event.__slots__}
    return Event(**{**fields, "step": before.step})


class Agent:
    """Carries out a plan against a pool."""

    def __init__(self, pool: Any, events: list[Event], step_s: float) -> None:
        self._pool, self._step_s = pool, step_s
        self._main = threading.get_ident()
        self._planned = deque(events)
        self._due: deque[tuple[float, Event]] = deque()
        # (step, moment, pidfd)
        self._resumptions: list[tuple[int, float, int]] = []
        self._stopped: dict[int, bool] = {}  # pid -> whether for ever
        self._gone: set[int] = set()
        self._at_start = 0  # processes ended before a start succeeded
        self._ready: set[int] = set()
        self._step = 0
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._is_over = threading.Event()
        self._strike_lock = threading.Lock()
        self.hits: list[Hit] = []
        self.pids: set[int] = set()
        self.num_continued = 0
        self.resize_s: list[float] = []
        self._thread = self._start(self._work)

    def begin(self, step: int) -> None:
        """A step begins."""
        self._check()
        self._step = step
        while self._planned and self._planned[0].step <= step:
            event = self._planned.popleft()
            now = time.perf_counter()
            if event.aim != "between" or self._due or not self._strike(event):
                self._due.append((now + event.delay * self._step_s, event))

    def finish(self, training: Any) -> None:
        """Delivers what is left while the pool computes, until all is well again."""
        deadline = time.monotonic() + PATIENCE_S
        step = self._step
        while self._is_unfinished():
            step += 1
            self.begin(step)
            training.evaluate()
            if time.monotonic() > deadline:
                raise TimeoutError(f"undelivered or unhealed: {self._is_unfinished()}")
        self._stop_threads()
        self._check()

    def close(self) -> None:
        """Ends the agent's threads and lets go of the pool."""
        self._stop_threads()
        self._pool = None
        for *_, fd in self._resumptions:
            os.close(fd)
        self._resumptions.clear()

    def phases(self, kind: str) -> dict[str, int]:
        """In which phase the victims of this kind of event were met."""
        return dict(Counter(h.phase for h in self.hits if h.event.kind == kind))

    def _is_unfinished(self) -> str:
        """What there is still to do; "" for nothing."""
        if self._planned or self._due:
            return f"{len(self._planned) + len(self._due)} events"
        if self._resumptions:
            return f"{len(self._resumptions)} to be continued"
        if any(thread.is_alive() for thread in self._threads[1:]):
            return "a resize"
        stopped = [p for p, for_ever in self._stopped.items() if for_ever]
        left = [pid for pid in stopped if pid in self._children()]
        if left:
            return f"stopped processes {left}"
        seats = _seats(self._pool)
        missing = self._pool.statistics().workers - sum(s.pid > 0 for s in seats)
        return f"{missing} workers that start" if missing else ""

    # The agent's thread

    def _start(self, function: Any, *arguments: Any) -> threading.Thread:
        thread = threading.Thread(
            target=self._guarded, args=(function, *arguments), daemon=True
        )
        self._threads.append(thread)
        thread.start()
        return thread

    def _guarded(self, function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError("the agent failed") from self._error

    def _stop_threads(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _work(self) -> None:
        while not self._is_over.is_set():
            self._look()
            self._continue()
            if self._due and self._due[0][0] <= time.perf_counter():
                self._await_aim(self._due[0][1].aim)
                if not self._strike(self._due[0][1]):
                    self._due.append(self._due[0])  # another one's turn
                self._due.popleft()
            time.sleep(LOOK_S)

    def _look(self) -> None:
        """Notes which successors are ready."""
        now, seats = time.perf_counter(), {s.worker: s for s in _seats(self._pool)}
        ready = {seat.pid for seat in seats.values() if seat.pid}
        if ready - self._ready or len(ready) == len(seats):
            self._at_start = 0
        self.pids |= ready
        self._ready = ready
        for hit in [hit for hit in self.hits if hit.is_open]:
            seat = seats.get(hit.worker)
            later = seat.incarnation - hit.incarnation if seat else 2
            if later > 1 or (later == 1 and seat is not None and seat.pid):
                hit.is_open = False
                hit.ready = now if later == 1 else None

    def _await_aim(self, aim: str) -> None:
        deadline = time.perf_counter() + AIM_S
        while not self._is_moment(aim) and time.perf_counter() < deadline:
            self._look()
            time.sleep(LOOK_S / 20)

    def _is_moment(self, aim: str) -> bool:
        if aim == "starting":
            return bool(self._starting())
        if aim == "averaging":
            return self._call() == "averaging"
        if aim == "reading":
            return self._call() == "computing" and any(
                seat.number for seat in _seats(self._pool)
            )
        return True

    # Delivery

    def _strike(self, event: Event) -> bool:
        """Delivers an event; False if there is nothing to hit at the moment."""
        with self._strike_lock:
            if event.kind == "resize":
                self._start(self._resize, event)
            elif event.kind == "template":
                return self._end_template(event)
            else:
                return self._hit(event)
        return True

    def _resize(self, event: Event) -> None:
        begin = time.perf_counter()
        self._pool.resize(event.workers)
        self.resize_s.append(time.perf_counter() - begin)
        self.hits.append(Hit(event, self._step, begin))

    def _end_template(self, event: Event) -> bool:
        template = _template(self._pool)
        if self._at_start or not self._ready or template in self._gone:
            return False
        if _failed_starts(self._pool) > 1:
            return False
        self._at_start += 1
        self._gone.add(template)
        return self._send(Hit(event, self._step, 0.0, pid=template), signal.SIGKILL)

    def _hit(self, event: Event) -> bool:
        hit = self._victim(event)
        if hit is None:
            return False
        if event.kind == "kill":
            if hit.phase == "starting":
                self._at_start += 1
            hit.is_open = hit.worker >= 0
            if self._send(hit, signal.SIGKILL):
                self._gone.add(hit.pid)
                return True
            return False
        for_ever = event.pause is None and hit.phase != "starting"
        self._stopped[hit.pid] = for_ever
        fd = None if for_ever else os.pidfd_open(hit.pid)
        if self._send(hit, signal.SIGSTOP):
            if fd is not None:
                step, moment = self._step + (event.pause or 1), hit.moment + PAUSE_S
                self._resumptions.append((step, moment, fd))
            return True
        if fd is not None:
            os.close(fd)
        return False

    def _send(self, hit: Hit, number: int) -> bool:
        """Sends a signal; False if the process has ended by itself before."""
        try:
            fd = os.pidfd_open(hit.pid)
        except OSError:
            return False
        try:
            if _state(hit.pid) in "ZX":
                return False
            hit.moment, hit.step = time.perf_counter(), self._step
            signal.pidfd_send_signal(fd, number)
        except OSError:
            return False
        finally:
            os.close(fd)
        self.hits.append(hit)
        return True

    def _continue(self) -> None:
        """Wakes the stopped workers whose pause is over."""
        now = time.perf_counter()
        for resumption in list(self._resumptions):
            step, moment, fd = resumption
            if step <= self._step or moment <= now:
                with suppress(ProcessLookupError):  # it was replaced meanwhile
                    signal.pidfd_send_signal(fd, signal.SIGCONT)
                    self.num_continued += 1
                os.close(fd)
                self._resumptions.remove(resumption)

    # Aim

    def _victim(self, event: Event) -> Hit | None:
        """A living worker, in the phase that is aimed at if there is one."""
        call, seats = self._call(), {s.pid: s for s in _seats(self._pool) if s.pid}
        candidates = self._children()
        if event.kind == "stop":
            candidates = [pid for pid in candidates if pid not in self._stopped]
        starting = [pid for pid in candidates if pid not in seats]
        at_work = [pid for pid in candidates if pid in seats]
        if self._at_start or _failed_starts(self._pool):  # three are an error
            starting = []
        wanted = {
            "starting": starting,
            "reading": [pid for pid in at_work if seats[pid].number],
            "averaging": [pid for pid in at_work if seats[pid].number],
        }.get(event.aim) or [*at_work, *starting]
        if not wanted:
            return None
        pid = wanted[int(event.delay * 7919) % len(wanted)]
        return self._describe(event, pid, seats.get(pid), call)

    def _describe(self, event: Event, pid: int, seat: Any, call: str) -> Hit:
        hit = Hit(event, self._step, 0.0, pid=pid, phase="starting")
        if seat is not None:
            hit.worker, hit.incarnation = seat.worker, seat.incarnation
            hit.phase = call if seat.number and call != "between" else "idle"
        return hit

    def _children(self) -> list[int]:
        """Processes of the workers that live, in the order of their start."""
        text = _read(f"/proc/{_template(self._pool)}/task/{_template(self._pool)}")
        pids = [int(pid) for pid in text.split() if int(pid) not in self._gone]
        living = [pid for pid in pids if _state(pid) not in "ZX"]
        self.pids.update(living)
        return living

    def _starting(self) -> list[int]:
        ready = {seat.pid for seat in _seats(self._pool)}
        return [pid for pid in self._children() if pid not in ready]

    def _call(self) -> str:
        """What the script's thread is doing."""
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            code = frame.f_code
            if code.co_name == "average" and code.co_filename.endswith("processes.py"):
                return "averaging"
            if code.co_name == "run" and code.co_filename.endswith("_dispatch.py"):
                return "computing"
            frame = frame.f_back
        return "between"


def _seats(pool: Any) -> list[Any]:
    return list(pool._engine._seats.values())


def _failed_starts(pool: Any) -> int:
    """How many workers in a row have ended while they started."""
    failures: int = pool._engine._start_failures
    return failures


def _template(pool: Any) -> int:
    process = pool._engine._template
    return process.pid if process is not None else 0


def _read(task: str) -> str:
    try:
        return Path(task, "children").read_text()
    except OSError:
        return ""


def _state(pid: int) -> str:
    """The letter of the process's state; "X" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
