"""A step that fails leaves everything as it was before it."""

from __future__ import annotations

import os

import numpy as np
import pytest

import instep
from helpers import bits, both_engines, make


@both_engines
def test_a_step_that_failed_changes_no_bit_of_those_after_it(engine):
    def fun(w, x):
        noise = np.random.random()
        if x[-1] < 0:
            raise ValueError("negative row")
        return np.mean(w) * np.mean(x) + noise, np.full_like(w, np.mean(x) * noise)

    def descend(pool, batches):
        w = np.linspace(0, 1, 600_003)  # large: the workers average
        for batch in batches:
            try:
                w = w - pool(w, batch)[1]
            except ValueError:
                assert batch[-1] < 0
        return bits(w)

    good = [np.arange(1.0, 10.0) * k for k in (1, 2, 3)]
    bad = np.array([1.0, 2.0, 3.0, -1.0])  # fails in the last shard
    with make(fun, shards=3, engine="serial") as pool:
        expected = descend(pool, good)
    with make(fun, workers=2, shards=3, engine=engine) as pool:
        assert descend(pool, [bad, good[0], bad, bad, *good[1:], bad]) == expected
        assert pool.statistics().steps == 3


def test_a_step_that_failed_leaves_a_model_and_its_optimizer_as_they_were():
    torch = pytest.importorskip("torch")

    def loss(model, x):
        value = model(x).square().mean()
        if (x > 100).any():
            if (x > 1000).any():
                os._exit(3)
            raise ValueError("bad row")
        return value

    def state():
        optimizer_state = optimizer.state_dict()["state"]
        tensors = [*model.state_dict().values(), *(p.grad for p in parameters)]
        tensors += [v for values in optimizer_state.values() for v in values.values()]
        return [tensor.clone() for tensor in tensors]

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout()
    )
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters)
    good, bad = torch.randn(2, 8, 3).unbind()
    with instep.torch.GradientPool(model, loss, workers=2, retries=0) as pool:
        pool.backward(good)
        optimizer.step()
        before = state()
        for value, error in [(200.0, ValueError), (2000.0, instep.WorkerLostError)]:
            bad[-1] = value
            for use in (pool.backward, pool.gradients, pool.evaluate):
                with pytest.raises(error):
                    use(bad)
        assert len(before) == len(state()) == 23
        assert all(map(torch.equal, before, state()))
        assert pool.statistics().steps == 1
        pool.backward(good)
