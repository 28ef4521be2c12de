"""A machine's end: its workers, and what they need, for one pool of a master elsewhere.

    master ── orders, parameters, rows ──> station ──> Processes ──> workers
           <── words, parts of averages ──

The workers are those of the one-machine engine, with its memory and its averaging; the
station only relays. It computes nothing for long, so it always answers.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from instep._errors import PoolClosedError
from instep._exceptions import pack_error
from instep._partials import Node
from instep._program import Array
from instep.engines._average import MASTER, Combining, nodes_of, parts_for
from instep.engines._base import Lost, Ready
from instep.engines._orders import (
    Average,
    Compute,
    Forget,
    LayOut,
    PackedError,
    Params,
    Part,
    Replace,
    Share,
    Staff,
    Start,
    Trouble,
    Word,
)
from instep.engines.processes import Processes

# Tells another station, or the master, something: (who, what, arrays).
Post = Callable[[int, Any, Sequence[Array]], None]


class _Workers(Processes):
    """Whose aux and exceptions are not opened here: their classes may be missing."""

    def unpack_aux(self, text: memoryview) -> Any:
        return bytes(text)

    def unpack_error(self, text: bytes) -> tuple[BaseException, str]:
        return PackedError(text), ""


class Station:
    """The workers of one pool on this machine."""

    def __init__(self, me: int, post: Post) -> None:
        self._me, self._post = me, post
        self._engine = _Workers()
        self._has_started = False
        self._program = 0
        self._numbers: dict[int, int] = {}  # worker -> the last order about it
        self._whole: dict[int, int] = {}  # base -> version of the parameters there
        self._received: dict[Any, int] = {}  # (base, version) -> bytes that are there
        self._waiting: list[Compute] = []  # for parameters
        self._averages: dict[int, Combining] = {}
        # From other stations, before the master's orders that they are for.
        self._early: list[tuple[Part, Array]] = []
        self._early_params: list[tuple[Params, Array]] = []
        self._words: list[Word | Trouble] = []  # of the station's own

    def room(self, message: Any, nbytes: int) -> memoryview:
        """Where the bytes that come beside a message go."""
        if isinstance(message, Params) and message.program == self._program:
            frame = self._engine.params_at(message.ref)
            return frame[message.start : message.start + nbytes]
        if isinstance(message, Compute):
            return self._engine.kept_batches.view(message.kept.batch)
        return np.empty(nbytes, np.uint8).data

    def carry_out(self, message: Any, content: memoryview | None) -> None:
        """Does what the message says; if it cannot, `hear` tells."""
        try:
            _ACTIONS[type(message)](self, message, content)
        except Exception as error:
            self._words.append(Trouble(pack_error(error)))

    def hear(self, timeout: float) -> list[Word | Trouble]:
        """What has happened; waits for it."""
        words, self._words = self._words, []
        if words or not self._has_started:
            time.sleep(0 if words else timeout)
            return words
        try:
            events = self._engine.wait(timeout)
        except PoolClosedError:
            return []
        except Exception as error:
            return [Trouble(pack_error(error))]
        return [self._word(event) for event in events if event.worker in self._numbers]

    def close(self) -> None:
        """Ends all workers."""
        self._engine.close()
        self._has_started = False

    def nodes(self, share: Share) -> dict[Node, Array]:
        """This machine's nodes, combined."""
        return nodes_of(self._engine, share)

    def forget(self, keys: Sequence[int]) -> None:
        """Gives up outputs."""
        for key in keys:
            self._engine.forget(key)

    def _word(self, event: Any) -> Word:
        tells = isinstance(event, Ready) and self._is_beside
        pid = self._engine.pid(event.worker) if tells else 0
        return Word(self._numbers[event.worker], event, pid)

    def _start(self, order: Start, program: memoryview) -> None:
        os.environ.update(order.environment)
        sys.path.extend(entry for entry in order.sys_path if entry not in sys.path)
        self._is_beside = order.host == os.uname().nodename
        self._engine.cores = order.cores
        details = order.modules, order.workers, order.threads
        self._engine.start_shipped(program, *details)
        self._numbers = dict.fromkeys(order.workers, order.number)
        self._has_started, self._program = True, order.program
        self._whole.clear()
        self._received.clear()
        early, self._early_params = self._early_params, []
        for params, content in early:
            room = self.room(params, content.nbytes)
            np.asarray(room)[:] = content
            self._take_params(params, room)

    def _staff(self, order: Staff, _: object) -> None:
        self._engine.staff(order.workers)
        known = self._numbers
        self._numbers = {w: known.get(w, order.number) for w in order.workers}

    def _lay_out(self, order: LayOut, _: object) -> None:
        self._engine.lay_out(order.layout)
        self._layout = order.layout.working

    def _take_params(self, order: Params, content: memoryview) -> None:
        if order.program != self._program:
            self._early_params.append((order, np.asarray(content)))
            return
        for station in order.pass_on:
            self._post(station, order._replace(pass_on=()), [np.asarray(content)])
        frame = order.ref.base, order.version
        received = self._received.pop(frame, 0) + len(content)
        if received < order.ref.nbytes:
            self._received[frame] = received
        else:
            self._whole[order.ref.base] = order.version
            waiting, self._waiting = self._waiting, []
            for compute in waiting:
                self._compute(compute, None)

    def _compute(self, order: Compute, _: object) -> None:
        self._numbers[order.worker] = order.number
        if self._whole.get(order.kept.params.base) != order.version:
            self._waiting.append(order)
        elif order.worker in self._engine.idle():
            self._engine.submit(order.worker, order.task, order.kept)
        else:  # the master did not know yet
            lost = Lost(order.worker, "it had ended before")
            self._words.append(Word(order.number, lost))

    def _replace(self, order: Replace, _: object) -> None:
        self._numbers[order.worker] = order.number
        self._waiting = [c for c in self._waiting if c.worker != order.worker]
        self._engine.replace(order.worker)

    def _forget(self, order: Forget, _: object) -> None:
        self.forget(order.keys)

    # Averages

    def _average(self, order: Average, _: object) -> None:
        nodes = self.nodes(order.shares[self._me])
        for owner, part, array in parts_for(order, self._me, nodes):
            self._post(owner, part, [array])
        self.forget(order.shares[self._me].keys)
        if self._me in order.owners:
            mine = Combining(order, self._me, self._layout)
            self._averages[order.number] = mine
            for node, array in nodes.items():
                mine.take(node, array[mine.start : mine.stop])
            early, self._early = self._early, []
            for part, array in early:
                self._take_part(part, array.data)
            self._finish(order.number)

    def _take_part(self, part: Part, content: memoryview) -> None:
        assert part.node is not None
        if part.number not in self._averages:
            self._early.append((part, np.asarray(content)))
            return
        self._averages[part.number].take(part.node, np.asarray(content))
        self._finish(part.number)

    def _finish(self, number: int) -> None:
        combining = self._averages.get(number)
        if combining is not None and combining.is_complete:
            del self._averages[number]
            part = Part(number, None, combining.start)
            self._post(MASTER, part, [combining.result()])


_ACTIONS: dict[type, Callable[[Station, Any, Any], None]] = {
    Start: Station._start,
    Staff: Station._staff,
    LayOut: Station._lay_out,
    Params: Station._take_params,
    Compute: Station._compute,
    Replace: Station._replace,
    Forget: Station._forget,
    Average: Station._average,
    Part: Station._take_part,
}
