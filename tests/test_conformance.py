"""Every engine and every adapter against the public conformance kit."""

from __future__ import annotations

import numpy as np
import pytest

import instep
from instep import testing

RNG = np.random.default_rng(1)
X, Y = RNG.normal(size=(13, 4)).astype(np.float32), RNG.normal(size=13).astype("f")
W = {"w": RNG.normal(size=4).astype(np.float32), "b": np.float32(0.5)}


@pytest.mark.parametrize("engine", ["serial", "processes"])
@pytest.mark.parametrize("fact", testing.ENGINE_FACTS, ids=lambda fact: fact.__name__)
def test_engine(fact, engine):
    fact(engine, [2, 3] if engine == "processes" else [1])


def squares(params, x, y):
    r = x @ params["w"] + params["b"] - y
    scaled = np.float32(2 / len(y)) * r
    return np.mean(r**2), {"w": x.T @ scaled, "b": scaled.sum()}


def test_numpy_adapter():
    def make_pool(**options):
        return instep.numpy.value_and_grad(squares, **options)

    testing.check_adapter(
        make_pool, lambda pool: pool(W, X, Y), lambda: squares(W, X, Y), workers=[1, 3]
    )


def test_torch_adapter():
    torch = pytest.importorskip("torch")

    def network():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
        )

    def loss(model, x, y):
        return (model(x)[:, 0] - y).square().mean()

    def make_pool(**options):
        return instep.torch.GradientPool(network(), loss, **options)

    def call(pool):
        value = pool.backward(torch.from_numpy(X), torch.from_numpy(Y))
        return value, [p.grad for p in pool._model.parameters()]

    def reference():
        model = network()
        value = loss(model, torch.from_numpy(X), torch.from_numpy(Y))
        value.backward()
        return value.detach(), [p.grad for p in model.parameters()]

    testing.check_adapter(make_pool, call, reference, workers=[1, 3])


def test_different_bits_are_named():
    with pytest.raises(AssertionError, match=r"result\['w'\]: 1 of 2 values"):
        testing.assert_same_bits({"w": np.zeros(2)}, {"w": np.array([0.0, -0.0])})


def test_an_engine_that_drops_a_shard_is_caught():
    from instep.engines.serial import Serial

    class Drops(Serial):
        def average(self, weights):
            return super().average(weights[:-1])

    with pytest.raises(AssertionError, match="values have other bits"):
        testing.check_engine(Drops, workers=[1])
