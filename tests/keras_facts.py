"""Keras with a pool computes what Keras alone computes.

test_keras.py runs this file once with each KERAS_BACKEND.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import warnings
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest

# One thread inside an operation, as in the workers: another number gives other bits.
_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC", "PJRT_NPROC")
os.environ.update(dict.fromkeys(_THREADS, "1"))

import keras  # noqa: E402
from keras import layers, ops, optimizers  # noqa: E402

import instep  # noqa: E402
from helpers import bits, run_python, write_script  # noqa: E402
from instep.keras import parallel  # noqa: E402

BACKEND = keras.backend.backend()
SERIAL = {"engine": "serial", "threads": 1}
ONE = {"shards": 1, **SERIAL}
TWO = {"shards": 2, **SERIAL}
THREE = {"shards": 3, **SERIAL}

# Keras's own, in `get_weights` among others.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="of TensorFlow")
not_on_torch = pytest.mark.skipif(BACKEND == "torch", reason="PyTorch refuses it")
not_on_jax = pytest.mark.skipif(BACKEND == "jax", reason="Keras on JAX cannot do it")
where_models_travel = pytest.mark.skipif(
    BACKEND == "tensorflow", reason="TensorFlow's workers get graphs, not the model"
)


class Result(NamedTuple):
    """What a run ends with."""

    history: dict
    values: list

    @property
    def exact(self):
        """What "the same" compares."""
        digest = hashlib.sha256(repr(bits(self.values)).encode()).hexdigest()
        return self.history, digest


@contextmanager
def pooled(model, options):
    """A pool with these options, or None: plain Keras."""
    if options is None:
        yield None
    else:
        with parallel(model, **options) as handle:
            yield handle


def fresh(make):
    """A model with the names and the weights that a new process gives it."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    return make()


def values_of(model):
    """Weights, moving statistics, seeds and what the optimizer keeps.

    Not the latter on JAX: plain Keras makes one program of gradient and optimizer, in
    which XLA may leave out a rounding of a moment.
    """
    variables = [*model.variables]
    if BACKEND != "jax":
        variables += model.optimizer.variables
    return [ops.convert_to_numpy(variable) for variable in variables]


def fitted(make, *data, options=None, **keywords):
    """The result of `fit`; without options, of plain Keras."""
    model = fresh(make)
    with pooled(model, options):
        history = model.fit(*data, verbose=0, **keywords).history
    return Result(history, values_of(model))


def assert_close(ours, plain):
    """The same but for rounding: sums over rows are added in another order.

    That costs some units of 6e-8 in a gradient, which a few steps carry on.
    """
    assert ours.history == {
        key: pytest.approx(values, rel=1e-5, abs=1e-6)
        for key, values in plain.history.items()
    }
    for ours_, plain_ in zip(ours.values, plain.values, strict=True):
        np.testing.assert_allclose(ours_, plain_, rtol=1e-5, atol=1e-6)


def assert_like_plain(make, *data, **keywords):
    """One shard: the same bits as in plain `fit`; three: the same but for rounding."""
    plain = fitted(make, *data, **keywords)
    assert fitted(make, *data, options=ONE, **keywords).exact == plain.exact
    assert_close(fitted(make, *data, options=THREE, **keywords), plain)


def fails(call, *arguments, **keywords):
    """The exception of a call."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call(*arguments, **keywords)
    return caught.value


# Data and models


def table(rows=32):
    """Three columns and a target."""
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32")
    return x, (x @ [[1], [-2], [0.5]] + 0.1).astype("float32")


X, Y = table()
# Twice 16 rows; three shards have 6, 5 and 5. On JAX, plain Keras makes one program of
# a step, and XLA may leave out a rounding between the mean loss and the sum over rows
# that `history` is made of: not where the number of rows is a power of two.
TABLE = {"batch_size": 16, "epochs": 2}


def network(optimizer="sgd", loss="mse", hidden=(), output=None, **compiled):
    """A function that makes a compiled model for the table.

    Args:
        optimizer: its name, or a function that makes it.
        loss: of Keras.
        hidden: a function that makes layers.
        output: the same; None: one dense unit.
        **compiled: for `compile`.
    """

    def make():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                layers.Dense(4, "tanh"),
                *(hidden() if hidden else ()),
                output() if output else layers.Dense(1),
            ]
        )
        made = optimizer if isinstance(optimizer, str) else optimizer()
        model.compile(made, loss, **compiled)
        return model

    return make


def pictures():
    """Rows and targets, for training and validation: ten patterns and noise."""
    draw = np.random.default_rng(0)
    y = draw.integers(10, size=176)
    x = (draw.random((10, 64))[y] + draw.random((176, 64))).astype("float32") / 2
    return (x[:144], y[:144]), (x[144:], y[144:])


def classifier(*hidden):
    model = keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def perceptron():
    return classifier(
        layers.Dense(16, "relu"),
        layers.BatchNormalization(),
        layers.Dropout(0.3, seed=1),
    )


def convolutional():
    return classifier(
        layers.Reshape((8, 8, 1)),
        layers.Conv2D(4, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
    )


PICTURES = {"epochs": 3, "batch_size": 32, "shuffle": False}  # the last batch has 16


EIGHT = np.arange(1, 9, dtype=np.float32)[:, None]


class Factor(layers.Layer):
    """y = w x."""

    def __init__(self, value=2.0, **keywords):
        super().__init__(**keywords)
        self.w = self.add_weight(shape=(), initializer=lambda *_, **__: value)

    def call(self, x):
        return self.w * x


def one_weight(layer, loss="mse", inputs=1, **compiled):
    """A model of one layer, which SGD moves by minus the gradient."""
    model = keras.Sequential([keras.Input((inputs,)), layer])
    model.compile(optimizers.SGD(1.0), loss, **compiled)
    return model


def moved(model, x, y, options, **keywords):
    """Its only weight after one step, and the loss."""
    with parallel(model, **options):
        loss = model.train_on_batch(x, y, **keywords)
    return np.asarray(model.get_weights()[0]), float(loss)


# The same bits


@pytest.mark.guard(120)
def test_one_shard_in_a_worker_gives_the_bits_of_plain_fit():
    data, validation = pictures()
    keywords = {**PICTURES, "shuffle": True, "validation_data": validation}
    plain = fitted(perceptron, *data, **keywords)
    ours = fitted(perceptron, *data, options={"shards": 1, "workers": 1}, **keywords)
    assert ours.exact == plain.exact
    assert list(ours.history) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert ours.history["loss"][-1] < ours.history["loss"][0]


def test_one_shard_gives_the_bits_of_plain_convolutions():
    data, _ = pictures()
    plain = fitted(convolutional, *data, **PICTURES)
    assert fitted(convolutional, *data, options=ONE, **PICTURES).exact == plain.exact


@pytest.mark.guard(180)
def test_the_bits_do_not_depend_on_the_number_of_workers():
    (x, y), _ = pictures()
    data = x[:120], y[:120]
    # Shards of 8, 8, 7 and 7 rows: every worker may have to compile for both sizes.
    keywords = {"epochs": 2, "batch_size": 30, "shuffle": False}
    serial = fitted(perceptron, *data, options={"shards": 4, **SERIAL}, **keywords)
    model = fresh(perceptron)
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    start = [ops.convert_to_numpy(variable) for variable in variables]
    with parallel(model, shards=4, workers=4) as handle:
        for workers in (4, 3, 2, 1):
            handle.resize(workers)
            history = model.fit(*data, verbose=0, **keywords).history
            assert Result(history, values_of(model)).exact == serial.exact
            assert handle.statistics().workers == workers
            for variable, value in zip(variables, start, strict=True):
                variable.assign(value)


def test_four_shards_train_like_one_process():
    # Neither dropout, which draws per shard, nor batch statistics.
    make = network(lambda: optimizers.SGD(0.05, momentum=0.9))
    ours = fitted(make, X, Y, options={"shards": 4, **SERIAL}, **TABLE)
    assert_close(ours, fitted(make, X, Y, **TABLE))


# Numbers to check by hand


def test_a_regulariser_counts_once():
    # Mean of (2x - 3x)^2 is 25.5; its derivative -51, that of 0.1 k^2 is 0.4.
    # Once per shard but not averaged, it would be 1.6: the gradient -49.4.
    penalty = keras.regularizers.L2(0.1)
    layer = layers.Dense(
        1, use_bias=False, kernel_initializer="ones", kernel_regularizer=penalty
    )
    model = one_weight(layer)
    model.set_weights([np.array([[2.0]])])
    weight, loss = moved(model, EIGHT, 3 * EIGHT, {"shards": 4, **SERIAL})
    assert weight == np.float32(2) + np.float32(50.6)
    assert loss == pytest.approx(25.5 + 0.4, rel=1e-6)  # 0.1 is not exact


def test_a_term_of_add_loss_combines_by_rows():
    class Penalised(Factor):
        def call(self, x):
            y = super().call(x)
            self.add_loss(ops.mean(y))
            return y

    # As above, and the mean of 2x, which is 9; its derivative is 4.5.
    model = one_weight(Penalised())
    weight, loss = moved(model, EIGHT, 3 * EIGHT, {"shards": 4, **SERIAL})
    assert (weight, loss) == (2 + 51 - 4.5, 25.5 + 9)


def test_rows_of_an_embedding_get_their_shards_gradients():
    # The mean of 8 numbers: 1/8 for each of a token's entries, as often as it comes.
    model = keras.Sequential(
        [keras.Input((2,), dtype="int32"), layers.Embedding(5, 2, "zeros")]
    )
    model.compile(optimizers.SGD(1.0), lambda y, p: ops.mean(p, axis=(1, 2)))
    tokens = np.array([[0, 1], [0, 2]])
    weights, loss = moved(model, tokens, np.zeros((2, 1)), TWO)
    assert weights.tolist() == [
        [-0.25] * 2,
        [-0.125] * 2,
        [-0.125] * 2,
        [0] * 2,
        [0] * 2,
    ]
    assert loss == 0.0


def test_moving_statistics_are_means_over_rows():
    # Shards of 3 and 2 rows have the means 0 and 5, the variances 0 and 0. In each
    # shard 0.5 * mean; over rows 3/5 * 0 + 2/5 * 2.5 = 1. A mean of shards gives 1.25.
    model = one_weight(layers.BatchNormalization(momentum=0.5))
    x = np.array([0, 0, 0, 5, 5], np.float32)[:, None]
    with parallel(model, **TWO):
        model.fit(x, x, batch_size=5, shuffle=False, verbose=0)
        assert float(model.layers[0].moving_mean[0]) == 1.0
        assert float(model.layers[0].moving_variance[0]) == 0.5
        model.train_on_batch(x, x)  # 3/5 * 0.5 * (1 + 0) + 2/5 * 0.5 * (1 + 5)
        assert float(model.layers[0].moving_mean[0]) == 1.5
        assert float(model.layers[0].moving_variance[0]) == 0.25


def test_shards_draw_dropout_of_their_own():
    # Both rows are ones, so an input's gradient is 2 for each row that keeps it,
    # halved by the mean: 0, 1 or 2. With one mask for both, only 0 and 2.
    dense = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((64,)), layers.Dropout(0.5, seed=1), dense])
    model.compile(optimizers.SGD(1.0), lambda y, p: ops.mean(p, axis=-1))
    steps = []
    with parallel(model, **TWO):
        for _ in range(2):
            before = model.get_weights()[0]
            model.train_on_batch(np.ones((2, 64)), np.ones((2, 1)))
            steps.append((before - model.get_weights()[0]).ravel().tolist())
    assert set(steps[0]) == set(steps[1]) == {0.0, 1.0, 2.0}
    assert steps[0] != steps[1]


# Losses


def two_outputs(**compiled):
    def make():
        x = keras.Input((3,))
        hidden = layers.Dense(4, "tanh")(x)
        outputs = [layers.Dense(1, name=name)(hidden) for name in ("a", "b")]
        model = keras.Model(x, dict(zip("ab", outputs, strict=True)))
        model.compile("sgd", {"a": "mse", "b": "mae"}, **compiled)
        return model

    return make


def test_several_outputs_have_their_losses_and_weights():
    compiled = {"loss_weights": {"a": 1.0, "b": 0.25}, "metrics": {"a": ["mae"]}}
    make = two_outputs(**compiled)
    # With a shorter last batch TensorFlow leaves the number of rows open in plain
    # Keras, too. Else one process counts rows where a pool, so far equal, counts one.
    x, y = X[:24], Y[:24]
    assert_like_plain(make, x, {"a": y, "b": y**2}, **TABLE)


WEIGHTS = np.linspace(0, 2, 32).astype("float32")


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_rows_have_sample_weights(reduction):
    make = network(
        lambda: optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction)
    )
    assert_like_plain(make, X, Y, sample_weight=WEIGHTS, **TABLE)


def test_classes_have_weights():
    make = network(
        loss="binary_crossentropy",
        output=lambda: layers.Dense(1, "sigmoid"),
        weighted_metrics=["accuracy"],
    )
    label = (Y > 0).astype("float32")
    assert_like_plain(make, X, label, class_weight={0: 0.5, 1: 3.0}, **TABLE)


def test_a_weighted_mean_is_one_over_the_batch():
    # |2x| with the weights 1, 1, 1, 5: (2 + 4 + 6 + 40) / 8. The shards' means are 3
    # and 46/6, and the mean of those 5.33. Its derivative is (1 + 2 + 3 + 20) / 8.
    loss = keras.losses.MeanAbsoluteError("mean_with_sample_weight")
    weights = np.array([1, 1, 1, 5], np.float32)
    weight, value = moved(
        one_weight(Factor(), loss), EIGHT[:4], 0 * EIGHT[:4], TWO, sample_weight=weights
    )
    # The shards' sums are divided and multiplied again: rounding, of 6e-8 each.
    assert weight == pytest.approx(2 - 3.25, rel=1e-6)
    assert value == pytest.approx(6.5, rel=1e-6)


def test_a_summed_loss_is_added_up():
    loss = keras.losses.MeanAbsoluteError("sum")
    weight, value = moved(one_weight(Factor(), loss), EIGHT[:4], 0 * EIGHT[:4], TWO)
    assert (weight, value) == (2 - 10, 20)


TOKENS = np.zeros((8, 4), np.int32)
TOKENS[np.arange(4) < np.array([[4], [1], [1], [2], [3], [2], [3], [2]])] = np.tile(
    [1, 2, 3, 4, 4, 2], 3
)
TAGS = TOKENS % 2


class Penalty(layers.Layer):
    """Adds a term to the loss: the mean square of what goes through."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True

    def call(self, x):
        self.add_loss(0.1 * ops.mean(x**2))
        return x


def penalty_of(*kinds):
    return keras.regularizers.L2(0.1) if len(set(kinds)) == 1 else None


def tagger(kind):
    """Marks the words of sentences of different lengths."""
    x = keras.Input((4,), dtype="int32")
    hidden = layers.Embedding(5, 3, mask_zero=True)(x)
    if kind == "terms of add_loss":
        hidden = Penalty()(hidden)
    penalty = penalty_of("a regulariser", kind)
    activity = penalty_of("terms of add_loss", kind)
    tags = layers.Dense(
        2, kernel_regularizer=penalty, activity_regularizer=activity, name="tags"
    )(hidden)
    outputs = {"tags": tags}
    if kind == "an output without mask":
        outputs["length"] = layers.Dense(1, name="length")(ops.cast(x, "float32"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    losses = {"tags": loss, "length": "mse"}
    model = keras.Model(x, outputs)
    model.compile(
        optimizers.SGD(0.1),
        {name: losses[name] for name in outputs},
        metrics={"tags": "accuracy"},
    )
    return model


@pytest.mark.parametrize(
    "kind",
    ["nothing else", "a regulariser", "terms of add_loss", "an output without mask"],
)
def test_a_masked_loss_is_a_mean_over_unmasked_entries_beside(kind):
    # The three shards have 6, 7 and 5 words.
    targets = {"tags": TAGS}
    if kind == "an output without mask":
        targets["length"] = (TOKENS > 0).sum(axis=1, keepdims=True).astype("float32")
    keywords = {"epochs": 2, "batch_size": 8, "shuffle": False}
    assert_like_plain(lambda: tagger(kind), TOKENS, targets, **keywords)


def test_a_loss_of_the_models_own_is_used():
    class Own(keras.Sequential):
        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            return ops.mean(ops.abs(y - y_pred) ** 1.5) + ops.mean(x**2)

    def make():
        model = Own([keras.Input((3,)), layers.Dense(1)])
        model.compile("sgd")
        return model

    assert_like_plain(make, X, Y, **TABLE)


# Metrics


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")
def test_metrics_that_are_no_means_are_of_the_whole_batch():
    def make():
        metrics = keras.metrics
        return network(
            loss="binary_crossentropy",
            output=lambda: layers.Dense(1, "sigmoid"),
            metrics=[
                "accuracy",
                metrics.AUC(),
                metrics.BinaryIoU(),
                metrics.F1Score("macro"),
            ],
            weighted_metrics=[metrics.Precision()],
        )()

    label = (Y > 0).astype("float32")
    validation = (X[:8], label[:8], WEIGHTS[-8:])
    assert_like_plain(
        make, X, label, sample_weight=WEIGHTS, validation_data=validation, **TABLE
    )


@not_on_jax
def test_a_layer_updates_its_metric():
    class Watched(layers.Layer):
        def __init__(self):
            super().__init__()
            self.mean = keras.metrics.Mean(name="mean")
            self.square = keras.metrics.Mean(name="square")

        def call(self, x):
            self.mean.update_state(x)
            self.square.update_state(ops.mean(x**2), sample_weight=ops.shape(x)[0])
            return x

    make = network(hidden=lambda: [Watched()])
    assert {"mean", "square"} <= fitted(make, X, Y, **TABLE).history.keys()
    assert_like_plain(make, X, Y, validation_data=(X[:7], Y[:7]), **TABLE)


def test_compute_metrics_of_the_models_own_is_used():
    class Own(keras.Sequential):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.extra = keras.metrics.MeanAbsoluteError(name="extra")

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            logs = super().compute_metrics(x, y, y_pred, sample_weight)
            self.extra.update_state(y, 2 * y_pred)
            return {**logs, "extra": self.extra.result()}

    def make():
        model = Own([keras.Input((3,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    assert_like_plain(make, X, Y, **TABLE)


# Optimizers


def averaging():
    """Clips each gradient, averages weights, and has a schedule."""
    return optimizers.SGD(
        optimizers.schedules.ExponentialDecay(0.1, 1, 0.5),
        clipnorm=0.1,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=3,
    )


def accumulating():
    """Clips all gradients together, scales the loss, and applies every second sum."""
    return optimizers.Adam(
        0.01,
        global_clipnorm=0.1,
        gradient_accumulation_steps=2,
        loss_scale_factor=8.0,
        weight_decay=0.01,
    )


@pytest.mark.parametrize("optimizer", [averaging, accumulating])
def test_the_optimizer_keeps_its_options(optimizer):
    assert_like_plain(network(optimizer), X, Y, **TABLE)


def half():
    """A model that computes with float16, and scales its loss."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        return network(lambda: optimizers.SGD(0.1), metrics=["mae"])()
    finally:
        keras.mixed_precision.set_global_policy("float32")


def test_mixed_precision_gives_the_bits_of_plain_fit():
    plain = fitted(half, X, Y, **TABLE)
    assert fitted(half, X, Y, options=ONE, **TABLE).exact == plain.exact


def test_a_step_that_overflows_is_left_out_and_halves_the_scale():
    # 1000 * 65536 is beyond float16's 65504.
    def run(options):
        model = fresh(half)
        scales = []
        with pooled(model, options):
            model.train_on_batch(X[:4] / 16, Y[:4] / 16)
            before = model.get_weights()
            for factor in (1000, 1 / 16):
                model.train_on_batch(X[:4] * factor, Y[:4] * factor)
                same = bits(model.get_weights()) == bits(before)
                scales.append((float(model.optimizer.dynamic_scale), same))
        return scales, bits(values_of(model))

    plain = run(None)
    assert plain[0] == [(2.0**14, True), (2.0**14, False)]
    assert run(ONE) == plain
    assert run(TWO)[0] == plain[0]


class Changing(keras.callbacks.LearningRateScheduler):
    """The rate 0.1, 0.05, ..."""

    def __init__(self):
        super().__init__(lambda epoch: 0.1 / 2**epoch)


def test_a_callback_changes_the_learning_rate():
    def keywords():
        return {"batch_size": 16, "epochs": 3, "callbacks": [Changing()]}

    data = table(40)  # 16, 16 and 8 rows
    make = network(lambda: optimizers.SGD(0.5))
    plain = fitted(make, *data, **keywords())
    assert plain.history["learning_rate"] == pytest.approx([0.1, 0.05, 0.025])
    assert fitted(make, *data, options=ONE, **keywords()).exact == plain.exact


@on_tensorflow
def test_changing_sizes_and_rates_do_not_trace_again():
    model = fresh(network(lambda: optimizers.SGD(0.5)))
    x, y = table(50)  # 17, 17 and 16 rows
    with parallel(model, **THREE):
        model.fit(x, y, batch_size=17, epochs=3, callbacks=[Changing()], verbose=0)
        traces = model._instep.steps.pool._traces
        assert len(traces.shipped()) == 1
        model.evaluate(x, y, batch_size=17, verbose=0)
        assert len(traces.shipped()) == 2


# Data


class Slices(keras.utils.PyDataset):
    """Batches of 20 and 12 rows."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        rows = slice(20 * index, 20 * index + 20)
        return X[rows], Y[rows]


def endless():
    while True:
        yield from (Slices()[index] for index in range(2))


def dataset():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(20)


def loader():
    import torch

    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return torch.utils.data.DataLoader(data, batch_size=20)


def test_data_of_every_kind_gives_the_bits_of_arrays():
    keywords = {"epochs": 2, "shuffle": False, "options": TWO}
    arrays = fitted(network(), X, Y, batch_size=20, **keywords)
    for data in (Slices(), endless(), dataset(), loader()):
        ours = fitted(network(), data, steps_per_epoch=2, **keywords)
        assert ours.exact == arrays.exact, type(data)


def test_inputs_are_any_tree():
    def make():
        left = keras.Input((1,), name="left")
        right = keras.Input((2,), name="right")
        both = layers.Concatenate()([left, right])
        model = keras.Model({"left": left, "right": right}, layers.Dense(1)(both))
        model.compile("sgd", "mse")
        return model

    assert_like_plain(make, {"left": X[:, :1], "right": X[:, 1:]}, Y, **TABLE)


def test_single_batches_return_what_they_return_in_plain_keras():
    def run(options):
        model = fresh(network(metrics=["mae"]))
        with pooled(model, options):
            return [
                model.train_on_batch(X[:8], Y[:8]),
                model.train_on_batch(X[8:16], Y[8:16], return_dict=True),
                model.test_on_batch(X[:4], Y[:4], sample_weight=WEIGHTS[:4]),
                model.test_on_batch(X[:4], Y[:4], return_dict=True),
                model.evaluate(X, Y, batch_size=8, verbose=0),
                model.predict_on_batch(X[:2]).tolist(),
                model.predict(X[:2], verbose=0).tolist(),
            ]

    assert run(ONE) == run(None)


@not_on_torch
def test_several_steps_make_one_execution():
    make = network(metrics=["mae"], steps_per_execution=2)
    keywords = {"epochs": 2, "batch_size": 8}  # 3 steps: 2 and 1
    x, y = X[:24], Y[:24]
    assert_like_plain(make, x, y, validation_data=(x, y), **keywords)


def test_run_eagerly_calls_metrics_at_every_step():
    seen = []

    def error(y, prediction):
        seen.append(True)
        return ops.mean(ops.abs(y - prediction), axis=-1)

    def run(options):
        make = network(metrics=[error], run_eagerly=True)
        return fitted(make, X, Y, batch_size=8, epochs=3, options=options)

    # The pool's own part stays a graph, which may round unlike single operations.
    assert_close(run(ONE), run(None))
    assert len(seen) >= 2 * 12


# Callbacks, saving


def test_callbacks_see_and_restore_the_weights(tmp_path):
    # For "max" a falling loss gets worse: training stops after the second epoch, and
    # the first one's weights return.
    def run(options, folder):
        model = fresh(network(lambda: optimizers.SGD(0.1)))
        seen = []
        watch = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append(bits(model.get_weights()))
        )
        path = folder / "{epoch}.weights.h5"
        callbacks = [
            watch,
            keras.callbacks.ModelCheckpoint(path, save_weights_only=True),
            keras.callbacks.EarlyStopping(
                "loss", mode="max", patience=1, restore_best_weights=True
            ),
        ]
        with pooled(model, options):
            history = model.fit(
                X, Y, batch_size=16, epochs=5, callbacks=callbacks, verbose=0
            ).history
            assert len(history["loss"]) == 2
            assert bits(model.get_weights()) == seen[0] != seen[1]
            model.load_weights(folder / "2.weights.h5")
            assert bits(model.get_weights()) == seen[1]
        return history, seen

    folders = [tmp_path / name for name in ("ours", "plain")]
    for folder in folders:
        folder.mkdir()
    assert run(ONE, folders[0]) == run(None, folders[1])


def test_a_saved_model_is_a_plain_one(tmp_path):
    model = fresh(network(metrics=["mae"]))
    with parallel(model, **TWO):
        model.fit(X, Y, verbose=0)
        model.save(tmp_path / "model.keras")
        copy = keras.models.clone_model(model)
        expected = model.predict(X, verbose=0)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert bits(loaded.predict(X, verbose=0)) == bits(expected)
    for other in (loaded, copy):
        assert not [name for name in vars(other) if "instep" in name]
        assert not {"make_train_function", "_symbolic_build"} & vars(other).keys()
    # Without a pool, both train on alike.
    loaded.fit(X, Y, shuffle=False, verbose=0)
    model.fit(X, Y, shuffle=False, verbose=0)
    assert bits(loaded.get_weights()) == bits(model.get_weights())


def test_a_model_can_be_saved_and_cloned_within_a_callback(tmp_path):
    model = fresh(network())
    callbacks = [keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")]
    with parallel(model, **TWO):
        model.fit(X, Y, epochs=2, callbacks=callbacks, verbose=0)
        loaded = keras.models.load_model(tmp_path / "2.keras")
        assert bits(loaded.get_weights()) == bits(model.get_weights())
        # The saved optimizer goes on where it was.
        assert int(loaded.optimizer.iterations) == 2


def test_tensorboard_writes_what_it_writes_in_plain_keras(tmp_path):

    def run(options, folder):
        callback = keras.callbacks.TensorBoard(folder, histogram_freq=1)
        fitted(network(), X, Y, options=options, callbacks=[callback], epochs=2)
        return sorted(path.parent.name for path in folder.rglob("*tfevents*"))

    assert run(ONE, tmp_path / "ours") == run(None, tmp_path / "plain") != []


# Kinds of models


class Block(layers.Layer):
    """Has a lambda for its activation, and a layer that exists before the call."""

    def __init__(self, units):
        super().__init__()
        self.dense = layers.Dense(units, activation=lambda x: ops.maximum(x, 0.1 * x))

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)


class Net(keras.Model):
    """Subclassed: layers in a list and a dict, dropout only in training."""

    def __init__(self):
        super().__init__()
        self.blocks = [Block(4), Block(4)]
        self.parts = {"out": layers.Dense(1)}
        self.dropout = layers.Dropout(0.5, seed=1)

    def call(self, x, training=False):
        for block in self.blocks:
            x = block(x)
        return self.parts["out"](self.dropout(x, training=training))


def subclassed():
    model = Net()
    model(np.zeros((1, 3), np.float32))
    model.compile("sgd", "mse")
    return model


def test_a_subclassed_model_trains_like_a_plain_one():
    plain = fitted(subclassed, X, Y, **TABLE)
    assert fitted(subclassed, X, Y, options=ONE, **TABLE).exact == plain.exact


SCRIPT = """
    import sys
    import keras
    import numpy as np
    import instep
    from keras import layers, ops

    class Block(layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.dense = layers.Dense(units, activation=lambda x: ops.maximum(x, 0))

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return scaled(self.dense(x))

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [Block(4), Block(1)]

        def call(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    def scaled(x):
        return FACTOR * x

    FACTOR = 2.0

    def train(is_parallel):
        keras.utils.set_random_seed(0)
        model = Net()
        model(np.zeros((1, 3), np.float32))
        model.compile("sgd", lambda y, p: ops.mean(ops.abs(y - p), axis=-1))
        if is_parallel:
            instep.keras.parallel(model, workers=1, shards=1)
        x = np.ones((10, 3), np.float32)
        model.fit(x, x[:, :1], epochs=2, verbose=0)
        return [w.tolist() for w in model.get_weights()]

    print(train(True) == train(False))
"""


@pytest.mark.guard(120)
def test_what_a_script_defines_reaches_the_workers(tmp_path):
    result = run_python(write_script(tmp_path, SCRIPT))
    assert result.stdout.split() == ["True"], result.stderr


@where_models_travel
@pytest.mark.guard(120)
def test_a_deep_model_reaches_the_workers():
    def make():
        x = inputs = keras.Input((3,))
        for _ in range(150):
            x = layers.Dense(3, "tanh")(x)
        model = keras.Model(inputs, layers.Dense(1)(x))
        model.compile("sgd", "mse")
        return model

    model = fresh(make)
    with parallel(model, workers=1, shards=1):
        assert np.isfinite(model.train_on_batch(X, Y))


# Compile again, freeze, close


def test_frozen_layers_stay_and_learn_once_they_are_free():
    def run(options):
        model = fresh(network(hidden=lambda: [layers.BatchNormalization()]))
        base = model.layers[:2]
        before = [bits(layer.get_weights()) for layer in base]
        histories = []
        with pooled(model, options):
            keywords = {**TABLE, "verbose": 0}
            for trainable in (False, True):
                for layer in base:
                    layer.trainable = trainable
                model.compile("sgd", "mse")
                histories.append(model.fit(X, Y, **keywords).history)
                is_same = [bits(layer.get_weights()) for layer in base] == before
                assert is_same is not trainable
        return histories, bits(values_of(model))

    assert run(ONE) == run(None)


def test_with_all_weights_frozen_keras_warns_and_still_gives_logs():
    def run(options):
        model = fresh(network(metrics=["mae"]))
        model.trainable = False
        model.compile("sgd", "mse", metrics=["mae"])
        with pooled(model, options), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = model.fit(X, Y, **TABLE, verbose=0).history
        texts = [str(w.message) for w in caught]
        return history, any("not have any trainable weights" in t for t in texts)

    plain = run(None)
    assert plain[1] is (BACKEND != "jax")
    assert run(ONE) == plain
    assert run(TWO)[0] == {k: pytest.approx(v) for k, v in plain[0].items()}


def test_another_compile_takes_effect():
    # With w = 2, x = 1..8, y = 3x: the gradient of mse is -51, of mae -4.5.
    model = one_weight(Factor())
    with parallel(model, **TWO):
        model.train_on_batch(EIGHT, 3 * EIGHT)
        assert model.get_weights() == [53.0]
        model.set_weights([np.float32(2)])
        model.compile(optimizers.SGD(1.0), "mae", metrics=["mse"])
        assert model.train_on_batch(EIGHT, 3 * EIGHT) == [4.5, 25.5]
        assert model.get_weights() == [6.5]
        model.set_weights([np.float32(2)])
        assert model.evaluate(EIGHT, 3 * EIGHT, verbose=0) == [4.5, 25.5]


def is_plain(model):
    """Whether nothing of a pool is left in the model."""
    names = {"_instep", "_symbolic_build", "make_train_function", "make_test_function"}
    return not names & vars(model).keys()


@pytest.mark.parametrize("how", ["close", "with", "del"])
def test_after_the_pool_the_model_is_a_plain_one(how):
    model = fresh(network())
    handle = parallel(model, **TWO)
    model.fit(X, Y, verbose=0, shuffle=False)
    assert not is_plain(model)
    if how == "close":
        handle.close()
        handle.close()
    elif how == "with":
        with handle:
            pass
    else:
        del handle
    assert is_plain(model)
    model.fit(X, Y, verbose=0, shuffle=False)
    model.evaluate(X, Y, verbose=0)
    plain = fresh(network())
    plain.fit(X, Y, verbose=0, shuffle=False, epochs=2)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)  # the first step's shards


def test_without_a_variable_for_it_the_pool_stays_with_the_model():
    model = fresh(network())
    parallel(model, **TWO)
    assert not is_plain(model)
    model.fit(X, Y, verbose=0)
    model.fit(X, Y, verbose=0)
    assert model._instep.steps.pool.statistics().steps == 2


def test_a_second_pool_replaces_the_first(tmp_path):
    model = fresh(network())
    first = parallel(model, **TWO)
    with first.trace(tmp_path / "trace.json"), first.dashboard() as page:
        model.fit(X, Y, verbose=0)
        assert page.url.startswith("http://127.0.0.1:")
    names = [
        event["name"] for event in json.loads((tmp_path / "trace.json").read_text())
    ]
    assert names.count("update") == 1
    second = parallel(model, **THREE)
    model.fit(X, Y, verbose=0)
    assert (first.statistics().steps, second.statistics().steps) == (1, 1)
    first.close()  # changes nothing
    model.fit(X, Y, verbose=0)
    assert second.statistics().steps == 2
    second.close()
    assert is_plain(model)


def test_check_compares_shards_with_the_whole_batch():
    model = fresh(network())
    before = bits(values_of(model))
    with parallel(model, **TWO) as handle:
        assert handle.check(X, Y).findings == ()
    assert bits(values_of(model)) == before
    model = fresh(network(hidden=lambda: [layers.BatchNormalization()]))
    with parallel(model, **TWO) as handle:
        assert "batch statistics" in str(handle.check(X, Y))


# Errors


def test_what_is_no_model_is_an_error():
    with pytest.raises(instep.ArgumentError, match=r"expected a keras\.Model"):
        parallel(layers.Dense(1))


def test_a_model_that_is_not_built_is_an_error():
    model = keras.Sequential([layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(instep.ArgumentError, match=r"is not built.*model\.build"):
        parallel(model)


def test_a_model_that_is_not_compiled_is_an_error():
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    with pytest.raises(instep.ArgumentError, match=r"is not compiled; call model\.com"):
        parallel(model)


def test_a_train_step_of_the_models_own_is_an_error():
    class Own(keras.Sequential):
        def train_step(self, *arguments):
            raise NotImplementedError

    model = Own([keras.Input((1,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(instep.ArgumentError, match=r"Own .* train_step.*compute_loss"):
        parallel(model)
    assert is_plain(model)


def test_a_mistyped_option_is_an_error():
    model = fresh(network())
    with pytest.raises(TypeError, match=r"'worker'.*did you mean 'workers'"):
        parallel(model, worker=2)
    assert is_plain(model)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_data_without_a_batch_is_an_error():
    model = fresh(network())
    with (
        parallel(model, **TWO),
        pytest.raises(instep.BatchError, match="no batch at all"),
    ):
        model.fit(dataset().take(0), shuffle=False, verbose=0)


def test_rows_in_place_of_batches_are_an_error():
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((X, Y))
    plain = fails(fresh(network()).fit, data, shuffle=False, verbose=0)
    model = fresh(network())
    with parallel(model, **TWO):
        ours = fails(model.fit, data, shuffle=False, verbose=0)
    assert type(ours) is type(plain)
    assert "incompatible" in str(ours)


def test_a_loss_without_reduction_is_an_error():
    model = fresh(network(loss=keras.losses.MeanSquaredError(reduction=None)))
    with (
        parallel(model, **TWO),
        pytest.raises(instep.LossError, match="reduction=None"),
    ):
        model.train_on_batch(X, Y)


@where_models_travel
@pytest.mark.guard(120)
def test_an_exception_in_a_worker_keeps_its_type():
    class Failing(layers.Layer):
        def __init__(self):
            super().__init__()
            self.home = os.getpid()

        def call(self, x):
            if os.getpid() != self.home:
                raise ZeroDivisionError("in a worker")
            return x

    model = fresh(network(hidden=lambda: [Failing()]))
    with (
        parallel(model, workers=1, shards=1),
        pytest.raises(ZeroDivisionError, match="in a worker"),
    ):
        model.fit(X, Y, verbose=0)


@pytest.mark.guard(120)
def test_killed_workers_do_not_change_the_bits():
    def run(kill, **options):
        model = fresh(network(hidden=lambda: [layers.Dropout(0.5, seed=1)]))
        handle = parallel(model, shards=2, **options)
        callback = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: batch == 1 and kill(handle)
        )
        keywords = {"batch_size": 8, "callbacks": [callback], "verbose": 0}
        with handle:
            history = model.fit(X, Y, **keywords).history
            lost = handle.statistics().workers_lost
        return Result(history, values_of(model)).exact, lost

    def kill(handle):
        pids = handle.statistics().pids
        assert pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    expected, _ = run(lambda handle: None, **SERIAL)
    ours, lost = run(kill, workers=2)
    assert ours == expected
    assert lost
