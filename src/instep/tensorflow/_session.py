"""Steps of a pool inside `Session.run`, done by the thread that called it.

A Python function of a graph is called by one of TensorFlow's threads, while the
caller's thread waits inside `Session.run` and hears nothing, not even Ctrl-C; and an
exception reaches the caller as text. So `Session.run` of a graph with a pool goes to a
helper thread, and the caller's thread waits for what is asked of it:

    caller      run ──► wait ──► step ──► wait ──► result, or the step's own exception
    helper           └► TensorFlow's run ─────────────┘
    TensorFlow             └► run_for_session ──► goes on

Other ways to run a graph (`Session.make_callable`) compute the step where they are.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

_hosts: weakref.WeakKeyDictionary[tf.Graph, _Host | None] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_own = threading.local()


def answer_in_session_run(graph: tf.Graph) -> None:
    """From now on, `Session.run` of this graph does the pools' steps itself."""
    with _lock:
        _hosts.setdefault(graph, None)
        _install()


def run_for_session(graph: tf.Graph, step: Callable[[], Any]) -> Any:
    """Has the thread in `Session.run` do the step; does it here if there is none."""
    with _lock:
        host = _hosts.get(graph)
        question = host.ask(step) if host else None
    if question is None:
        return step()
    try:
        return question.result()
    except BaseException as error:
        # TensorFlow makes text of it; the caller's thread raises the error itself.
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


class _Question:
    """A function to be called by another thread, and what came of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._waiting = threading.Lock()
        self._waiting.acquire()
        self._answer: tuple[Any, BaseException | None] | None = None

    @property
    def is_answered(self) -> bool:
        return self._answer is not None

    def answer(self) -> BaseException | None:
        """Calls the function; returns what it raised."""
        try:
            self._put(self._function(), None)
        except BaseException as error:
            self._put(None, error)
            return error
        return None

    def refuse(self, error: BaseException) -> None:
        """Answers with an error, unless there is an answer."""
        self._put(None, error)

    def result(self) -> Any:
        """Waits for the answer."""
        with self._waiting:
            assert self._answer is not None
            value, error = self._answer
        if error is not None:
            raise error
        return value

    def _put(self, value: Any, error: BaseException | None) -> None:
        if self._answer is None:
            self._answer = value, error
            self._waiting.release()


class _Host:
    """The thread that called `Session.run`, waiting."""

    def __init__(self) -> None:
        self._asked = list[_Question]()
        self._news = queue.SimpleQueue[None]()
        self._failure: BaseException | None = None

    def ask(self, step: Callable[[], Any]) -> _Question:
        """Queues a step, to be done by the waiting thread."""
        question = _Question(step)
        self._asked.append(question)
        self._news.put(None)
        return question

    def run(self, helper: _Helper, run: Callable[[], Any]) -> Any:
        """Has the helper run the graph; does what is asked until it has ended.

        Returns:
            What the run returned.

        Raises:
            BaseException: what a step raised, or Ctrl-C; else what the run raised.
        """
        job = _Question(run)
        helper.do(job, self._news)
        while self._asked or not job.is_answered:
            try:
                if not self._asked:
                    self._news.get()
                self._answer_all()
            except BaseException as error:  # Ctrl-C comes at any line
                self._failure = self._failure or error
        if self._failure is not None:
            raise self._failure
        return job.result()

    def _answer_all(self) -> None:
        # A question is forgotten once it is answered, so that none is lost.
        while self._asked:
            if self._failure is not None:
                self._asked[0].refuse(self._failure)
            else:
                self._failure = self._asked[0].answer()
            self._asked.pop(0)


class _Helper:
    """A thread that runs graphs for another one, and ends with it."""

    def __init__(self) -> None:
        self._jobs = queue.SimpleQueue[tuple[_Question, Any] | None]()
        threading.Thread(
            target=_work, args=(self._jobs,), name="instep-session", daemon=True
        ).start()

    def do(self, job: _Question, news: queue.SimpleQueue[None]) -> None:
        """Begins the job; `news` is told when it has ended."""
        self._jobs.put((job, news))

    def __del__(self) -> None:
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[Any]) -> None:
    while (work := jobs.get()) is not None:
        job, news = work
        job.answer()
        news.put(None)
        del work, job  # they hold the session and what it fetched


@functools.cache
def _install() -> None:
    """Wraps `Session.run`, once per process."""
    session = next(c for c in tf.compat.v1.Session.__mro__ if "run" in vars(c))
    run = session.run

    @functools.wraps(run)
    def run_as_host(self: Any, *arguments: Any, **keywords: Any) -> Any:
        host = _begin(self.graph)
        if host is None:
            return run(self, *arguments, **keywords)
        try:
            body = functools.partial(run, self, *arguments, **keywords)
            return host.run(_own_helper(), body)
        finally:
            _end(self.graph)

    session.run = run_as_host


def _begin(graph: tf.Graph) -> _Host | None:
    """A host for the graph; None if it has no pool, or another thread hosts it."""
    if graph not in _hosts:
        return None
    with _lock:
        if _hosts[graph] is not None:
            return None
        host = _hosts[graph] = _Host()
        return host


def _end(graph: tf.Graph) -> None:
    with _lock:
        _hosts[graph] = None


def _own_helper() -> _Helper:
    """This thread's helper."""
    if not hasattr(_own, "helper"):
        _own.helper = _Helper()
    helper: _Helper = _own.helper
    return helper
