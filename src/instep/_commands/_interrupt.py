"""Ctrl-C ends a command; pressed twice, it does not break into the clean-up."""

from __future__ import annotations

import signal
import threading
import time

# Seconds that a command may take to clean up.
GRACE_S = 5.0


def ignore_repeated_interrupts() -> None:
    """From now on, a Ctrl-C soon after another is ignored."""
    is_main = threading.current_thread() is threading.main_thread()
    # A background process may have been started to ignore it, as by a shell's `&`.
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    last = float("-inf")

    def interrupt(number: int, frame: object) -> None:
        nonlocal last
        if time.monotonic() - last > GRACE_S:
            last = time.monotonic()
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)


def interrupt_as_python_does() -> None:
    """From now on, every Ctrl-C is a KeyboardInterrupt, as in a script of its own."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_interrupts() -> None:
    """From now on, Ctrl-C does nothing: the process is about to end."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
