"""What a PyTorch pool cannot do right, it refuses by name, and goes on."""

from __future__ import annotations

import functools
import threading

import pytest

import instep

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.utils.rnn import pack_sequence  # noqa: E402

from instep.torch import GradientPool  # noqa: E402
from torch_zoo import Values, product_mean  # noqa: E402

X = torch.arange(1.0, 5.0)
both_engines = pytest.mark.parametrize(
    "options", [{"engine": "serial"}, {"workers": 2}], ids=["serial", "processes"]
)


def serial(loss, model=None, **options):
    """A pool of two shards in this process."""
    model = Values(w=2.0) if model is None else model
    return GradientPool(model, loss, shards=2, engine="serial", **options)


def message(pool, *batch, error=instep.LossError):
    """The error's text; no gradient is left behind."""
    with pool, pytest.raises(error) as caught:
        pool.backward(*batch)
    assert all(p.grad is None for p in pool._model.parameters())
    return str(caught.value)


# What the loss returns


def test_a_loss_that_is_no_scalar_tensor_is_refused():
    bad = {
        "the loss has shape (2,); expected a scalar": lambda m, x: m.w * x,
        "the loss has shape (1,)": lambda m, x: (m.w * x).mean()[None],
        "the loss returned None": lambda m, x: None,
        "the loss returned 3.0": lambda m, x: 3.0,
        "returned a tuple; expected a scalar tensor (or a pair": lambda m, x: (m.w, x),
    }
    for text, loss in bad.items():
        assert text in message(serial(loss), X)


def test_a_pair_is_needed_where_aux_was_announced():
    text = message(serial(product_mean, has_aux=True), X)
    assert "the loss returned a Tensor; expected (loss, aux)" in text


@pytest.mark.parametrize("weight", [torch.nan, -1.0, torch.inf, torch.ones(2), "many"])
def test_a_weight_that_is_no_number_of_rows_is_refused(weight):
    def loss(model, x):
        total = torch.tensor(weight) if isinstance(weight, float) else weight
        return instep.Weighted((model.w * x).mean(), total)

    text = message(serial(loss), X)
    assert "the loss returned the weight" in text
    assert "for shard 0; expected a finite number >= 0" in text


def test_a_complex_loss_raises_what_pytorch_raises():
    def loss(model, x):
        return (model.w * x).mean() * 1j

    assert "only for real" in message(serial(loss), X, error=RuntimeError)


# The batch


def test_a_tensor_that_cannot_be_split_is_named():
    bad = {
        "batch[0]['x'] is on meta": {"x": X.to("meta"), "y": X},
        "batch[0]['y'] is torch.sparse_coo": {"x": X, "y": X.to_sparse()},
        "batch[0]['y'] requires a gradient": {"x": X, "y": X.clone().requires_grad_()},
        "batch[0][1] is a PackedSequence": (X, pack_sequence([X, X[:2]])),
        "batch[0][1] has 3 rows but batch[0][0] has 4": (X, X[:3]),
        "batch[0][0] has 0 rows": (X[:0], X[:0]),
    }
    for text, batch in bad.items():
        assert text in message(serial(product_mean), batch, error=instep.BatchError)


def test_a_tensor_with_gradient_may_be_evaluated():
    with serial(product_mean) as pool:
        assert pool.evaluate(X.clone().requires_grad_()).item() == 5.0


@both_engines
def test_a_loss_that_writes_to_its_batch_spoils_nothing(options):
    def loss(model, x):
        x += 1
        return (model.w * x).mean()

    x, model = X.clone(), Values(w=1.0)
    with GradientPool(model, loss, shards=2, **options) as pool:
        assert [pool.backward(x).item() for _ in range(2)] == [3.5, 3.5]
    assert torch.equal(x, X)


# The model


def test_a_model_that_cannot_be_followed_is_refused():
    norm, script = nn.utils.parametrizations.weight_norm, torch.jit.script
    bad = {
        "the model is a function; expected a torch.nn.Module": product_mean,
        "0.weight is lazy and has no shape yet": nn.Sequential(nn.LazyLinear(3)),
        "weight is on meta; instep computes on the CPU": nn.Linear(2, 2, device="meta"),
        "model.1 is parametrized": nn.Sequential(nn.ReLU(), norm(nn.Linear(2, 2))),
    }
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        bad["model.0 is a torch.jit.ScriptModule"] = nn.Sequential(script(nn.ReLU()))
    for text, model in bad.items():
        with pytest.raises((instep.ArgumentError, instep.ShipError)) as caught:
            serial(product_mean, model)
        assert text in str(caught.value)


def test_a_module_that_does_not_pickle_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[1].lock = threading.Lock()
    with pytest.raises(instep.ShipError, match=r"`model\.1\.lock`, a _thread.lock"):
        serial(product_mean, model)


def test_a_model_that_no_longer_pickles_is_refused_until_it_does():
    model = nn.Sequential(nn.Linear(1, 1))
    with serial(lambda m, x: m(x[:, None]).mean(), model) as pool:
        pool.backward(X)
        model[0] = nn.Linear(1, 1)
        model[0].lock = threading.Lock()
        for _ in range(2):
            with pytest.raises(instep.ShipError, match="lock"):
                pool.backward(X)
        del model[0].lock
        loss = pool.backward(X)
        torch.testing.assert_close(loss, model(X[:, None]).mean().detach())


@both_engines
def test_a_loss_that_writes_to_a_parameter_is_refused(options):
    def loss(model, rows):
        return model(rows).sum(-1).mean()

    model = nn.Embedding(5, 2, max_norm=0.1)
    with (
        GradientPool(model, loss, shards=2, **options) as pool,
        pytest.raises(instep.LossError, match="the parameter weight in place"),
    ):
        pool.backward(torch.arange(4))


temperature = nn.Parameter(torch.tensor(2.0))


@pytest.mark.parametrize("kind", ["closure", "global", "partial", "module", "method"])
def test_a_trainable_tensor_beside_the_model_is_named(kind):
    scale = nn.Linear(1, 1)

    def closure(model, x):
        return scale(x[:, None]).mean() * model.w

    def with_global(model, x):
        return model.w * x.mean() * temperature

    def partial(scale, model, x):
        return closure(model, x)

    class Criterion(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = scale

        def forward(self, model, x):
            return self.scale(x[:, None]).mean() * model.w

    loss, name = {
        "closure": (closure, "scale.weight, scale.bias"),
        "global": (with_global, "temperature"),
        "partial": (functools.partial(partial, scale), "argument 0.weight"),
        "module": (Criterion(), "scale.weight"),
        "method": (Criterion().forward, "scale.weight"),
    }[kind]
    text = message(serial(loss), X)
    assert name in text
    assert "is no parameter of the model" in text


@both_engines
def test_a_teacher_without_gradient_is_welcome(options):
    teacher = nn.Linear(1, 1)

    def loss(model, x):
        with torch.no_grad():
            target = teacher(x[:, None])[:, 0]
        return F.mse_loss(model.w * x, target)

    model = Values(w=2.0)
    with GradientPool(model, loss, shards=1, **options) as pool:
        assert pool.backward(X) == loss(model, X)


@both_engines
def test_an_error_in_the_loss_leaves_everything_as_it_was(options):
    def loss(model, x):
        value = model(x[:, None]).mean()
        if (x == 3).any():
            raise ValueError("bad row 3")
        return value

    model = nn.BatchNorm1d(1)
    with GradientPool(model, loss, shards=2, **options) as pool:
        with pytest.raises(ValueError, match="bad row 3") as caught:
            pool.backward(X)
        assert "shard 1 of 2" in str(caught.value.__cause__)
        assert "test_torch_errors.py" in str(caught.value.__cause__)
        assert model.weight.grad is None
        assert model.running_mean.item() == model.num_batches_tracked.item() == 0
        pool.backward(X[:2].repeat(2))
        assert model.num_batches_tracked.item() == 1
    with pytest.raises(instep.PoolClosedError):
        pool.backward(X)


def test_an_optimizer_of_other_parameters_is_refused_before_its_step():
    model, other = Values(w=2.0), Values(w=2.0)
    wrong = torch.optim.SGD(other.parameters(), 0.1)
    right = torch.optim.SGD(model.parameters(), 0.1)
    wrong.step()  # no pool has given a gradient: PyTorch's own affair
    with serial(product_mean, model) as pool:
        pool.backward(X)
        with pytest.raises(instep.ArgumentError, match="SGD has 1 parameters, none"):
            wrong.step()
        right.step()
        wrong.step()
        pool.backward(X)
        product_mean(other, X).backward()
        wrong.step()  # another network, trained beside
        other.zero_grad()
        wrong.step(lambda: product_mean(other, X).backward())  # its gradient is to come
    wrong.step()  # the pool is closed
