"""A worker: reads a command, computes a shard or averages a slice, answers, waits.

Run as `python -m instep._worker`, which becomes the template; the template's forks
run `work`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from instep import _template
from instep._cores import yield_to_others
from instep._exceptions import pack_error
from instep._frame import RESIDENT, FrameRef
from instep._memory import Block
from instep._reduction import reduce_slots
from instep._shard import Answer, Frame, ShardRunner
from instep._slots import rows_at
from instep._template import Setup
from instep._wire import COMMAND_NBYTES, Command, Kind, Op, Plan, Report


def main() -> None:
    """Becomes the template: argv holds the descriptors of setup and order socket."""
    setup_fd, orders_fd = map(int, sys.argv[1:])
    with open(setup_fd, "rb") as file:
        setup: Setup = pickle.load(file)
    if os.getppid() == setup.master:
        _template.serve(setup, socket.socket(fileno=orders_fd), work)


def work(
    setup: Setup,
    worker: int,
    incarnation: int,
    commands: int,
    outbox: int,
    program: int,
) -> None:
    """Serves commands until the master closes the pipe."""
    yield_to_others()
    blocks = Block(outbox), Block(program)
    desk = _Desk(setup, worker, incarnation, commands, *blocks)
    with contextlib.suppress(BrokenPipeError):
        desk.serve()


class _Desk:
    """One worker's view of the blocks and pipes."""

    def __init__(
        self,
        setup: Setup,
        worker: int,
        incarnation: int,
        commands: int,
        outbox: Block,
        program: Block,
    ) -> None:
        self._setup = setup
        self._who = worker, incarnation
        self._commands = commands
        self._outbox = outbox
        self._program = program
        params, batch, self._slots, *kept = map(Block, setup.block_fds)
        self._of_params, self._of_batch = (params, kept[0]), (batch, kept[1])

    def serve(self) -> None:
        try:
            with threadpool_limits(limits=self._setup.threads):
                self._runner = self._start()
                self._report(Kind.READY, status=os.getpid())
                while command := self._next():
                    self._obey(command)
        except BrokenPipeError:
            raise
        except BaseException as error:
            self._fail(0, error)

    def _start(self) -> ShardRunner:
        program = pickle.loads(self._program.at_least(0))
        self._program.close()
        runner = ShardRunner(program, self._setup.threads)
        # Once more: loading the program may have loaded further thread pools.
        threadpool_limits(limits=self._setup.threads)
        return runner

    def _next(self) -> Command | None:
        record = os.read(self._commands, COMMAND_NBYTES)
        return Command.unpack(record) if record else None

    def _obey(self, command: Command) -> None:
        try:
            if command.op == Op.AVERAGE:
                self._average(command)
                return
            params = _frame(*self._of_params, command.params)
            batch = _frame(*self._of_batch, command.batch)
            slot = self._slots.at_least(command.slots_nbytes), command.slot
            answer = self._runner.run(command.task, params, batch, slot)
            self._answer(command.number, answer)
        except BaseException as error:
            self._fail(command.number, error)
        else:
            self._runner.prepare(command.task, params, batch)

    def _answer(self, number: int, answer: Answer) -> None:
        self._post(answer.aux)
        self._report(
            Kind.DONE,
            number=number,
            weight=answer.weight,
            seconds=answer.seconds,
            nbytes=len(answer.aux),
            loss=answer.loss,
        )

    def _average(self, command: Command) -> None:
        record = bytes(self._outbox.at_least(command.plan)[: command.plan])
        result, start, stop, offsets, weights = Plan.unpack(record)
        layout = self._runner.layout(_frame(*self._of_params, command.params))
        memory = self._slots.at_least(command.slots_nbytes)
        slots = rows_at(memory, offsets, layout.nbytes)
        out = np.frombuffer(memory, np.uint8, layout.nbytes, result)
        reduce_slots(slots, weights, layout, out, (start, stop))
        self._report(Kind.AVERAGED, number=command.number)

    def _fail(self, number: int, error: BaseException) -> None:
        text = pack_error(error)
        self._post(text)
        self._report(Kind.FAILED, number=number, nbytes=len(text))

    def _post(self, text: bytes) -> None:
        if text:
            self._outbox.at_least(len(text))[: len(text)] = text

    def _report(self, kind: Kind, **fields: Any) -> None:
        os.write(self._setup.report_fd, Report(kind, *self._who, **fields).pack())


def _frame(resident: Block, kept: Block, ref: FrameRef) -> Frame:
    """Where the frame lies."""
    if ref.base == RESIDENT:
        return resident.at_least(ref.nbytes), ref
    return kept.at_least(ref.base + ref.nbytes)[ref.base :], ref


if __name__ == "__main__":
    from instep._worker import main as main_of_module  # not the copy in __main__

    main_of_module()
