"""A PyTorch pool gives what `loss.backward()` gives on the whole batch."""

from __future__ import annotations

import random

import numpy as np
import pytest

import instep
from conftest import no_trace
from helpers import bits
from instep._seeding import shard_seed

torch = pytest.importorskip("torch")

from instep.torch import GradientPool  # noqa: E402
from torch_zoo import (  # noqa: E402
    Position,
    Values,
    batch_of,
    make_zoo,
    zoo_loss,
)

WORKERS = (1, 2, 3, 4, 7)
LEARNING = [
    "mlp",
    "convolutional",
    "channels last",
    "recurrent",
    "transformer",
    "mixed types",
    "sparse",
    "penalty",
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """The workers' number; another gives other bits in one process, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def _leaves_no_trace():
    """In place of the check after each test: the shared pools live longer."""
    yield from no_trace()


@pytest.fixture(scope="module")
def pools(_leaves_no_trace):
    """Pools of the zoo by engine, or number of workers, and number of shards."""
    keys = [("serial", s) for s in (1, 2, 3, 4, 5)]
    keys += [(1, 1), (2, 2), (2, 3), (4, 4)] + [(p, 5) for p in WORKERS]
    made = {
        (engine, shards): GradientPool(
            make_zoo(),
            zoo_loss,
            shards=shards,
            has_aux=True,
            **({"engine": engine} if engine == "serial" else {"workers": engine}),
        )
        for engine, shards in keys
    }
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture(params=["serial", "processes"])
def shared(request, pools):
    """The pool of this engine with so many shards, its gradients forgotten."""

    def choose(shards):
        workers = {1: 1, 2: 2, 3: 2, 4: 4, 5: 3}[shards]
        pool = pools["serial" if request.param == "serial" else workers, shards]
        pool._model.zero_grad()
        return pool

    return choose


def gradients(model):
    """The gradients by name; sparse ones as they are."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def content(tensor):
    """Type, shape, strides and bytes of a tensor; a sparse one's parts."""
    if tensor.is_sparse:
        return content(tensor._indices()), content(tensor._values()), tensor.shape
    raw = tensor.detach().contiguous().resolve_conj().flatten().view(torch.uint8)
    return tensor.dtype, tensor.shape, tensor.stride(), raw.numpy().tobytes()


def everything(model):
    """Gradients, parameters and buffers of a model, to the bit."""
    state = {name: content(tensor) for name, tensor in model.state_dict().items()}
    return state, {name: content(grad) for name, grad in gradients(model).items()}


def plain(part, *batch, seed=None):
    """A fresh zoo after `loss.backward()` in this process, and the loss."""
    zoo = make_zoo()
    if seed is not None:
        torch.manual_seed(seed)
    loss, _ = zoo_loss(zoo, part, *(x.clone() for x in batch))
    loss = loss.value if isinstance(loss, instep.Weighted) else loss
    loss.backward()
    return zoo, loss.detach()


def fresh(pool):
    """The pool, its model as it was in the beginning, at step 0."""
    pool._model.load_state_dict(make_zoo().state_dict())
    pool._model.zero_grad()
    pool._steps = 0  # the random numbers follow from it
    return pool


# One shard, and any number of workers


@pytest.mark.parametrize("part", LEARNING)
def test_one_shard_gives_the_bits_of_backward(shared, part):
    pool, batch = fresh(shared(1)), batch_of(part)
    loss, _ = pool.backward(part, *batch)
    # Dropout draws from a stream of the pool's own, seeded as the worker does it.
    zoo, expected = plain(part, *batch, seed=shard_seed(0, 0, 0) >> 1)
    assert content(loss) == content(expected)
    assert everything(pool._model) == everything(zoo)


@pytest.mark.parametrize("part", LEARNING)
def test_bits_do_not_depend_on_the_number_of_workers(pools, part):
    def result(pool):
        losses = [fresh(pool).backward(part, *batch_of(part))[0]]
        losses += [pool.backward(part, *batch_of(part))[0] for _ in range(2)]
        return list(map(content, losses)), everything(pool._model)

    expected = result(pools["serial", 5])
    assert len(expected[1][1]) == len(list(make_zoo()[part].parameters()))
    for workers in WORKERS:
        assert result(pools[workers, 5]) == expected


@pytest.mark.parametrize("part", ["mlp", "recurrent", "mixed types", "sparse"])
def test_five_uneven_shards_give_the_whole_batch_gradient(pools, part):
    pool = fresh(pools[2, 5])
    loss, _ = pool.backward(part, *batch_of(part))
    zoo, expected = plain(part, *batch_of(part))
    torch.testing.assert_close(loss, expected)
    for name, grad in gradients(zoo).items():
        ours = gradients(pool._model)[name]
        assert (ours.dtype, ours.layout) == (grad.dtype, grad.layout)
        # Halves are rounded to 8 or 11 bits in each of 53 additions of up to 1.
        near = {"atol": 5e-2, "rtol": 0} if grad.dtype.itemsize == 2 else {}
        torch.testing.assert_close(ours.to_dense(), grad.to_dense(), **near)


# Weights


def test_uneven_shards_give_the_whole_batch_gradient(shared):
    # The shards' means are 9, 26 and 42.5; their plain mean would be 25.8333.
    pool = shared(3)
    loss, _ = pool.backward("toy", torch.arange(1.0, 51.0))
    assert (loss.item(), pool._model["toy"].w.grad.item()) == (51.0, 25.5)
    assert pool.evaluate("toy", torch.arange(1.0, 51.0))[0].item() == 51.0


def test_shards_are_averaged_by_the_rows_that_count(shared):
    x = torch.arange(1.0, 7.0)[:, None]
    y = torch.tensor([0, -100, -100, 1, 1, 0])  # one and three rows count
    pool = shared(2)
    loss, _ = pool.backward("valid", x, y)
    zoo, expected = plain("valid", x, y)
    torch.testing.assert_close(loss, expected)
    ours = pool._model["valid"].w.grad
    torch.testing.assert_close(ours, zoo["valid"].w.grad)
    np.testing.assert_allclose(ours, [[1.8705, -1.8705]], atol=5e-5)


def test_shards_are_averaged_by_the_weight_that_the_loss_returns(shared):
    pool = shared(4)
    sums, counts = torch.tensor([5.0, 7, 6, 10]), torch.tensor([5.0, 1, 3, 1])
    pool.backward("tokens", sums, counts)
    assert pool._model["tokens"].w.grad.item() == pytest.approx(28 / 10, rel=1e-6)


def test_a_shard_of_weight_zero_counts_for_nothing(shared):
    pool = shared(2)
    sums, counts = torch.tensor([0.0, 0, 6, 10]), torch.tensor([0.0, 0, 3, 1])
    loss, _ = pool.backward("tokens", sums, counts)  # the first shard's mean is 0/0
    assert (loss.item(), pool._model["tokens"].w.grad.item()) == (4.0, 4.0)


@pytest.mark.parametrize("options", [{"engine": "serial"}, {"workers": 2}])
def test_a_sum_is_added_over_shards_and_over_rounds(options):
    def squares(model, x, total):
        return (x * model.w).square().sum() / total

    model = Values(w=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    x = torch.tensor([-1.0, 2.0, -3.0, 4.0])
    with GradientPool(model, squares, shards=2, reduction="sum", **options) as pool:
        assert pool.backward(x, 1.0).item() == 30.0
        assert model.w.grad.item() == 60.0
        optimizer.step()
        assert model.w.item() == pytest.approx(0.94)
        optimizer.zero_grad()
        model.w.data.fill_(1.0)
        # A mean over 10 tokens in two rounds of two shards each: 28 / 10.
        for sums in ([5.0, 7.0], [6.0, 10.0]):
            pool.backward(torch.tensor(sums).sqrt() / 2**0.5, 10.0)
        assert model.w.grad.item() == pytest.approx(2.8)


def test_a_regulariser_counts_once(shared):
    pool = shared(4)
    pool.backward("regularised", torch.arange(1.0, 9.0))
    expected = 2 * (2 - 3) * 25.5 + 0.1 * 2 * 2  # 25.5 is the mean of the squares
    assert pool._model["regularised"].w.grad.item() == pytest.approx(expected)


def test_the_loss_never_sees_an_empty_shard(shared):
    pool = shared(4)
    loss, _ = pool.backward("toy", torch.tensor([1.0, 3.0]))
    assert (loss.item(), pool._model["toy"].w.grad.item()) == (4.0, 2.0)


def test_a_number_as_aux_is_averaged_by_rows(shared):
    predicted = torch.repeat_interleave(torch.tensor([0, 1]), torch.tensor([20, 19]))
    _, accuracy = shared(2).backward("accuracy", predicted, torch.zeros(39))
    assert isinstance(accuracy, torch.Tensor)
    assert accuracy.item() == pytest.approx(20 / 39, rel=1e-7)


# Which gradients, which types


def test_a_gradient_missing_in_some_shards_counts_as_zero_there(shared):
    pool, x = shared(2), torch.arange(1.0, 5.0)
    pool.backward("missing", x, torch.tensor([0, 0, 1, 1]))
    model = pool._model["missing"]
    assert (model.a.grad.item(), model.b.grad.item()) == (0.75, 1.75)
    assert model.c.grad is None


def test_a_parameter_without_gradient_is_not_decayed(shared):
    pool = fresh(shared(2))
    model = pool._model["missing"]
    options = {"lr": 1.0, "weight_decay": 0.1, "momentum": 0.9}
    optimizer = torch.optim.SGD(model.parameters(), **options)
    for _ in range(2):
        pool.backward("missing", torch.ones(4), torch.tensor([0, 0, 1, 1]))
        optimizer.step()
    assert model.c.grad is None
    assert model.c.item() == 1.0


def test_a_constant_shard_has_a_gradient_of_zero(shared):
    pool = fresh(shared(2))
    loss, _ = pool.backward("constant shard", torch.tensor([-1.0, -2.0, 3.0, 5.0]))
    assert (loss.item(), pool._model["constant shard"].w.grad.item()) == (2.0, 2.0)


def test_a_loss_without_gradient_raises_what_pytorch_raises(shared):
    x = -torch.ones(4)
    with pytest.raises(RuntimeError, match="does not require grad") as theirs:
        torch.zeros(()).backward()
    with pytest.raises(RuntimeError, match="does not require grad") as ours:
        shared(2).backward("constant shard", x)
    assert str(ours.value) == str(theirs.value)
    with pytest.raises(RuntimeError, match="does not require grad"), torch.no_grad():
        shared(2).backward("toy", x)


def test_freezing_and_unfreezing_hold_at_the_next_call(shared):
    pool, x = fresh(shared(2)), torch.tensor([[1.0], [2.0], [6.0]])
    linear = pool._model["linear"].requires_grad_(True)
    linear.bias.requires_grad_(False)
    pool.backward("linear", x)
    assert linear.bias.grad is None
    assert linear.weight.grad.item() == 3.0
    linear.bias.requires_grad_(True)
    pool.backward("linear", x)
    assert linear.bias.grad.item() == 1.0
    assert linear.weight.grad.item() == 6.0


def test_tied_weights_stay_tied(shared):
    pool = fresh(shared(2))
    pool.backward("tied", torch.tensor([[1.0], [3.0]]))
    model = pool._model["tied"]
    assert model.first.weight is model.second.weight
    assert model.first.weight.grad.item() == 12.0


def test_sparse_gradients_are_added_by_row(shared):
    pool = fresh(shared(2))
    for _ in range(2):  # the second time they have no slot from the start
        pool._model.zero_grad()
        pool.backward("sparse", torch.tensor([0, 1, 0, 2]))
        grad = pool._model["sparse"].weight.grad
        assert grad.is_sparse
        assert grad.to_dense()[:, 0].tolist() == [0.5, 0.25, 0.25, 0.0, 0.0]


def test_half_precision_neither_overflows_nor_stalls(shared):
    pool = shared(4)
    pool.backward("halves", torch.full((4,), 40000.0, dtype=torch.float16))
    assert pool._model["halves"].w.grad.item() == 40000.0
    with pool._trial(512, "mean", 0):
        pool.backward("brains", torch.ones(512, dtype=torch.bfloat16))
    grad = pool._model["brains"].w.grad
    assert (grad.dtype, grad.item()) == (torch.bfloat16, 1.0)


def test_every_gradient_has_the_precision_of_its_parameter(shared):
    pool, fine = shared(2), 1 + 2.0**-40
    pool.backward("doubles", torch.full((4,), fine, dtype=torch.float64))
    model = pool._model["doubles"]
    assert (model.low.grad.dtype, model.low.grad.item()) == (torch.float32, 1.0)
    assert (model.high.grad.dtype, model.high.grad.item()) == (torch.float64, fine)


def test_complex_gradients_follow_the_framework(shared):
    pool = shared(3)
    pool.backward("complex", torch.tensor([1.0, 2.0, 3.0]))
    assert pool._model["complex"].z.grad.item() == 4 + 8j


def test_shapes_without_and_with_axes_stay_as_they_are(shared):
    pool = fresh(shared(3))
    pool.backward("mixed types", torch.arange(1.0, 51.0)[:, None].expand(-1, 3))
    model = pool._model["mixed types"]
    assert (model.scalar.grad.shape, model.scalar.grad.item()) == ((), 25.5)
    assert model.nothing.grad.shape == (0,)
    assert model.one.grad.shape == (1,)


def test_a_transposed_parameter_has_its_gradient_in_order(shared):
    pool = fresh(shared(2))
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    pool.backward("product", x.expand(4, 3, 2))
    parameter = pool._model["product"].w
    assert parameter.grad.tolist() == x.tolist()
    assert parameter.stride() == parameter.grad.stride() == (1, 3)


def test_clipping_follows_the_average(shared):
    pool = fresh(shared(2))
    pool.backward("clipped", torch.tensor([[3.0, 4.0], [-3.0, 4.0]]))
    parameter = pool._model["clipped"].w
    norm = torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    assert norm.item() == 4.0
    assert parameter.grad.tolist() == pytest.approx([0.0, 1.0], rel=1e-5)


# Batches, random numbers, buffers


def fields(rows=5):
    return {
        "img": torch.arange(2.0 * rows).reshape(rows, 2),
        "txt": [f"text {k}" for k in range(rows)],
        "pos": Position(torch.arange(rows), np.arange(rows)),
        "temp": 0.1,
    }


def test_rows_of_all_fields_stay_together(shared):
    _, aux = shared(2).backward("fields", fields())
    assert aux["txt"] == fields()["txt"]
    assert torch.equal(aux["img"], fields()["img"])
    assert isinstance(aux["pos"], Position)
    assert aux["pos"].x.tolist() == aux["pos"].y.tolist() == list(range(5))
    assert (aux["temp"], aux["type"]) == (0.1, "float")
    assert (aux["rows"].item(), aux["kinds"]) == (5, "Tensor ndarray")


def test_a_field_of_another_length_is_named(shared):
    batch = {**fields(), "txt": ["a", "b", "c", "d"]}
    with pytest.raises(instep.BatchError, match=r"\['txt'\] has 4 rows"):
        shared(2).backward("fields", batch)


def test_running_statistics_are_averaged_by_rows_and_counters_count_once(shared):
    pool = fresh(shared(2))
    pool.backward("normalised", torch.tensor([0.0, 0, 0, 6, 6])[:, None])
    model = pool._model["normalised"]
    # The momentum is 0.1. A mean of shards would give 0.3. Each shard's variance is
    # 0, though that of the batch is 10.8: it would have given 1.98.
    assert model.running_mean.item() == pytest.approx(0.1 * (3 * 0 + 2 * 6) / 5)
    assert model.running_var.item() == pytest.approx(0.9)
    assert model.num_batches_tracked.item() == 1


def test_masks_differ_between_shards_and_steps(pools):
    def draw(pool):
        pool = fresh(pool)
        return [pool.backward("noise", torch.ones(5))[1] for _ in range(3)]

    expected = draw(pools["serial", 5])
    rows = [tuple(row.tolist()) for step in expected for row in step]
    assert len(set(rows)) == 15
    for workers in WORKERS:
        assert [x.tolist() for x in draw(pools[workers, 5])] == [
            x.tolist() for x in expected
        ]


def test_the_default_dtype_holds_in_the_workers(shared):
    pool, x = fresh(shared(2)), torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    _, kind = pool.backward("constants", x)
    assert kind == "torch.float32"
    pool._model.zero_grad()
    torch.set_default_dtype(torch.float64)
    try:
        _, kind = pool.backward("constants", x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert kind == "torch.float64"
    expected = (1 + 2 + 4) / 3 / 3
    assert pool._model["constants"].w.grad.item() == pytest.approx(expected, rel=1e-12)


# Determinism


def test_the_order_of_arrival_does_not_matter(pools):
    pool, x = pools[4, 4], torch.tensor([1e8, 1, -1e8, 1])
    found = []
    for _ in range(20):
        pool._model.zero_grad()
        pool.backward("sleepy", x)
        found.append(pool._model["sleepy"].w.grad.item())
    # float32 knows no 1e8 + 1, so each pair loses its 1: (5e7 - 5e7) / 2.
    assert found == [0.0] * 20


def test_a_scheduler_is_not_scaled_by_the_number_of_workers(pools):
    def train(pool):
        pool = fresh(pool)
        optimizer = torch.optim.SGD(pool._model["mlp"].parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        rates = []
        for _ in range(3):
            optimizer.zero_grad()
            pool.backward("mlp", *batch_of("mlp"))
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert rates == pytest.approx([0.1, 0.1, 0.01])
        return everything(pool._model)

    expected = train(pools["serial", 5])
    assert all(train(pools[workers, 5]) == expected for workers in WORKERS)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_is_returned(pools, bad):
    x = torch.tensor([1.0, 2.0, bad, 4.0])
    zoo, expected = plain("toy", x)
    for key in [("serial", 2), (2, 2), (4, 4), (1, 5), (3, 5)]:
        pool = fresh(pools[key])
        loss, _ = pool.backward("toy", x)
        assert str(loss.item()) == str(expected.item())
        grad = pool._model["toy"].w.grad
        assert str(grad.item()) == str(zoo["toy"].w.grad.item())


def test_the_scripts_own_random_numbers_stay_where_they_are(shared):
    pool = shared(2)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    pool.backward("noise", torch.ones(5))
    pool.evaluate("noise", torch.ones(5))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert bits(np.random.get_state()[1]) == bits(before[2])
