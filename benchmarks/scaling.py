"""How a step's communication grows with the number of machines.

    python benchmarks/scaling.py [--rate 1gbit] [--megabytes 8] [--steps 20]
                               [--machines 1000] [--json PATH] [--picture PATH]

Measured: 1 to 4 hosts, network namespaces of this machine with cables of the given
rate (tests/hosts.py; as root), a worker on each, and a gradient that costs nothing.
Bytes are those that each host has put on its cable, all that TCP adds included.

Simulated: the same messages (the engine's own plan) between up to so many machines,
each with one line out and one line in of that rate; one transfer follows the other on
a line. The latency of a message is a fourth of what a step with few bytes takes longer
on several hosts than on one: four follow each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import simpy
from machine import describe, load

from instep._layout import Layout
from instep._partials import largest_nodes
from instep._program import Output
from instep.engines._average import MASTER, parts_of, plan
from instep.engines._orders import Share

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from hosts import Hosts, reason_against

JOB = """
import json, sys, time
import numpy as np
import instep

def fun(w, x):
    return np.mean(x), w

sizes, steps, machines = json.loads(sys.argv[1])
for size in sizes:
    with instep.numpy.value_and_grad(fun, shards=machines) as pool:
        w, rows = np.zeros(size), np.zeros(machines)
        while True:  # until every worker takes part
            before = pool.statistics().shards_computed
            pool(w, rows)
            after = pool.statistics().shards_computed
            if all(b - a == 1 for a, b in zip(before, after)):
                break
        print("begin", flush=True)
        input()
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            pool(w, rows)
            times.append(time.perf_counter() - begin)
        print(json.dumps(times), flush=True)
        input()
"""
SMALL = 16  # numbers of a gradient that costs latency alone
MOST_HOSTS = 4


def main() -> None:
    options = parse_options()
    if reason := reason_against():
        sys.exit(reason)
    size = options.megabytes * 125_000
    facts = {**describe(("instep", "mpi4py", "openmpi")), "rate": options.rate}
    facts["load before"] = load()
    rows = [measured(number, size, options) for number in range(1, MOST_HOSTS + 1)]
    facts["load after"] = load()
    latency = statistics.median(row["small_s"] - rows[0]["small_s"] for row in rows[1:])
    bandwidth = bytes_per_second(options.rate)
    curve = [
        simulated(number, 8 * size, latency / 4, bandwidth)
        for number in numbers_to(options.machines)
    ]
    for fact, value in facts.items():
        print(f"{fact:<14} {value}")
    print_rows(rows, curve, 8 * size, bandwidth)
    if options.json:
        both = {"facts": facts, "measured": rows, "simulated": curve}
        options.json.write_text(json.dumps(both, indent=1) + "\n")
    if options.picture:
        draw(options.picture, rows, curve, options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", default="1gbit", help="of a cable, as for tc")
    parser.add_argument("--megabytes", type=int, default=8, help="of the gradient")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--machines", type=int, default=1000, help="to simulate")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--picture", type=Path, metavar="PATH")
    return parser.parse_args()


def bytes_per_second(rate: str) -> float:
    """Of a rate as tc writes it: 500mbit, 1gbit."""
    unit = {"mbit": 1e6, "gbit": 1e9}[rate[-4:]]
    return float(rate[:-4]) * unit / 8


# Measured


def measured(number: int, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step, small and large, and gradients sent per host and step."""
    hosts = Hosts(number, options.rate)
    try:
        return job(hosts, number, size, options.steps)
    finally:
        hosts.close()


def job(hosts: Hosts, number: int, size: int, steps: int) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(JOB)
        script.flush()
        words = ["-m", "instep", "run", "--engine", "mpi", script.name, "--"]
        argument = json.dumps([[SMALL, size], steps, number])
        command = hosts.mpirun([2, *[1] * (number - 1)], *words, argument)
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            small, _ = turn(process, hosts, number)
            large, sent = turn(process, hosts, number)
    return {
        "machines": number,
        "small_s": statistics.median(small),
        "large_s": statistics.median(large),
        "gradients_sent": [one / steps / (8 * size) for one in sent],
    }


def turn(process: Any, hosts: Hosts, number: int) -> tuple[list[float], list[int]]:
    """Times of the steps, and bytes sent meanwhile."""
    while process.stdout.readline().strip() != "begin":
        pass
    time.sleep(0.5)  # what is said between steps
    before = [hosts.sent(host) for host in range(number)]
    process.stdin.write("\n")
    process.stdin.flush()
    times = json.loads(process.stdout.readline())
    after = [hosts.sent(host) for host in range(number)]
    process.stdin.write("\n")
    process.stdin.flush()
    return times, [b - a for a, b in zip(before, after, strict=True)]


# Simulated


def numbers_to(most: int) -> list[int]:
    return sorted({1, 2, 3, 4, *(2**k for k in range(3, 12) if 2**k < most), most})


class Lines:
    """A line out of each machine and one into it."""

    def __init__(self, env: Any, number: int, latency: float, bandwidth: float) -> None:
        self._env, self._latency, self._bandwidth = env, latency, bandwidth
        self._out = [simpy.Resource(env) for _ in range(number)]
        self._in = [simpy.Resource(env) for _ in range(number)]
        self.sent = [0.0] * number

    def carry(self, start: int, stop: int, nbytes: float) -> Iterator[Any]:
        """A message; what it takes on the line out and then on the line in overlaps."""
        self.sent[start] += nbytes
        with self._out[start].request() as line:
            yield line
            yield self._env.timeout(nbytes / self._bandwidth / 2)
            with self._in[stop].request() as other:
                yield other
                yield self._env.timeout(nbytes / self._bandwidth / 2)
        yield self._env.timeout(self._latency)


def simulated(
    number: int, nbytes: int, latency: float, bandwidth: float
) -> dict[str, Any]:
    """The communication of a step, and gradients sent by the busiest machine."""
    env = simpy.Environment()
    lines = Lines(env, number, latency, bandwidth)

    def step() -> Iterator[Any]:
        yield from parameters(env, lines, number, nbytes)
        yield env.timeout(0 if number == 1 else 2 * latency)  # commands and answers
        yield from average(env, lines, number, nbytes)

    env.run(env.process(step()))
    return {
        "machines": number,
        "seconds": env.now,
        "gradients_sent": max(lines.sent) / nbytes,
    }


def parameters(env: Any, lines: Lines, number: int, nbytes: int) -> Iterator[Any]:
    """From the master to all: in parts that are passed on."""

    def bring(to: int, size: int, others: list[int]) -> Iterator[Any]:
        yield env.process(lines.carry(MASTER, to, size))
        yield env.all_of(
            [env.process(lines.carry(to, other, size)) for other in others]
        )

    parts = parts_of(range(1, number), nbytes)
    yield env.all_of(
        [
            env.process(bring(to, stop - start, others))
            for to, (start, stop), others in parts
        ]
    )


def average(env: Any, lines: Lines, number: int, nbytes: int) -> Iterator[Any]:
    """Nodes to their owners, and each owner's part of the result to the master."""
    order = order_of(number, nbytes)

    def own(owner: int, size: int) -> Iterator[Any]:
        yield env.all_of(
            [
                env.process(lines.carry(station, owner, size * len(share.nodes)))
                for station, share in order.shares.items()
                if station != owner
            ]
        )
        if owner != MASTER:
            yield env.process(lines.carry(owner, MASTER, size))

    sizes = np.diff(order.cuts)
    pairs = zip(order.owners, sizes, strict=True)
    yield env.all_of([env.process(own(owner, int(size))) for owner, size in pairs])


def order_of(number: int, nbytes: int) -> Any:
    """The engine's plan for a shard on each machine."""
    layout = Layout.of([Output((nbytes // 8,), np.dtype(np.float64), "mean", "w")])
    shares = {
        station: Share(largest_nodes({station}, number), [station], [1.0])
        for station in range(number)
    }
    return plan(0, shares, [1.0] * number, layout)


# Shown


def formula(number: int, nbytes: int, bandwidth: float) -> float:
    """Seconds by the lines' bytes alone, where parts are not too small."""
    if number == 1:
        return 0.0
    shared = 1 - 1 / number
    if number == 2:
        return 2 * nbytes / bandwidth
    return nbytes / bandwidth * (1 + (1 - 1 / (number - 1)) + shared + 1 / number)


def print_rows(
    rows: list[dict[str, Any]],
    curve: list[dict[str, Any]],
    nbytes: int,
    bandwidth: float,
) -> None:
    print("\nmachines  measured, ms  simulated, ms  formula, ms  gradients sent, most")
    known = {row["machines"]: row for row in rows}
    for point in curve:
        number = point["machines"]
        row = known.get(number)
        time = f"{1e3 * row['large_s']:.1f}" if row else "-"
        sent = max(row["gradients_sent"]) if row else point["gradients_sent"]
        print(
            f"{number:>8}  {time:>12}  {1e3 * point['seconds']:>13.1f}"
            f"  {1e3 * formula(number, nbytes, bandwidth):>11.1f}  {sent:>20.2f}"
        )


def draw(
    path: Path,
    rows: list[dict[str, Any]],
    curve: list[dict[str, Any]],
    options: argparse.Namespace,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    numbers = [point["machines"] for point in curve]
    left.plot(numbers, [1e3 * p["seconds"] for p in curve], label="simulated")
    ours = [row["machines"] for row in rows]
    left.plot(ours, [1e3 * row["large_s"] for row in rows], "o", label="measured")
    left.set_ylabel("ms per step without computing")
    right.plot(numbers, [p["gradients_sent"] for p in curve], label="simulated")
    right.plot(
        ours, [max(row["gradients_sent"]) for row in rows], "o", label="measured"
    )
    right.set_ylabel("gradients' sizes sent, busiest machine")
    for panel in (left, right):
        panel.set_xscale("log")
        panel.set_ylim(0)
        panel.set_xlabel("machines")
        panel.legend()
    figure.suptitle(
        f"{options.megabytes} MB of gradient, {options.rate} for each machine"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
