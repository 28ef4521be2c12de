"""train the job of a job file

Takes a job file: a Python file with a function `job()` that returns an `instep.Job`
with model, loss, data, batch size and optimizer. Shows loss, speed and how busy each
worker is while it trains. With --checkpoint it saves what it needs to go on, and
--resume goes on from there, to the same bits as if it had not been interrupted
(synchronous and local modes; the others depend on time).

A mode is one of synchronous, asynchronous, stale_synchronous and local, perhaps with
arguments: "asynchronous(max_staleness=4)", "stale_synchronous(bound=2)",
"local(steps=8)". Local workers have optimizers like the job's.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep._commands import _calls
from instep._commands._pool_options import add_job, add_pool_options, pool_options
from instep._commands._ranks import engine_here, on_ranks
from instep._commands._types import count, new_file, new_folder
from instep._errors import ArgumentError

if TYPE_CHECKING:
    from instep._commands._training_log import TrainingLog
    from instep._training.training import Training

_log = logging.getLogger("instep.train")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the job file, the pool's options, checkpoints and what is shown."""
    add_job(parser)
    add_pool_options(parser)
    parser.add_argument(
        "--mode",
        type=_calls.mode,
        default="synchronous",
        help="how gradients become updates (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=count,
        metavar="N",
        help="batches to train on (default: the job's)",
    )
    saving = parser.add_argument_group("checkpoints")
    saving.add_argument(
        "--checkpoint", type=new_file, metavar="FILE", help="where the state is saved"
    )
    saving.add_argument(
        "--checkpoint-every",
        type=count,
        default=100,
        metavar="N",
        help="steps; also at the end (default: %(default)s)",
    )
    saving.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint"
    )
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--quiet", action="store_true", help="print nothing")
    shown.add_argument("--json", action="store_true", help="print JSON alone")
    shown.add_argument(
        "--verbose", action="store_true", help="log to standard error what happens"
    )
    shown.add_argument(
        "--tensorboard",
        type=new_folder,
        metavar="DIR",
        help="write scalars for TensorBoard",
    )
    shown.add_argument(
        "--trace", type=new_file, metavar="FILE", help="write a timeline for Perfetto"
    )
    shown.add_argument(
        "--dashboard",
        action="store_true",
        help="serve a live page to this machine; standard error says where",
    )
    shown.add_argument(
        "--port", type=count, metavar="N", help="of the live page (default: a free one)"
    )


def run(options: argparse.Namespace) -> int:
    """Trains and says how it went."""
    if engine_here(options.engine) == "mpi":
        return on_ranks(options.given, lambda: _run(options))
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    from instep._commands._output import stdout_to_stderr

    _expect_sense(options)
    logging.getLogger("instep").addHandler(logging.NullHandler())  # else warnings show
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    if options.json:
        with stdout_to_stderr():
            summary = _train(options)
        print(json.dumps(summary, indent=2, allow_nan=False))
    else:
        _train(options)
    return 0


def _expect_sense(options: argparse.Namespace) -> None:
    path = options.checkpoint
    if options.port is not None and not options.dashboard:
        raise ArgumentError(
            f"--port {options.port} needs --dashboard, whose port it is"
        )
    if options.resume and path is None:
        raise ArgumentError("--resume needs --checkpoint FILE, to go on from")
    if path is not None and path.exists() and not options.resume:
        raise ArgumentError(
            f"{path} exists; add --resume to go on from it, or choose another name"
        )


def _train(options: argparse.Namespace) -> dict[str, Any]:
    """Trains to the end; what `--json` prints."""
    from instep._commands._training_display import make_display
    from instep._commands._training_log import TrainingLog
    from instep._training.tensorboard import ScalarWriter

    with ExitStack() as opened:
        board = None
        if options.tensorboard:
            board = opened.enter_context(ScalarWriter(options.tensorboard))
        display = make_display(options)
        opened.callback(display.close)
        display.open()  # a framework may take seconds to be imported
        training = opened.enter_context(_prepared(options))
        _watch(training, options, opened)
        stop = options.steps or training.job.steps
        log = TrainingLog(training, stop, display, board)
        _run_all(training, stop, options, opened.enter_context(log))
    summary = {"mode": options.mode.text, **log.summary()}
    if options.checkpoint:
        summary["checkpoint"] = str(options.checkpoint)
    display.finish(summary)
    return summary


def _prepared(options: argparse.Namespace) -> Training:
    """The training before its first step, or where its checkpoint was."""
    from instep._commands._job_file import load_job
    from instep._training import checkpoint
    from instep._training.training import Training

    with _held_back(options):
        job = load_job(options.job)
        state = checkpoint.load(options.checkpoint) if options.resume else None
        given = pool_options(options)
        if state is not None:
            _expect_same_shards(given, state)
        training = Training(job, options.mode, given)
        if state is not None:
            training.load_state_dict(state)
            _log.info("resumed at step %d", training.distance.batches)
        return training


def _watch(training: Training, options: argparse.Namespace, opened: ExitStack) -> None:
    """Writes a timeline, serves a page, if that is wanted."""
    if options.trace:
        opened.enter_context(training.pool.trace(options.trace))
    if options.dashboard:
        page = opened.enter_context(training.pool.dashboard(options.port))
        print(f"live page: {page.url}", file=sys.stderr, flush=True)


def _held_back(options: argparse.Namespace) -> AbstractContextManager[None]:
    """Inside, what libraries say about themselves when they start is not shown."""
    from instep._quiet import held_back_stderr

    return nullcontext() if options.verbose else held_back_stderr()


def _expect_same_shards(given: dict[str, Any], state: dict[str, Any]) -> None:
    shards = state["pool"]["shards"]
    if given.get("shards", shards) != shards:
        raise ArgumentError(
            f"--shards {given['shards']}, but the checkpoint is of a training with "
            f"{shards}, which gives other bits; leave --shards out"
        )


def _run_all(
    training: Training, stop: int, options: argparse.Namespace, log: TrainingLog
) -> None:
    from instep._training import checkpoint

    path: Path | None = options.checkpoint
    try:
        with ExitStack() as held:
            held.enter_context(_held_back(options))
            for end in _ends(training.distance.batches, stop, options):
                for step in training.steps(end):
                    log.note(step)
                    held.close()  # from now on the job alone has something to say
                if path is not None:
                    checkpoint.save(training.state_dict(), path)
                    log.saved = end
                    _log.info("saved %s at step %d", path, end)
    except KeyboardInterrupt:
        _say_interrupted(log, stop, options)
        raise


def _ends(start: int, stop: int, options: argparse.Namespace) -> Iterator[int]:
    """Where the stretches end after which the state is saved."""
    every = options.checkpoint_every if options.checkpoint else stop
    while start < stop:
        start = min(stop, start - start % every + every)
        yield start


def _say_interrupted(log: TrainingLog, stop: int, options: argparse.Namespace) -> None:
    if options.quiet:
        return
    done = log.training.distance.updates
    text = f"interrupted after {done} updates of a training with {stop} steps"
    if log.saved is not None:
        text += f"; --resume goes on at step {log.saved}"
    log.display.close()
    print(text, file=sys.stderr)
