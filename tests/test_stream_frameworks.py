"""Streams in every framework: the same facts, by the framework's own loop."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import instep
from helpers import bits

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(60, 3)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 0.5], np.float32)
BATCHES = [(X[k * 7 : k * 7 + 11], Y[k * 7 : k * 7 + 11]) for k in range(7)]


class Numpy:
    """The parameters are an array, updated in place."""

    momentum = None

    def pool(self, **options: Any) -> Any:
        def fun(w, x, y):
            error = x @ w - y
            return np.mean(error**2), 2 * x.T @ error / len(x)

        self.w = np.zeros(3, np.float32)
        return instep.numpy.value_and_grad(fun, **options)

    def by_calls(self, pool: Any, rate: float) -> None:
        for batch in BATCHES:
            self.w -= np.float32(rate) * pool(self.w, *batch)[1]

    def by_stream(self, pool: Any, mode: Any, rate: float, **options: Any) -> list[Any]:
        updates = []
        for update in pool.stream(BATCHES, mode, params=self.w, **options):
            self.w -= np.float32(rate) * update.grads
            updates.append(update)
        return updates

    def values(self) -> Any:
        return self.w


class Torch:
    """The parameters are a model's; gradients come in `.grad`."""

    def __init__(self) -> None:
        self._torch = pytest.importorskip("torch")
        self._torch.set_num_threads(1)
        self.momentum = functools.partial(self._torch.optim.SGD, lr=0.05, momentum=0.5)

    def pool(self, **options: Any) -> Any:
        torch = self._torch

        def loss(model, x, y):
            return torch.nn.functional.mse_loss(model(x)[:, 0], y)

        self._model = torch.nn.Linear(3, 1)
        for parameter in self._model.parameters():
            torch.nn.init.zeros_(parameter)
        return instep.torch.GradientPool(self._model, loss, **options)

    def _batches(self) -> Any:
        from_numpy = self._torch.from_numpy
        return [tuple(map(from_numpy, batch)) for batch in BATCHES]

    def by_calls(self, pool: Any, rate: float) -> None:
        optimizer = self._torch.optim.SGD(self._model.parameters(), rate)
        for batch in self._batches():
            optimizer.zero_grad()
            pool.backward(*batch)
            optimizer.step()

    def by_stream(self, pool: Any, mode: Any, rate: float, **options: Any) -> list[Any]:
        optimizer = self._torch.optim.SGD(self._model.parameters(), rate)
        updates = []
        for update in pool.stream(self._batches(), mode, **options):
            optimizer.step()  # no zero_grad: an update's gradients are its own
            updates.append(update)
        return updates

    def values(self) -> Any:
        return [parameter.detach().numpy() for parameter in self._model.parameters()]


class Jax:
    """The parameters are a tree, published after every update."""

    def __init__(self) -> None:
        self._jax = pytest.importorskip("jax")
        self.momentum = pytest.importorskip("optax").sgd(0.05, momentum=0.5)

    def pool(self, **options: Any) -> Any:
        numpy = self._jax.numpy

        def loss(params, x, y):
            return numpy.mean((x @ params["w"] + params["b"] - y) ** 2)

        self._params = {"b": numpy.zeros(()), "w": numpy.zeros(3)}
        return instep.jax.value_and_grad(loss, **options)

    def _step(self, rate: float, grads: Any) -> None:
        def step(value, grad):
            return value - rate * grad

        self._params = self._jax.tree.map(step, self._params, grads)

    def by_calls(self, pool: Any, rate: float) -> None:
        for batch in BATCHES:
            self._step(rate, pool(self._params, *batch)[1])

    def by_stream(self, pool: Any, mode: Any, rate: float, **options: Any) -> list[Any]:
        updates = []
        stream = pool.stream(BATCHES, mode, params=self._params, **options)
        for update in stream:
            self._step(rate, update.grads)
            stream.publish(self._params)
            updates.append(update)
        return updates

    def values(self) -> Any:
        return [np.asarray(self._params[name]) for name in ("b", "w")]


class TensorFlow:
    """The parameters are variables; gradients are for `apply_gradients`."""

    def __init__(self) -> None:
        self._tf = pytest.importorskip("tensorflow")
        keras = pytest.importorskip("keras")
        self.momentum = functools.partial(keras.optimizers.SGD, 0.05, momentum=0.5)

    def pool(self, **options: Any) -> Any:
        tf = self._tf

        def loss(variables, x, y):
            w, b = variables
            return tf.reduce_mean((tf.linalg.matvec(x, w) + b - y) ** 2)

        self._variables = [tf.Variable(tf.zeros(3)), tf.Variable(0.0)]
        return instep.tensorflow.GradientPool(self._variables, loss, **options)

    def _step(self, rate: float, grads: Any) -> None:
        for variable, grad in zip(self._variables, grads, strict=True):
            variable.assign_sub(rate * grad)

    def by_calls(self, pool: Any, rate: float) -> None:
        for batch in BATCHES:
            self._step(rate, pool.gradient(*batch)[1])

    def by_stream(self, pool: Any, mode: Any, rate: float, **options: Any) -> list[Any]:
        updates = []
        for update in pool.stream(BATCHES, mode, **options):
            self._step(rate, update.grads)
            updates.append(update)
        return updates

    def values(self) -> Any:
        return [variable.numpy() for variable in self._variables]


@pytest.fixture(params=[Numpy, Torch, Jax, TensorFlow], ids=lambda kind: kind.__name__)
def script(request):
    return request.param()


def test_a_stream_has_the_bits_of_calls_and_a_replay_those_of_its_record(
    script, tmp_path
):
    record = tmp_path / "run"
    with script.pool(workers=2, shards=3) as pool:
        script.by_calls(pool, 0.05)
        expected = bits(script.values())
    with script.pool(workers=2, shards=3) as pool:
        updates = script.by_stream(pool, instep.Synchronous(), 0.05)
        assert bits(script.values()) == expected
        assert [update.weight for update in updates] == [11.0] * 7
    compensated = instep.Asynchronous(correction=instep.DelayCompensated(0.5))
    with script.pool(workers=2) as pool:
        script.by_stream(pool, compensated, 0.05, record=record)
        recorded = bits(script.values())
    with script.pool(workers=1) as pool:
        replayed = script.by_stream(pool, instep.Replay(record), 0.05)
        assert bits(script.values()) == recorded
        assert all(update.loss > 0 for update in replayed)


def test_one_worker_out_of_step_is_plain_sgd(script):
    with script.pool(workers=1) as pool:
        script.by_calls(pool, 0.05)
        expected = bits(script.values())
    with script.pool(workers=1) as pool:
        updates = script.by_stream(pool, instep.Asynchronous(), 0.05)
        assert bits(script.values()) == expected
        assert [update.staleness for update in updates] == [0] * 7


def test_local_steps_have_the_same_bits_on_one_worker_and_on_two(script):
    mode = instep.Local(2, script.momentum or 0.05)
    found = []
    for workers in (1, 2):
        with script.pool(workers=workers, shards=2) as pool:
            updates = script.by_stream(pool, mode, 1.0)
            found.append(bits(script.values()))
            assert [update.weight for update in updates] == [22.0, 22.0, 22.0, 11.0]
    assert found[0] == found[1]


def test_jax_parameters_that_are_not_published_are_an_error():
    script = Jax()
    with script.pool(workers=1) as pool:
        stream = pool.stream(BATCHES, params=script._params)
        next(stream)
        with pytest.raises(instep.ArgumentError, match="publish"):
            next(stream)


def test_a_model_s_running_statistics_and_mode_follow():
    torch = pytest.importorskip("torch")

    def loss(model, x):
        return model(x).square().mean()

    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    with instep.torch.GradientPool(model, loss, workers=1) as pool:
        rows = torch.from_numpy(X)
        for number, _ in enumerate(pool.stream([rows] * 4, instep.Asynchronous())):
            assert model[0].num_batches_tracked == number + 1
        before = model[0].running_mean.clone()
        model.eval()
        list(pool.stream([rows], instep.Asynchronous()))
        assert torch.equal(model[0].running_mean, before)


def test_workers_never_read_a_model_that_its_optimizer_writes():
    torch = pytest.importorskip("torch")

    def loss(model, x):
        low, high = torch.aminmax(model.weight.detach())
        if low != high:
            raise ValueError("torn")
        return model.weight.mean() * 4096  # a gradient of 1 for each weight

    model = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, maximize=True)
    with instep.torch.GradientPool(model, loss, workers=3) as pool:
        for _ in pool.stream([torch.zeros(1)] * 500, instep.Asynchronous()):
            optimizer.step()
    assert (model.weight == 500).all()
