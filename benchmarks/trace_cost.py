"""What it costs a step to be watched: by a trace, by a live page.

    python benchmarks/trace_cost.py [--rounds N] [--steps N] [--workers N] [--quick]

Steps of a perceptron with one hidden layer, in NumPy and in PyTorch with Adam. One
pool takes turns: a few steps with nobody watching, as many with a trace, as many with
a live page that a reader asks for twice a second, in another order each round. The
ratios are formed within a round, so that a busy moment of the machine hits all alike;
"again" is a second turn with nobody watching, and shows what the noise is.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe, load

import instep

ROWS, INPUTS, HIDDEN = 512, 64, 128
PACKAGES = ("instep", "numpy", "torch")

Step = Callable[[], object]
Watch = Callable[[], AbstractContextManager[object]]


def main() -> None:
    options = parse_options()
    for fact, value in {**describe(PACKAGES), "load": load()}.items():
        print(f"{fact:<10} {value}")
    print(f"\n{'step':<8}{'ms':>8}{'trace':>10}{'page':>10}{'again':>10}")
    for make in (make_numpy, make_torch):
        pool, step = make(options.workers)
        with pool, tempfile.TemporaryDirectory() as folder:
            times = measure(step, watches(pool, Path(folder)), options)
        cells = "".join(
            f"{100 * cost(times, name):>+9.2f}%" for name in list(times)[1:]
        )
        off_ms = 1e3 * statistics.median(times["off"])
        print(f"{make.__name__[5:]:<8}{off_ms:>8.3f}{cells}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=200, help="in one turn")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="three short rounds")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 3, 20
    return options


def watches(pool: Any, folder: Path) -> dict[str, Watch]:
    """Ways to be watched, or not to be."""
    return {
        "off": nullcontext,
        "trace": lambda: pool.trace(folder / "run.json"),
        "page": lambda: looked_at(pool),
        "again": nullcontext,
    }


@contextmanager
def looked_at(pool: Any) -> Iterator[None]:
    """Inside, there is a live page, and somebody asks for its state."""
    over = threading.Event()
    with pool.dashboard() as dashboard:

        def read() -> None:
            while not over.wait(0.5):
                with urllib.request.urlopen(dashboard.url + "state") as answer:
                    answer.read()

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield
        finally:
            over.set()
            reader.join()


def measure(
    step: Step, ways: dict[str, Watch], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds per step: for every way the median of a turn, one per round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    take(step, 5 * options.steps)
    for number in range(options.rounds):
        names = list(ways)
        random.Random(number).shuffle(names)
        for name in names:
            with ways[name]():
                times[name].append(take(step, options.steps))
    return times


def take(step: Step, steps: int) -> float:
    """Seconds of a step, all steps of a turn together: writing the trace included."""
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - begin) / steps


def cost(times: dict[str, list[float]], name: str) -> float:
    """By which part a step is slower; the median of the rounds' ratios."""
    pairs = zip(times[name], times["off"], strict=True)
    return statistics.median(ours / off for ours, off in pairs) - 1


def perceptron(params: Any, x: Any, y: Any) -> Any:
    """The mean squared error, and its gradient."""
    hidden = np.tanh(x @ params["a"])
    error = hidden @ params["b"] - y
    inner = error @ params["b"].T * (1 - hidden**2)
    scale = 2 / len(x)
    gradient = {"a": scale * x.T @ inner, "b": scale * hidden.T @ error}
    return np.mean(error**2), gradient


def make_numpy(workers: int) -> tuple[Any, Step]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, INPUTS)), rng.normal(size=(ROWS, 1))
    params = {"a": rng.normal(size=(INPUTS, HIDDEN)), "b": rng.normal(size=(HIDDEN, 1))}
    pool = instep.numpy.value_and_grad(perceptron, workers=workers)

    def step() -> None:
        _, grads = pool(params, x, y)
        for name, gradient in grads.items():
            params[name] -= 1e-4 * gradient

    return pool, step


def squared_error(model: Any, x: Any, y: Any) -> Any:
    return torch.nn.functional.mse_loss(model(x), y)


def make_torch(workers: int) -> tuple[Any, Step]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = (
        torch.nn.Linear(INPUTS, HIDDEN),
        torch.nn.Tanh(),
        torch.nn.Linear(HIDDEN, 1),
    )
    model = torch.nn.Sequential(*layers)
    x, y = torch.randn(ROWS, INPUTS), torch.randn(ROWS, 1)
    optimizer = torch.optim.Adam(model.parameters())
    pool = instep.torch.GradientPool(model, squared_error, workers=workers)

    def step() -> None:
        optimizer.zero_grad()
        pool.backward(x, y)
        optimizer.step()

    return pool, step


if __name__ == "__main__":
    main()
