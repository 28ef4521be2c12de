"""Modes: the rules by which gradients become updates.

Each is one file of pure logic, without I/O and without a clock, so that workers and a
simulation drive the same rules (`instep._stream`, `instep._simulation`).
"""

from instep.modes._rules import Mode, Rules
from instep.modes.asynchronous import Asynchronous
from instep.modes.corrections import DelayCompensated, StalenessAware
from instep.modes.local import Local
from instep.modes.replay import Replay
from instep.modes.stale_synchronous import StaleSynchronous
from instep.modes.synchronous import Synchronous

__all__ = [
    "Asynchronous",
    "DelayCompensated",
    "Local",
    "Mode",
    "Replay",
    "Rules",
    "StaleSynchronous",
    "StalenessAware",
    "Synchronous",
]
