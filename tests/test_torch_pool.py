"""A PyTorch pool fits into a script: optimizers, hooks, flags, buffers, checkpoints."""

from __future__ import annotations

import copy
import functools
import gc
import hashlib
import io
import os
import signal
from pathlib import Path

import pytest

import instep
from helpers import run_python, write_script

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from instep.torch import GradientPool  # noqa: E402
from torch_zoo import Values, batch_of, convolutional, mlp  # noqa: E402

both_engines = pytest.mark.parametrize(
    "options", [{"engine": "serial"}, {"workers": 2}], ids=["serial", "processes"]
)
SERIAL = {"engine": "serial"}


@pytest.fixture(autouse=True)
def _one_thread():
    """The workers' number; another gives other bits in one process, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def mean_output(model, x):
    return model(x).mean()


def seeded(make, *arguments):
    """A model with the same values each time."""
    torch.manual_seed(0)
    return make(*arguments)


def values(model):
    """All bytes of the model's state."""
    return {k: (v.dtype, v.tolist()) for k, v in model.state_dict().items()}


def is_private(tensor):
    """Whether the tensor's memory is not shared with the workers."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < stop:
            return "memfd:instep" not in line
    return True


# The optimizer's step is the broadcast

OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, fused=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
}


def test_every_optimizer_trains_as_it_does_alone():
    x, y = batch_of("mlp")
    model = seeded(mlp)

    def train(make, backward, model):
        model.load_state_dict(seeded(mlp).state_dict())
        optimizer = make(model.parameters())

        def closure():
            optimizer.zero_grad()
            return backward()

        losses = [optimizer.step(closure).item() for _ in range(4)]
        return losses, values(model)

    def alone(model):
        loss = cross_entropy(model, x, y)
        loss.backward()
        return loss

    with GradientPool(model, cross_entropy, workers=1) as pool:
        for make in OPTIMIZERS.values():
            ours = train(make, lambda: pool.backward(x, y), model)
            other = seeded(mlp)
            assert ours == train(make, functools.partial(alone, other), other)
        assert not is_private(model[0].weight)


def test_sparse_adam_trains_as_it_does_alone():
    def embedded(model, rows):
        return model(rows).square().sum(-1).mean()

    rows = torch.tensor([0, 1, 0, 2, 4, 4, 1])
    ours, alone = (seeded(nn.Embedding, 6, 3, None) for _ in range(2))
    for model in (ours, alone):
        model.sparse = True
    with GradientPool(ours, embedded, shards=1, **SERIAL) as pool:
        for model in (ours, alone):
            optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                if model is ours:
                    pool.backward(rows)
                else:
                    embedded(model, rows).backward()
                optimizer.step()
    assert values(ours) == values(alone)


def write_in_place(model, other):
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        mine.data.copy_(its)


def replace_data(model, other):
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        mine.data = its.data


def replace_with_transposed(model, other):
    other[0].weight.data = other[0].weight.data.t().contiguous().t()
    replace_data(model, other)


def load(model, other):
    model.load_state_dict(other.state_dict())


def load_and_assign(model, other):
    model.load_state_dict(other.state_dict(), assign=True)


def set_from_vector(model, other):
    vector = nn.utils.parameters_to_vector(other.parameters())
    nn.utils.vector_to_parameters(vector, model.parameters())


def move_to_other_shared_memory(model, other):
    write_in_place(model, other)
    model.share_memory()


WAYS = [
    write_in_place,
    replace_data,
    load,
    load_and_assign,
    set_from_vector,
    move_to_other_shared_memory,
    replace_with_transposed,
]


@both_engines
def test_values_written_in_any_way_reach_the_workers(options):
    x, y = batch_of("mlp", 9)
    model = seeded(mlp)
    with GradientPool(model, cross_entropy, shards=1, **options) as pool:
        for k, write in enumerate(WAYS):
            torch.manual_seed(k)
            other = mlp()
            write(model, other)
            model.zero_grad()
            assert pool.backward(x, y) == cross_entropy(other, x, y)
            cross_entropy(other, x, y).backward()
            for mine, its in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(mine.grad, its.grad)
                torch.testing.assert_close(mine, its, rtol=0, atol=0)


@both_engines
def test_weights_tied_by_their_memory_alone_stay_tied(options):
    def product(model, x):
        return (model.a * model.b * x).mean()

    model = Values(a=2.0, b=0.0)
    model.b.data = model.a.data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with GradientPool(model, product, shards=2, **options) as pool:
        pool.backward(torch.ones(3))
        assert (model.a.grad.item(), model.b.grad.item()) == (2.0, 2.0)
        optimizer.step()
        assert model.a.item() == model.b.item() == 2.0 - 2 * 0.25 * 2.0
        assert pool.evaluate(torch.ones(3)).item() == 1.0


@both_engines
def test_two_pools_may_share_a_model(options):
    model, x = Values(w=1.0), torch.arange(3.0)

    def product(model, x):
        return (model.w * x).mean()

    def square(model, x):
        return (model.w * x).square().mean()

    with (
        GradientPool(model, product, shards=2, **options) as first,
        GradientPool(model, square, shards=2, **options) as second,
    ):
        for k in range(1, 4):
            model.w.data.fill_(float(k))
            model.w.grad = None
            assert first.backward(x).item() == pytest.approx(k)
            assert second.backward(x).item() == pytest.approx(k * k * 5 / 3)
            assert model.w.grad.item() == pytest.approx(1 + 2 * k * 5 / 3)
    assert is_private(model.w)


def replace_a_layer(model):
    model[2] = nn.Linear(16, 5)


def replace_an_activation(model):
    model[1] = nn.ReLU()


def add_a_layer(model):
    model.append(nn.Linear(5, 3))


def add_a_buffer(model):
    model.register_buffer("extra", torch.ones(2))


def widen(model):
    model.double()


def tie(model):
    model.append(nn.Linear(3, 3).double())
    model.append(nn.Linear(3, 3).double())
    model[-1].weight = model[-2].weight


def test_a_model_that_is_rebuilt_is_followed():
    x, y = batch_of("mlp", 9)
    model = seeded(mlp)
    with GradientPool(model, cross_entropy, workers=2) as pool:
        for change in (replace_a_layer, replace_an_activation, add_a_layer, widen, tie):
            pool.backward(x, y)
            model.zero_grad()
            change(model)
            add_a_buffer(model)
            x = x.to(model[0].weight.dtype)
            loss = pool.backward(x, y)
            other = copy.deepcopy(model)
            other.zero_grad()
            expected = cross_entropy(other, x, y)
            expected.backward()
            torch.testing.assert_close(loss, expected.detach())
            for mine, its in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, its.grad)


def test_a_model_that_has_left_the_cpu_is_refused():
    x, y = batch_of("mlp", 9)
    model = seeded(mlp)
    with GradientPool(model, cross_entropy, **SERIAL) as pool:
        pool.backward(x, y)
        kept = copy.deepcopy(model.state_dict())
        model.to("meta")
        with pytest.raises(instep.ArgumentError, match=r"0\.weight is on meta"):
            pool.backward(x, y)
        model.to_empty(device="cpu")
        model.load_state_dict(kept)
        assert pool.evaluate(x, y) == cross_entropy(model, x, y)


@pytest.mark.parametrize("end", ["close", "collect"])
def test_parameters_move_back_to_private_memory(end):
    x, y = batch_of("convolutional", 9)
    model = seeded(convolutional)
    model.empty = nn.Parameter(torch.zeros(0))
    pool = GradientPool(model, cross_entropy, workers=2)
    pool.backward(x, y)
    expected = values(model)
    assert not is_private(model[0].weight)
    if end == "close":
        pool.close()
        pool.close()
    del pool
    gc.collect()
    assert all(map(is_private, model.parameters()))
    assert values(model) == expected
    assert "memfd:instep" not in Path("/proc/self/maps").read_text()
    cross_entropy(model, x, y).backward()


def test_checkpoints_and_copies_are_as_small_as_the_model():
    model = seeded(mlp)
    with GradientPool(model, cross_entropy, workers=1) as pool:
        pool.backward(*batch_of("mlp", 9))
        file, alone = io.BytesIO(), io.BytesIO()
        torch.save(model.state_dict(), file)
        torch.save(seeded(mlp).state_dict(), alone)
        assert file.tell() == alone.tell()
        copied = copy.deepcopy(model)
        assert all(map(is_private, copied.parameters()))
        assert values(copied) == values(model)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        assert values(averaged.module) == values(model)


# .grad


def test_gradients_that_are_held_are_not_overwritten():
    model = Values(w=torch.ones(400_000))  # large: the workers average

    def scaled(model, x):
        return (model.w.sum() * x).mean()

    with GradientPool(model, scaled, workers=2) as pool:
        held = []
        for k in range(1, 5):
            model.w.grad = None
            pool.backward(torch.full((3,), float(k)))
            held.append(model.w.grad)
    assert [set(grad.tolist()) for grad in held] == [{1.0}, {2.0}, {3.0}, {4.0}]


@both_engines
def test_a_gradient_that_is_there_is_added_to_in_place(options):
    model = Values(w=torch.zeros(3), unused=1.0)
    preset = model.w.grad = torch.tensor([10.0, 20.0, 30.0])

    def product(model, x):
        return (x @ model.w).mean()

    with GradientPool(model, product, shards=2, **options) as pool:
        for _ in range(3):
            pool.backward(torch.tensor([[1.0, 2, 3], [3, 2, 1], [2, 2, 2]]))
        assert model.w.grad is preset
        assert preset.tolist() == [16.0, 26.0, 36.0]
        assert model.unused.grad is None
        model.zero_grad(set_to_none=False)
        pool.backward(torch.ones(2, 3))
        assert model.w.grad is preset
        assert preset.tolist() == [1.0, 1.0, 1.0]


def test_hooks_run_once_on_the_averaged_gradient():
    model, seen = Values(w=2.0, v=1.0), []
    model.w.register_hook(lambda grad: seen.append(("hook", grad.item())))
    model.w.register_hook(lambda grad: grad * 10)
    model.w.register_post_accumulate_grad_hook(
        lambda parameter: seen.append(("after", parameter.grad.item()))
    )

    def product(model, x):
        return (model.w * x).mean()

    with GradientPool(model, product, workers=2, shards=3) as pool:
        pool.backward(torch.arange(1.0, 51.0))
        pool.evaluate(torch.arange(1.0, 51.0))
    assert seen == [("hook", 25.5), ("after", 255.0)]


def test_an_optimizer_may_step_in_the_backward_pass():
    model = Values(w=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(parameter):
        optimizer.step()
        optimizer.zero_grad()

    model.w.register_post_accumulate_grad_hook(step)
    with GradientPool(model, lambda m, x: (m.w * x).mean(), **SERIAL) as pool:
        pool.backward(torch.ones(4))
    assert model.w.item() == pytest.approx(1.9)
    assert model.w.grad is None


@both_engines
def test_forward_hooks_run_in_the_workers(options):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    with GradientPool(model, mean_output, shards=2, **options) as pool:
        assert pool.backward(torch.tensor([[1.0], [3.0]])).item() == 6.0
    assert model.weight.grad.item() == 6.0


# Evaluation, modes and flags


@both_engines
def test_evaluation_computes_no_gradient_and_changes_nothing(options):
    model, (x, y) = seeded(convolutional), batch_of("convolutional", 10)
    with GradientPool(model, cross_entropy, shards=2, **options) as pool:
        before = values(model)
        first = pool.evaluate(x, y)
        assert pool.evaluate(x, y) == first  # in training mode, the same masks
        assert pool.statistics().steps == 0
        assert values(model) == before
        assert model[0].weight.grad is None
        model.eval()
        with torch.no_grad():
            expected = cross_entropy(model, x, y)
        torch.testing.assert_close(pool.evaluate(x, y), expected)
        torch.testing.assert_close(pool.backward(x, y), expected)
        assert values(model) == before
        model.train()
        pool.backward(x, y)
        assert model[1].num_batches_tracked.item() == 1
        with torch.no_grad(), pytest.raises(RuntimeError, match="does not require"):
            pool.backward(x, y)


@both_engines
def test_the_first_call_may_be_in_inference_mode(options):
    model, (x, y) = seeded(mlp), batch_of("mlp", 9)
    with GradientPool(model, cross_entropy, shards=1, **options) as pool:
        with torch.inference_mode():
            value = pool.evaluate(x, y)
        assert value == cross_entropy(model, x, y)
        pool.backward(x, y)
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@both_engines
def test_flags_of_the_library_hold_in_the_workers(options):
    def flags(model, x):
        return model.w * x.mean(), (
            torch.get_deterministic_debug_mode(),
            torch.is_anomaly_enabled(),
            torch.get_float32_matmul_precision(),
            torch.is_autocast_enabled("cpu"),
            str(torch.get_default_dtype()),
            model.training,
        )

    model = Values(w=1.0)
    with GradientPool(model, flags, has_aux=True, **options) as pool:
        usual = (0, False, "highest", False, "torch.float32", True)
        assert pool.backward(torch.ones(3))[1] == usual
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.set_float32_matmul_precision("high")
            torch.set_default_dtype(torch.float64)
            model.eval()
            with torch.autograd.set_detect_anomaly(True), torch.autocast("cpu"):
                found = pool.backward(torch.ones(3))[1]
        finally:
            torch.use_deterministic_algorithms(False)
            torch.set_float32_matmul_precision("highest")
            torch.set_default_dtype(torch.float32)
            model.train()
        assert found == (1, True, "high", True, "torch.float64", False)
        assert pool.backward(torch.ones(3))[1] == usual
        assert torch.get_deterministic_debug_mode() == 0


@both_engines
def test_autocast_gives_the_bits_of_autocast(options):
    model, alone, (x, y) = seeded(mlp), seeded(mlp), batch_of("mlp")
    with GradientPool(model, cross_entropy, shards=1, **options) as pool:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = pool.backward(x, y)
                expected = cross_entropy(alone, x, y)
            expected.backward()
            assert loss == expected
            for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
                assert torch.equal(mine.grad, its.grad)
                mine.data -= mine.grad  # a cached cast of the old value would show
                its.data -= its.grad
        assert pool.backward(x, y) != expected


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_computed_again(reentrant):
    def checkpointed(model, x, y):
        x.requires_grad_()
        hidden = torch.utils.checkpoint.checkpoint(
            model[:2], x, use_reentrant=reentrant
        )
        return F.cross_entropy(model[2](hidden), y)

    model, alone, (x, y) = seeded(mlp), seeded(mlp), batch_of("mlp")
    with GradientPool(model, checkpointed, shards=1, **SERIAL) as pool:
        pool.backward(x, y)
    cross_entropy(alone, x, y).backward()
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)


@both_engines
@pytest.mark.filterwarnings("default")  # of the compiler's own imports
def test_a_compiled_module_computes_the_same(options):
    model, alone, (x, y) = seeded(mlp), seeded(mlp), batch_of("mlp")
    compiled = torch.compile(model, backend="eager")
    with GradientPool(compiled, cross_entropy, shards=1, **options) as pool:
        for _ in range(2):
            loss = pool.backward(x, y)
    expected = cross_entropy(alone, x, y)
    expected.backward()
    assert loss == expected
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad, 2 * its.grad)


def test_check_tells_what_may_be_sharded_and_changes_nothing():
    x, y = batch_of("mlp", 12)
    model = seeded(mlp)
    with GradientPool(model, cross_entropy, shards=2, **SERIAL) as pool:
        assert pool.check(x, y).ok
        assert pool.statistics().steps == 0
    model.insert(1, nn.BatchNorm1d(16))
    before = values(model)
    with GradientPool(model, cross_entropy, shards=2, **SERIAL) as pool:
        report = pool.check(x, y)
    assert "batch statistics" in str(report)
    assert {f.name for f in report.findings} >= {"0.weight", "1.weight", "loss"}
    assert values(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())


# Aux


@both_engines
def test_aux_comes_back_as_what_it_was(options):
    def loss(model, x):
        aux = {
            "rows": x * 10,
            "mean": x.mean(),
            "count": instep.Sum(torch.tensor(len(x))),
            "ends": instep.Mean(torch.stack([x.min(), x.max()])),
            "texts": [str(v) for v in x.tolist()],
            "pair": [x.max(), x.min()],
            "number": float(x.sum()),
            "half": x.bfloat16(),
            "nothing": None,
            "nested": (torch.ones(len(x), 2, requires_grad=True) * model.w, "unit"),
        }
        return model.w * x.mean(), aux

    with GradientPool(Values(w=1.0), loss, shards=2, has_aux=True, **options) as pool:
        x = torch.arange(4.0)
        _, aux = pool.backward(x)
        assert pool.evaluate(x)[1].keys() == aux.keys()
    assert aux["rows"].tolist() == [0.0, 10.0, 20.0, 30.0]
    assert (aux["mean"].item(), aux["count"].item()) == (1.5, 4)
    assert aux["ends"].tolist() == [1.0, 2.0]  # of 0, 2 and of 1, 3
    assert aux["texts"] == ["0.0", "1.0", "2.0", "3.0"]
    assert [v.item() for v in aux["pair"]] == [1.0, 0.0, 3.0, 2.0]  # a list of rows
    assert aux["number"] == (1.0 + 5.0) / 2
    assert aux["half"].dtype is torch.bfloat16
    assert aux["nothing"] is None
    assert torch.equal(aux["nested"][0], torch.ones(4, 2))
    assert aux["nested"][1] == "unit"


# Buffers


class Counting(nn.Module):
    """Buffers of every kind; only shards with a positive row touch them."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.register_buffer("in_place", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("low", torch.zeros((), dtype=torch.bfloat16))
        self.register_buffer("constant", torch.arange(3.0))
        self.register_buffer("cache", None)
        self.register_buffer("adjacency", torch.eye(2).to_sparse())
        self.twin = nn.Module()
        self.twin.register_buffer("shared", self.in_place)

    def forward(self, x):
        if (x > 0).any():
            with torch.no_grad():
                self.in_place += x.mean()
                self.replaced = self.replaced + x.mean()
                self.count += 1
                self.low.copy_(x.mean())
                self.cache = torch.full((3,), 7.0)
        return self.w * x.mean() * self.adjacency.to_dense().sum() / 2


@both_engines
def test_buffers_are_averaged_and_counters_counted_once(options):
    model = Counting()
    in_place = model.in_place
    with GradientPool(model, mean_output, shards=2, **options) as pool:
        for step in (1, 2):
            pool.backward(torch.tensor([-1.0, -1.0, -1.0, 5.0, 5.0]))
            # The first shard leaves them alone: it counts with the old value.
            mean = step * 5.0 * 2 / 5
            assert model.in_place.tolist() == pytest.approx([mean, mean])
            assert model.replaced.item() == pytest.approx(mean)
            assert model.count.item() == step
            if step == 1:
                assert model.low.item() == 2.0
                model.cache = None  # the next test's
        assert model.in_place is in_place is model.twin.shared
        assert model.low.dtype is torch.bfloat16
        assert model.constant.tolist() == [0.0, 1.0, 2.0]
        model.count += 10  # a change of the script's own holds
        pool.backward(torch.ones(4))
        assert model.count.item() == 13
        pids = set(pool.statistics().pids)
        model.replaced = torch.full((), 100.0)
        pool.backward(torch.ones(4))
        assert model.replaced.item() == 101.0
        assert pids <= set(pool.statistics().pids)  # the other may just have started


def test_a_buffer_of_different_shapes_is_an_error():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))
            self.register_buffer("seen", torch.zeros(0))

        def forward(self, x):
            self.seen = torch.cat([self.seen, x.detach()])
            return self.w * x

    with (
        GradientPool(Remembers(), mean_output, shards=2, **SERIAL) as pool,
        pytest.raises(
            instep.LossError,
            match=r"'seen' of a Remembers has the shapes \[\(3,\), \(2,\)\]",
        ),
    ):
        pool.backward(torch.ones(5))
    model = Remembers()
    with GradientPool(model, mean_output, shards=1, **SERIAL) as pool:
        for _ in range(2):
            pool.backward(torch.ones(5))
    assert model.seen.tolist() == [1.0] * 10


# Training


def digits_digest(epochs, kill_at=None, **options):
    """SHA-256 of the parameters after training with all that training has."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images[:896]).float() / 16  # 7 batches of 128
    labels = torch.from_numpy(labels)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(32, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    draw, step = torch.Generator().manual_seed(0), 0
    with GradientPool(model, cross_entropy, shards=4, **options) as pool:
        for _ in range(epochs):
            for rows in torch.randperm(len(images), generator=draw).split(128):
                if step == kill_at:
                    os.kill(pool.statistics().pids[0], signal.SIGKILL)
                step += 1
                optimizer.zero_grad()
                pool.backward(images[rows], labels[rows])
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            scheduler.step()
        lost = pool.statistics().workers_lost
    assert lost == (kill_at is not None)
    raw = [tensor.numpy().tobytes() for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(raw)).hexdigest()


@pytest.mark.guard(120)
def test_training_has_the_same_digest_for_any_number_of_workers():
    expected = digits_digest(3, engine="serial")
    assert [digits_digest(3, workers=workers) for workers in (1, 2, 3, 4)] == [
        expected
    ] * 4
    assert digits_digest(3, kill_at=20, workers=2) == expected


def test_a_data_loader_with_workers_feeds_the_pool():
    x, y = batch_of("mlp", 40)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=10, num_workers=2
    )
    model = seeded(mlp)
    with GradientPool(model, cross_entropy, workers=2) as pool:
        for _ in range(2):
            losses = [pool.backward(*batch) for batch in loader]
        assert len(losses) == 4
        assert pool.statistics().workers_lost == 0


SCRIPT = """
import torch
from torch import nn
import instep

class Double(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return 2 * x

    @staticmethod
    def backward(context, grad):
        return 3 * grad  # not the true one: it shows who was asked

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.layer.weight, 1.0)

    def forward(self, x):
        return Double.apply(self.layer(x))

def loss(model, x):
    return model(x).mean()

model = Model()
pool = instep.torch.GradientPool(model, loss, workers=2)
value = pool.backward(torch.tensor([[1.0], [3.0]]))
print(value.item(), model.layer.weight.grad.item())
"""


def test_a_script_may_define_everything_itself(tmp_path):
    result = run_python(write_script(tmp_path, SCRIPT))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == ["4.0", "6.0"]
