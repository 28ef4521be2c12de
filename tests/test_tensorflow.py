"""A TensorFlow 2 pool returns what a gradient tape returns on the whole batch."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple

import numpy as np
import pytest

import instep
from helpers import bits, both_engines

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from instep.tensorflow import GradientPool  # noqa: E402

pytestmark = pytest.mark.usefixtures("workers_with_only_tensorflow")
SERIAL = {"engine": "serial"}


def toy(variables, x):
    return tf.reduce_mean(variables[0] * x)


def squares(model, x):
    return tf.reduce_mean(model(x, training=True) ** 2)


def taped(loss, model, *batch, signature=None):
    """Loss and gradients of one process, in a tf.function."""
    variables = [getattr(v, "_value", v) for v in model.trainable_variables]

    def body(*tensors):
        with tf.GradientTape() as tape:
            value = loss(model, *tensors)
        return value, tape.gradient(value, variables)

    tensors = [tf.convert_to_tensor(array) for array in batch]
    return tf.function(body, input_signature=signature)(*tensors)


def network(hidden=list, inputs=3):
    """A model with the layers that `hidden` makes, the same each time."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([*hidden(), keras.layers.Dense(1)])
    model.build((None, inputs))
    return model


def rows(number, columns=3):
    draw = np.random.default_rng(1)
    return draw.normal(size=(number, columns)).astype(np.float32)


def numbers(result):
    """The result as arrays, for comparison."""
    return tf.nest.map_structure(np.asarray, result)


@both_engines
@pytest.mark.guard(120)
def test_uneven_shards_give_the_whole_batch_gradient(engine):
    # The shards' means are 9, 26 and 42.5; their plain mean would be 25.8333.
    options = {"workers": 2, "shards": 3, "engine": engine}
    with GradientPool([tf.Variable(2.0)], toy, **options) as pool:
        loss, grads = pool.gradient(tf.range(1.0, 51.0))
        assert (loss.numpy(), grads[0].numpy()) == (51.0, 25.5)
        assert pool.evaluate(np.arange(1, 51, dtype=np.float32)).numpy() == 51.0


@pytest.mark.guard(180)
def test_bits_do_not_depend_on_the_number_of_workers():
    x = rows(30)

    def hidden():
        yield keras.layers.Dense(4, "tanh")
        yield keras.layers.BatchNormalization()
        yield keras.layers.Dropout(0.5, seed=3)

    model = network(hidden)
    start = [v.numpy() for v in model.variables]

    def result(pool):
        """Of three steps from the start."""
        pool.load_state_dict({**pool.state_dict(), "steps": 0})
        for variable, value in zip(model.variables, start, strict=True):
            variable.assign(value)
        got = [numbers(pool.gradient(x)) for _ in range(3)]
        return bits([got, [v.numpy() for v in model.variables]])

    with GradientPool(model, squares, shards=4, **SERIAL) as pool:
        expected = result(pool)
    # One pool: each would import TensorFlow anew.
    with GradientPool(model, squares, shards=4, workers=7) as pool:
        for workers in (7, 1, 2, 3, 4):
            pool.resize(workers)
            assert result(pool) == expected
            assert len(pool.statistics().pids) <= workers


@pytest.mark.parametrize("name", ["dense", "dropout", "convolution", "normalisation"])
def test_one_shard_gives_the_bits_of_a_gradient_tape(name):
    layers = {
        "dense": lambda: [keras.layers.Dense(8, "relu")],
        "dropout": lambda: [
            keras.layers.Dense(8, "tanh"),
            keras.layers.Dropout(0.5, seed=1),
        ],
        "convolution": lambda: [
            keras.layers.Reshape((3, 1)),
            keras.layers.Conv1D(4, 2, activation="relu"),
            keras.layers.Flatten(),
        ],
        "normalisation": lambda: [keras.layers.BatchNormalization()],
    }[name]
    model, x = network(layers), rows(10)
    before = [v.numpy() for v in model.variables]
    with GradientPool(model, squares, shards=1, **SERIAL) as pool:
        ours = numbers(pool.gradient(x))
    after = [v.numpy() for v in model.variables]
    for variable, value in zip(model.variables, before, strict=True):
        variable.assign(value)
    # TensorFlow gives batch normalisation other bits where the number of rows is
    # fixed in the trace; a pool leaves it open.
    signature = [tf.TensorSpec([None, 3])]
    theirs = numbers(taped(squares, model, x, signature=signature))
    assert bits(ours) == bits(theirs)
    assert bits(after) == bits([v.numpy() for v in model.variables])


def test_four_shards_train_like_one_process():
    x = np.linspace(-2, 2, 50, dtype=np.float32)[:, None]

    def loss(model, x, y):
        return tf.reduce_mean((model(x) - y) ** 2)

    def train(gradient_of):
        model = network(lambda: [keras.layers.Dense(5, "tanh")], inputs=1)
        optimizer = keras.optimizers.SGD(0.01)
        with GradientPool(model, loss, shards=4, **SERIAL) as pool:
            for _ in range(500):
                grads = gradient_of(pool, model)
                optimizer.apply_gradients(
                    zip(grads, model.trainable_variables, strict=True)
                )
        return [v.numpy() for v in model.trainable_variables]

    model_function = {}

    def alone(pool, model):
        if model not in model_function:
            variables = [v._value for v in model.trainable_variables]

            @tf.function
            def body(x, y):
                with tf.GradientTape() as tape:
                    value = loss(model, x, y)
                return tape.gradient(value, variables)

            model_function[model] = body
        return model_function[model](x, x**2)

    pooled = train(lambda pool, model: pool.gradient(x, x**2)[1])
    for ours, theirs in zip(pooled, train(alone), strict=True):
        # Rounding of 500 steps; each step's gradient differs in the last bits.
        np.testing.assert_allclose(ours, theirs, rtol=2.5e-5)


def test_a_regulariser_counts_once():
    model = keras.Sequential(
        [
            keras.layers.Dense(
                1, use_bias=False, kernel_regularizer=keras.regularizers.L2(0.1)
            )
        ]
    )
    model.build((None, 1))
    model.layers[0].kernel.assign([[2.0]])

    def loss(model, x, y):
        return tf.reduce_mean((model(x) - y) ** 2) + sum(model.losses)

    x = np.arange(1, 9, dtype=np.float32)[:, None]
    with GradientPool(model, loss, shards=4, **SERIAL) as pool:
        _, (gradient,) = pool.gradient(x, 3 * x)
    # d/dw of mean((w - 3)^2 x^2) + 0.1 w^2 at w = 2: -2 * 25.5 + 0.4
    np.testing.assert_allclose(gradient, [[-50.6]], rtol=1e-6)


def test_a_sum_is_added_over_shards():
    w = tf.Variable(1.0)

    def loss(variables, x):
        return tf.reduce_sum((x * variables[0]) ** 2)

    with GradientPool([w], loss, shards=2, reduction="sum", **SERIAL) as pool:
        value, (gradient,) = pool.gradient(np.float32([-1, 2, -3, 4]))
    assert (value.numpy(), gradient.numpy()) == (30, 60)


def test_a_weighted_loss_is_the_mean_over_all_weights():
    def loss(variables, x, mask):
        total = tf.reduce_sum(mask)
        return instep.Weighted(tf.reduce_sum(variables[0] * x * mask) / total, total)

    x, mask = np.float32([1, 2, 3, 4, 5, 6]), np.float32([1, 0, 1, 1, 0, 0])
    with GradientPool([tf.Variable(1.0)], loss, shards=3, **SERIAL) as pool:
        value, (gradient,) = pool.gradient(x, mask)
    assert value.numpy() == gradient.numpy() == np.float32(8 / 3)


def test_none_and_zero_gradients_come_back_as_from_a_tape():
    a, b, unused = tf.Variable(1.0), tf.Variable(1.0), tf.Variable(1.0)

    def loss(variables, x, first):
        a, b, _ = variables
        return tf.reduce_mean(tf.where(first, a * x, b * x))

    first = np.array([True, True, False, False])
    with GradientPool([a, b, unused], loss, shards=2, **SERIAL) as pool:
        _, grads = pool.gradient(np.float32([1, 2, 3, 4]), first)
    assert [grads[0].numpy(), grads[1].numpy(), grads[2]] == [0.75, 1.75, None]


def test_indexed_slices_stay_sparse_and_add_up_to_the_mean():
    def loss(variables, i):
        return tf.reduce_mean(tf.reduce_sum(tf.gather(variables[0], i), 1))

    table = tf.Variable(tf.zeros([5, 2]))
    with GradientPool([table], loss, shards=2, **SERIAL) as pool:
        _, (gradient,) = pool.gradient(np.array([0, 1, 0, 2]))
    assert isinstance(gradient, tf.IndexedSlices)
    dense = tf.convert_to_tensor(gradient).numpy()
    assert dense[:, 0].tolist() == [0.5, 0.25, 0.25, 0, 0]


def test_a_weightless_shard_with_nan_leaves_sparse_gradients_clean():
    def loss(variables, i, mask):
        total = tf.reduce_sum(mask)
        values = tf.gather(variables[0], i) * mask
        return instep.Weighted(tf.reduce_sum(values) / total, total)

    with GradientPool([tf.Variable([1.0, 1.0])], loss, shards=2, **SERIAL) as pool:
        _, (gradient,) = pool.gradient(np.array([0, 1]), np.float32([1, 0]))
    assert tf.convert_to_tensor(gradient).numpy().tolist() == [1, 0]


def test_complex_variables_follow_tensorflows_convention():
    def loss(variables, x):
        return tf.reduce_mean(tf.abs(variables[0]) ** 2 * x)

    with GradientPool([tf.Variable(1 + 2j)], loss, shards=2, **SERIAL) as pool:
        _, (gradient,) = pool.gradient(np.array([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(gradient, 4 + 8j, rtol=1e-15)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3)])
def test_shapes_and_dtypes_come_back_as_they_were(dtype, shape):
    def loss(variables, x):
        return tf.reduce_mean(x) * tf.reduce_sum(variables[0])

    w, x = tf.Variable(tf.ones(shape, dtype)), tf.constant([1.0, 2.0, 6.0], dtype)
    with GradientPool([w], loss, shards=2, **SERIAL) as pool:
        _, (gradient,) = pool.gradient(x)
    assert (gradient.dtype, gradient.shape) == (dtype, shape)
    assert bits(gradient.numpy()) == bits(np.full(shape, 3, dtype.as_numpy_dtype))


Pair = namedtuple("Pair", "left right")


def test_a_batch_is_any_tree_and_aux_too():
    def loss(variables, batch, scale):
        image, text = batch["image"], batch["text"]
        value = tf.reduce_mean(variables[0] * image) * scale
        long = tf.strings.length(text) > 2
        return value, {
            "right": tf.reduce_mean(tf.cast(batch["pair"].left == 1, tf.float32)),
            "means": instep.Mean(tf.reduce_mean(tf.cast(batch["pair"], "float32"), 1)),
            "pair": Pair(
                image[:, 0], instep.Sum(tf.reduce_sum(tf.cast(long, "int32")))
            ),
        }

    batch = {
        "image": rows(5, 2),
        "text": ["a", "bbb", "c", "dddd", "e"],
        "pair": Pair(np.array([1, 1, 1, 0, 0]), np.arange(5)),
    }
    options = {"shards": 2, "has_aux": True, **SERIAL}
    with GradientPool([tf.Variable(1.0)], loss, **options) as pool:
        (value, aux), _ = pool.gradient(batch, 0.1)
        assert np.isclose(value, 0.1 * batch["image"].mean())
        assert aux["right"].numpy() == np.float32(3 / 5)
        # In float32 once per shard and once more: 3/5 and 10/5.
        np.testing.assert_allclose(aux["means"], [0.6, 2], rtol=1e-6)
        assert aux["pair"].right.numpy() == 2
        assert bits(aux["pair"].left.numpy()) == bits(batch["image"][:, 0])
        assert bits(numbers(pool.evaluate(batch, 0.1))) == bits(numbers((value, aux)))


def test_accuracy_is_weighted_by_rows():
    def loss(variables, x, right):
        return toy(variables, x), tf.reduce_mean(tf.cast(right, tf.float64))

    right = np.arange(39) < 20  # the shards have 20 and 19 rows
    options = {"shards": 2, "has_aux": True, **SERIAL}
    with GradientPool([tf.Variable(1.0)], loss, **options) as pool:
        (_, accuracy), _ = pool.gradient(np.ones(39, np.float32), right)
    np.testing.assert_allclose(accuracy, 20 / 39, rtol=1e-15)


def test_changing_sizes_and_numbers_do_not_trace_again():
    traces = []

    def loss(variables, x, rate):
        traces.append(x.shape)
        return toy(variables, x) * rate

    with GradientPool([tf.Variable(1.0)], loss, shards=2, **SERIAL) as pool:
        for epoch in range(20):
            for size in (17, 17, 16):
                pool.gradient(np.ones(size, np.float32), 0.1 / (epoch + 1))
                pool.evaluate(np.ones(size, np.float32), 0.5)
    assert len(traces) == 1


def test_a_loss_that_needs_a_number_as_it_is_gets_a_trace_per_number():
    traces = []

    def loss(variables, x, times):
        traces.append(times)
        return toy(variables, x) * times

    with GradientPool([tf.Variable(1.0)], loss, shards=2, **SERIAL) as pool:
        for times in (2, 3, 2, 3):
            value, _ = pool.gradient(np.float32([1, 3]), times)
            assert value.numpy() == 2 * times
    # A whole-number tensor cannot be multiplied with a float one.
    assert traces[-2:] == [2, 3]
    assert len(traces) == 4


def test_a_number_may_meet_float64():
    traces = []

    def loss(variables, x, rate):
        traces.append(rate)
        return toy(variables, x) * rate

    w = tf.Variable(1.0, dtype=tf.float64)
    with GradientPool([w], loss, shards=2, **SERIAL) as pool:
        for rate in (0.1, 0.2, 0.3):
            value, _ = pool.gradient(np.array([1.0, 3.0]), rate)
            assert value.numpy() == 2 * rate
    assert len(traces) == 2


def test_a_loss_that_needs_the_number_of_rows_gets_a_trace_per_shard_size():
    traces = []

    def loss(variables, x):
        traces.append(x.shape[0])
        return tf.add_n([toy(variables, x[k]) for k in range(x.shape[0])]) / x.shape[0]

    with GradientPool([tf.Variable(1.0)], loss, shards=3, **SERIAL) as pool:
        for _ in range(3):
            assert pool.gradient(tf.range(1.0, 51.0))[1][0].numpy() == 25.5
        assert pool.gradient(tf.range(1.0, 4.0))[1][0].numpy() == 2
    assert traces == [None, 16, 17, 1]


def test_a_dimension_that_changes_is_left_open():
    traces = []

    def loss(variables, x):
        traces.append(x.shape[1])
        return toy(variables, x)

    with GradientPool([tf.Variable(1.0)], loss, shards=2, **SERIAL) as pool:
        for length in (3, 4, 5, 3, 6):
            x = np.full((4, length), length, np.float32)
            assert pool.gradient(x)[1][0].numpy() == length
    assert traces == [3, None]


def test_the_trainable_set_may_change():
    model, x = network(lambda: [keras.layers.Dense(2)]), rows(4)
    with GradientPool(model, squares, shards=2, **SERIAL) as pool:
        assert len(pool.gradient(x)[1]) == 4
        model.layers[0].trainable = False
        grads = pool.gradient(x)[1]
    theirs = taped(squares, model, x)[1]
    assert len(grads) == len(theirs) == 2
    for ours, their in zip(grads, theirs, strict=True):
        np.testing.assert_allclose(ours, their, rtol=1e-5)


def test_a_model_that_is_not_built_builds_itself():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(1, activation=lambda x: 2 * x)

        def call(self, x, training=False):
            return self.layer(x)

    model = Model()
    with GradientPool(model, squares, shards=2, **SERIAL) as pool:
        grads = pool.gradient(rows(5))[1]
    assert [g.shape for g in grads] == [v.shape for v in model.trainable_variables]


def test_moving_statistics_are_averaged_by_rows_and_written_once():
    layer = keras.layers.BatchNormalization(momentum=0.9)
    model = keras.Sequential([layer])
    model.build((None, 1))
    x = np.float32([0, 0, 0, 0, 6, 6])[:, None]

    def loss(model, x):
        return tf.reduce_mean(model(x, training=True) ** 2) * x[0, 0]

    with GradientPool(model, loss, shards=2, **SERIAL) as pool:
        pool.evaluate(x)
        assert layer.moving_mean.numpy() == 0
        pool.gradient(x)
    # The shards' means are 0 and 4, their variances 0 and 8: (0 + 8) / 2. That of
    # the whole batch is 8: what lies between the shards' means is not in it.
    np.testing.assert_allclose(layer.moving_mean, [0.2], rtol=1e-6)
    np.testing.assert_allclose(layer.moving_variance, [0.9 + 0.1 * 4], rtol=1e-6)


def test_whole_number_state_advances_once():
    class Counting(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable(1.0)
            self.calls = tf.Variable(0, trainable=False)

    def loss(model, x):
        model.calls.assign_add(1)
        return tf.reduce_mean(model.w * x)

    model = Counting()
    with GradientPool(model, loss, shards=4, **SERIAL) as pool:
        for _ in range(3):
            pool.gradient(np.ones(8, np.float32))
    assert model.calls.numpy() == 3


@pytest.mark.parametrize("kind", ["keras", "generator", "stateful"])
def test_dropout_masks_differ_between_shards_and_steps(kind):
    layer = keras.layers.Dropout(0.5, seed=5)
    generator = tf.random.Generator.from_seed(1)

    def mask(x):
        if kind == "keras":
            return layer(x, training=True)
        if kind == "generator":
            return x * tf.cast(generator.uniform(tf.shape(x)) < 0.5, tf.float32)
        return tf.nn.dropout(x, 0.5)

    def loss(variables, x):
        masked = mask(x) * variables[0]
        return tf.reduce_mean(masked), masked

    x = np.ones((2, 40), np.float32)  # one row per shard
    options = {"shards": 2, "has_aux": True, **SERIAL}
    with GradientPool([tf.Variable(1.0)], loss, **options) as pool:
        masks = [pool.gradient(x)[0][1].numpy() for _ in range(3)]
    assert len({m.tobytes() for step in masks for m in step}) == 6


def test_captured_tensors_travel_with_the_loss():
    scale, array = tf.constant(3.0), np.float32(2)
    other = tf.Variable(10.0)

    def loss(variables, x):
        return toy(variables, x) * scale * array + other

    with GradientPool([tf.Variable(1.0)], loss, shards=2, **SERIAL) as pool:
        value, (gradient,) = pool.gradient(np.float32([1, 3]))
        other.assign(20.0)
        later = pool.evaluate(np.float32([1, 3]))
    assert (value.numpy(), gradient.numpy(), later.numpy()) == (22, 12, 32)


def test_a_loss_may_take_the_batch_alone():
    w = tf.Variable(1.0)
    with GradientPool([w], lambda x: tf.reduce_mean(w * x), **SERIAL) as pool:
        assert pool.gradient(np.float32([1, 3]))[1][0].numpy() == 2


def test_functions_of_the_loss_may_be_tf_functions():
    @tf.function
    def inner(w, x):
        if tf.reduce_sum(x) > 0:
            return w * x
        return -w * x

    def loss(variables, x):
        return tf.reduce_mean(inner(variables[0], x))

    with GradientPool([tf.Variable(1.0)], loss, shards=2, **SERIAL) as pool:
        assert pool.gradient(np.float32([1, 2, -3, -3]))[1][0].numpy() == (1.5 + 3) / 2


def test_wrong_losses_are_named():
    def pool_of(loss, **options):
        return GradientPool([tf.Variable(1.0)], loss, **options, **SERIAL)

    x = np.ones(4, np.float32)
    for loss, options, text in (
        (lambda v, x: v[0] * x, {}, r"shape \(None,\)"),
        (lambda v, x: None, {}, "NoneType"),
        (lambda v, x: tf.size(x), {}, "int32"),
        (lambda v, x: (toy(v, x), x), {}, "has_aux=True"),
        (toy, {"has_aux": True}, r"\(loss, aux\)"),
    ):
        with pool_of(loss, **options) as pool:
            with pytest.raises(instep.LossError, match=text):
                pool.gradient(x)
            assert pool.statistics().steps == 0


def test_what_cannot_be_shipped_is_named():
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([0], [1.0]), 0.0
    )

    def looks_up(variables, x):
        return toy(variables, table.lookup(tf.cast(x, tf.int32)))

    def calls_python(variables, x):
        return toy(variables, tf.numpy_function(lambda x: x, [x], tf.float32))

    for loss, text in ((looks_up, "table"), (calls_python, "PyFunc")):
        pool = GradientPool([tf.Variable(1.0)], loss, **SERIAL)
        with pool, pytest.raises(instep.ShipError, match=text):
            pool.gradient(np.ones(4, np.float32))


def test_wrong_batches_and_models_are_named():
    with GradientPool([tf.Variable(1.0)], lambda v, x, y: toy(v, x), **SERIAL) as pool:
        with pytest.raises(instep.BatchError, match="3 rows"):
            pool.gradient(np.ones(2, np.float32), np.ones(3))
        with pytest.raises(instep.BatchError, match=r"batch\[1\].*Ragged"):
            pool.gradient(np.ones(2, np.float32), tf.ragged.constant([[1], [2, 3]]))
    for model in (3, [], [3]):
        with pytest.raises(instep.ArgumentError):
            GradientPool(model, toy, **SERIAL)
    frozen = network()
    frozen.trainable = False
    pool = GradientPool(frozen, squares, **SERIAL)
    with pool, pytest.raises(instep.GradientError, match="no trainable"):
        pool.gradient(rows(2))


def test_a_call_inside_a_tf_function_is_refused():
    pool = GradientPool([tf.Variable(1.0)], toy, **SERIAL)
    # AutoGraph makes an error of its own kind of it.
    with pool, pytest.raises(Exception, match="while a graph is being built"):
        tf.function(lambda: pool.gradient(tf.ones(4)))()


@both_engines
@pytest.mark.guard(120)
def test_an_error_in_a_shard_keeps_its_type(engine):
    def loss(variables, x):
        tf.debugging.assert_less(x, 9.0, "bad row")
        return toy(variables, x)

    options = {"workers": 2, "shards": 2, "engine": engine}
    with GradientPool([tf.Variable(1.0)], loss, **options) as pool:
        with pytest.raises(tf.errors.InvalidArgumentError, match="bad row") as caught:
            pool.gradient(np.float32([1, 2, 3, 9]))
        assert "shard 1 of 2" in "".join(caught.value.__notes__)
        assert pool.gradient(np.float32([1, 2, 3, 6]))[1][0].numpy() == 3


def test_an_error_while_tracing_keeps_its_type():
    class Mine(Exception):
        def __init__(self, number):
            super().__init__(f"number {number}")

    def loss(variables, x):
        raise Mine(17)

    pool = GradientPool([tf.Variable(1.0)], loss, **SERIAL)
    with pool, pytest.raises(Mine, match=r"^number 17$"):
        pool.gradient(np.ones(2, np.float32))


def test_workers_do_not_write_into_the_masters_arrays():
    w = tf.Variable([1.0] * 64)

    def loss(variables, x):
        variables[0].assign_add(tf.ones(64))
        return tf.reduce_mean(x) * tf.reduce_sum(variables[0])

    with GradientPool([w], loss, shards=3, **SERIAL) as pool:
        value, _ = pool.gradient(np.ones(6, np.float32))
    # Every shard starts from 1 and adds one; the average of three 2 is 2.
    assert value.numpy() == 128
    assert w.numpy().tolist() == [2.0] * 64


def test_without_tensorflow_the_error_says_how_to_install_it():
    script = (
        "import sys; sys.modules['tensorflow'] = None\n"
        "import instep\n"
        "try:\n    import instep.tensorflow\n"
        "except instep.MissingFrameworkError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50
    )
    assert "pip install 'instep[tensorflow]'" in done.stdout
