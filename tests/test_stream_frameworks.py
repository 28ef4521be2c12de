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

        self.reset()
        return instep.numpy.value_and_grad(fun, **options)

    def reset(self) -> None:
        self.w = np.zeros(3, np.float32)

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
        self.reset()
        return instep.torch.GradientPool(self._model, loss, **options)

    def reset(self) -> None:
        for parameter in self._model.parameters():
            self._torch.nn.init.zeros_(parameter)

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

        self.reset()
        return instep.jax.value_and_grad(loss, **options)

    def reset(self) -> None:
        numpy = self._jax.numpy
        self._params = {"b": numpy.zeros(()), "w": numpy.zeros(3)}

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

    def reset(self) -> None:
        for variable in self._variables:
            variable.assign(self._tf.zeros_like(variable))

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
    made = request.param()
    if request.param is TensorFlow:  # once it is imported here
        request.getfixturevalue("workers_with_only_tensorflow")
    return made


def test_streams_have_the_bits_of_calls_of_records_and_of_fewer_workers(
    script, tmp_path
):
    record, compensated = tmp_path / "run", instep.DelayCompensated(0.5)
    local = instep.Local(2, script.momentum or 0.05)

    def streamed(pool, mode, rate=0.05, **options):
        script.reset()
        updates = script.by_stream(pool, mode, rate, **options)
        return bits(script.values()), updates

    with script.pool(workers=2, shards=3) as pool:
        script.by_calls(pool, 0.05)
        expected = bits(script.values())
        found, updates = streamed(pool, instep.Synchronous())
        assert found == expected
        assert [update.weight for update in updates] == [11.0] * 7
        free = instep.Asynchronous(correction=compensated)
        recorded, _ = streamed(pool, free, record=record)
        walked, updates = streamed(pool, local, rate=1.0)
        assert [update.weight for update in updates] == [22.0, 22.0, 22.0, 11.0]
    with script.pool(workers=1, engine="serial") as pool:
        script.by_calls(pool, 0.05)
        alone = bits(script.values())
    with script.pool(workers=1, shards=3) as pool:
        assert streamed(pool, instep.Replay(record))[0] == recorded
        assert streamed(pool, local, rate=1.0)[0] == walked
        found, updates = streamed(pool, instep.Asynchronous())
        assert found == alone
        assert [update.staleness for update in updates] == [0] * 7


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
