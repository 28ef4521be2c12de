"""Hosts of their own on this machine: network namespaces that only a cable connects."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

PYTHON = sys.executable
MPIRUN = str(Path(PYTHON).with_name("mpirun"))
RAY = str(Path(PYTHON).with_name("ray"))

# The name of a host is that of its namespace; it has another host name, too.
_ENTER = 'hostname "$0"; exec "$@"'
# mpirun's way to other hosts: ADDRESS COMMAND...
_AGENT = """#!/bin/sh
name="{prefix}${{1##*.}}"
shift
exec ip netns exec "$name" unshare --uts sh -c "hostname $name; $*"
"""


def reason_against() -> str:
    """Why there can be no hosts here; empty if there can."""
    for program in ("ip", "tc", "unshare"):
        if not shutil.which(program):
            return f"{program} is missing (iproute2, util-linux)"
    try:
        with closing(Hosts(1, rate="1gbit")) as hosts:
            hosts.run(0, "true", check=True)
    except subprocess.CalledProcessError as error:
        return f"no hosts of their own: {error} {error.stderr or ''}"
    return ""


class Hosts:
    """Some hosts and a switch between them.

    Args:
        number: of hosts, at most 250; `addresses` are theirs.
        rate: of each host's cable, such as "1gbit"; None: as fast as it goes.
    """

    def __init__(self, number: int, rate: str | None = None) -> None:
        _remove_stale()
        self._prefix = f"i{os.getpid()}h"
        self._switch = f"{self._prefix}switch"
        self.names = [f"{self._prefix}{k + 1}" for k in range(number)]
        self.addresses = [f"10.77.0.{k + 1}" for k in range(number)]
        # Short: names of sockets have a limit.
        self.folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        try:
            self._build(rate)
        except BaseException:
            self.close()
            raise

    def _build(self, rate: str | None) -> None:
        _ip("netns", "add", self._switch)
        self._in(self._switch, "link", "add", "switch", "type", "bridge")
        self._in(self._switch, "link", "set", "switch", "up")
        for name, address in zip(self.names, self.addresses, strict=True):
            self._connect(name, address, rate)

    def run(self, host: int, *words: Any, **options: Any) -> Any:
        """Runs a command there to its end."""
        return subprocess.run(
            self.command(host, *words), capture_output=True, text=True, **options
        )

    def command(self, host: int, *words: Any) -> list[str]:
        """A command as one of that host."""
        name = self.names[host]
        enter = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", _ENTER]
        return [*enter, name, *map(str, words)]

    def mpirun(self, ranks: Sequence[int], *words: Any) -> list[str]:
        """A job with so many ranks on each host, started on the first."""
        agent = self.folder / "agent"
        agent.write_text(_AGENT.format(prefix=self._prefix))
        agent.chmod(0o755)
        pairs = zip(self.addresses, ranks, strict=False)
        hosts = ",".join(f"{address}:{number}" for address, number in pairs)
        options = ["--allow-run-as-root", "--bind-to", "none", "--host", hosts]
        options += ["--prtemca", "plm_ssh_agent", agent, "-n", sum(ranks)]
        return self.command(0, MPIRUN, *options, PYTHON, *words)

    def sent(self, host: int) -> int:
        """Bytes that it has put on its cable."""
        path = "/sys/class/net/cable/statistics/tx_bytes"
        return int(self.run(host, "cat", path, check=True).stdout)

    def cut_off(self, host: int) -> None:
        """Pulls its cable."""
        self._in(self.names[host], "link", "set", "cable", "down")

    def pids(self, host: int, program: str) -> list[int]:
        """Processes there whose command line has this word."""
        listed = _ip("netns", "pids", self.names[host]).split()
        return [int(pid) for pid in listed if program in _command_line(pid)]

    def close(self) -> None:
        """Ends everything that runs there."""
        there = {line.split()[0] for line in _ip("netns", "list").splitlines()}
        for name in there.intersection([*self.names, self._switch]):
            _remove(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _connect(self, name: str, address: str, rate: str | None) -> None:
        plug = f"to{name[-4:]}"
        _ip("netns", "add", name)
        pair = ["cable", "netns", name, "type", "veth", "peer", "name", plug]
        _ip("link", "add", *pair, "netns", self._switch)
        self._in(self._switch, "link", "set", plug, "master", "switch", "up")
        self._in(name, "addr", "add", f"{address}/24", "dev", "cable")
        for device in ("cable", "lo"):
            self._in(name, "link", "set", device, "up")
        if rate:
            limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            words = ["tc", "qdisc", "add", "dev", "cable", *limit]
            subprocess.run(["ip", "netns", "exec", name, *words], check=True)

    def _in(self, name: str, *words: str) -> None:
        _ip("-n", name, *words)


def _remove(name: str) -> None:
    for pid in _ip("netns", "pids", name).split():
        _kill(int(pid))
    _ip("netns", "del", name)


def _remove_stale() -> None:
    """Hosts of processes that were killed before they could remove them."""
    for line in _ip("netns", "list").splitlines():
        found = re.fullmatch(r"i(\d+)h\w+", line.split()[0])
        if found and not Path(f"/proc/{found[1]}").exists():
            _remove(line.split()[0])


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
    return done.stdout


def _command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""  # it has ended


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
