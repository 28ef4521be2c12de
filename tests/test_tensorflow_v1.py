"""A graph script trains with a pool as it does without one."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref

import numpy as np
import pytest

import instep
from conftest import wait_until
from helpers import bits, both_engines

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1

from instep.tensorflow.v1 import GradientPool  # noqa: E402

pytestmark = pytest.mark.usefixtures("workers_with_only_tensorflow")
X = np.linspace(-2, 2, 50, dtype=np.float32)[:, None]
Y = X**2
SERIAL = {"engine": "serial"}


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def descent(rate=0.01):
    return v1.train.GradientDescentOptimizer(rate)


def variable(name, value, **options):
    return v1.get_variable(name, initializer=np.float32(value), **options)


def session():
    running = v1.Session()
    running.run(v1.global_variables_initializer())
    return running


def parabola(*arguments, **options):
    """Trains the 1-5-1 network of the script; its parameters at the end."""
    (result,) = parabolas([None], *arguments, **options)
    return result


def parabolas(numbers, optimizer=None, resource=True, steps=300, **options):
    """The same from the start for each number of workers of one pool.

    Several pools would import TensorFlow several times.
    """
    draw = np.random.RandomState(0)
    with tf.Graph().as_default():
        xs = v1.placeholder(tf.float32, [None, 1])
        ys = v1.placeholder(tf.float32, [None, 1])

        def layer(name, shape):
            return variable(name, draw.randn(*shape), use_resource=resource)

        hidden = tf.tanh(xs @ layer("w1", (1, 5)) + layer("b1", (5,)))
        out = hidden @ layer("w2", (5, 1)) + layer("b2", (1,))
        loss = tf.reduce_mean(tf.reduce_sum(tf.square(ys - out), axis=1))
        optimizer = optimizer() if optimizer else descent()
        pool = GradientPool(loss, batch=[xs, ys], **options) if options else None
        pairs = (pool or optimizer).compute_gradients(optimizer if pool else loss)
        step = v1.train.get_or_create_global_step()
        train_op = optimizer.apply_gradients(pairs, global_step=step)
        results = []
        for number in numbers:
            if number is not None:
                pool.resize(number)
                pool.load_state_dict({**pool.state_dict(), "steps": 0})
            with session() as sess:
                for _ in range(steps):
                    sess.run(train_op, {xs: X, ys: Y})
                assert sess.run(step) == steps
                results.append(sess.run(v1.trainable_variables()))
        if pool:
            pool.close()
    return results


@pytest.mark.parametrize("resource", [True, False])
def test_one_shard_gives_the_bits_of_the_script_without_a_pool(resource):
    pooled = parabola(resource=resource, steps=500, shards=1, **SERIAL)
    assert bits(pooled) == bits(parabola(resource=resource, steps=500))


@pytest.mark.guard(120)
def test_a_worker_process_gives_the_bits_of_the_script_without_a_pool():
    assert bits(parabola(steps=300, workers=1)) == bits(parabola(steps=300))


def test_slots_of_an_optimizer_stay_in_the_master():
    def adam():
        return v1.train.AdamOptimizer(0.01)

    pooled = parabola(adam, steps=300, shards=1, **SERIAL)
    assert bits(pooled) == bits(parabola(adam, steps=300))


def test_four_shards_follow_the_script_without_a_pool():
    pooled, alone = parabola(steps=500, shards=4, **SERIAL), parabola(steps=500)
    for ours, theirs in zip(pooled, alone, strict=True):
        # Rounding of 500 steps; each step's gradient differs in the last bits.
        np.testing.assert_allclose(ours, theirs, rtol=2.5e-5)


@pytest.mark.guard(180)
def test_bits_do_not_depend_on_the_number_of_workers():
    expected = bits(parabola(steps=20, shards=4, **SERIAL))
    for found in parabolas([7, 1, 2, 3, 4], steps=20, shards=4, workers=7):
        assert bits(found) == expected


@both_engines
@pytest.mark.guard(120)
def test_uneven_shards_give_the_whole_batch_gradient(engine):
    # The shards' means are 9, 26 and 42.5; their plain mean would be 25.8333.
    xs = v1.placeholder(tf.float32, [None])
    loss = tf.reduce_mean(variable("w", 2.0) * xs)
    with GradientPool(loss, batch=[xs], workers=2, shards=3, engine=engine) as pool:
        ((gradient, _),) = pool.compute_gradients(descent())
        with session() as sess:
            feed = {xs: np.arange(1, 51)}
            assert sess.run([pool.loss, gradient], feed) == [51.0, 25.5]
            assert pool.evaluate(np.arange(1, 51)) == 51.0


def test_a_sum_is_added_over_shards():
    xs = v1.placeholder(tf.float32, [None])
    w = variable("w", 1.0)
    loss = tf.reduce_sum((xs * w) ** 2)
    optimizer = descent(0.001)
    with GradientPool(loss, [xs], shards=2, reduction="sum", **SERIAL) as pool:
        pairs = pool.compute_gradients(optimizer)
        train_op = optimizer.apply_gradients(pairs)
        with session() as sess:
            feed = {xs: [-1, 2, -3, 4]}
            assert sess.run(pairs[0][0], feed) == 60
            sess.run(train_op, feed)
            assert sess.run(w) == np.float32(0.94)


def test_a_weighted_loss_is_the_mean_over_all_weights():
    xs, mask = v1.placeholder(tf.float32, [None]), v1.placeholder(tf.float32, [None])
    total = tf.reduce_sum(mask)
    loss = tf.reduce_sum(variable("w", 1.0) * xs * mask) / total
    weighted = instep.Weighted(loss, total)
    with GradientPool(weighted, [xs, mask], shards=3, **SERIAL) as pool:
        ((gradient, _),) = pool.compute_gradients(descent())
        with session() as sess:
            # The last shard has no valid row: its mean is 0/0 and counts for nothing.
            feed = {xs: [1, 2, 3, 4, 5, 6], mask: [1, 0, 1, 1, 0, 0]}
            assert sess.run([pool.loss, gradient], feed) == [8 / np.float32(3)] * 2


def test_a_gradient_that_is_none_stays_none():
    xs = v1.placeholder(tf.float32, [None])
    a, b = variable("a", 1.0), variable("b", 1.0)
    with GradientPool(tf.reduce_mean(a * xs), [xs], shards=2, **SERIAL) as pool:
        pairs = pool.compute_gradients(descent(), var_list=[b, a])
        assert pairs[0] == (None, b)
        with session() as sess:
            assert sess.run(pairs[1][0], {xs: [1, 2, 6]}) == 3


@pytest.mark.parametrize("resource", [True, False])
def test_indexed_slices_stay_sparse_and_add_up_to_the_mean(resource):
    rows = v1.placeholder(tf.int32, [None])
    table = v1.get_variable("t", initializer=tf.zeros([5, 2]), use_resource=resource)
    loss = tf.reduce_mean(tf.reduce_sum(tf.gather(table, rows), 1))
    with GradientPool(loss, [rows], shards=2, **SERIAL) as pool:
        ((gradient, _),) = pool.compute_gradients(descent())
        assert isinstance(gradient, tf.IndexedSlices)
        with session() as sess:
            feed = {rows: [0, 1, 0, 2]}
            dense = sess.run(tf.convert_to_tensor(gradient), feed)
            assert sess.run(gradient.indices, feed).tolist() == [0, 1, 0, 2]
    assert dense[:, 0].tolist() == [0.5, 0.25, 0.25, 0, 0]


def test_other_placeholders_go_whole_to_every_shard():
    xs, scale = v1.placeholder(tf.float32, [None]), v1.placeholder(tf.float32, [])
    offset = v1.placeholder_with_default([1.0, 2.0], [2])
    loss = tf.reduce_mean(variable("w", 1.0) * xs) * scale + tf.reduce_sum(offset)
    with GradientPool(loss, [xs], shards=2, **SERIAL) as pool:
        ((gradient, _),) = pool.compute_gradients(descent())
        with session() as sess:
            feed = {xs: [1, 3], scale: 10}
            assert sess.run([pool.loss, gradient], feed) == [23, 20]
            assert pool.evaluate([1, 3], feed_dict={scale: 1, offset: [0, 0]}) == 2


def test_any_tensor_can_be_cut_out_as_the_batch():
    data = tf.data.Dataset.from_tensors(([1.0, 3.0], [2.0, 2.0])).repeat()
    x, y = v1.data.make_one_shot_iterator(data).get_next()
    loss = tf.reduce_mean(variable("w", 1.0) * x * y)
    with GradientPool(loss, [x, y], shards=2, **SERIAL) as pool:
        ((gradient, _),) = pool.compute_gradients(descent())
        with session() as sess:
            assert sess.run(gradient) == 4


def test_a_python_function_before_the_batch_stays_in_the_master():
    xs = v1.placeholder(tf.float32, [None])
    doubled = tf.numpy_function(lambda x: 2 * x, [xs], tf.float32)
    doubled.set_shape([None])
    loss = tf.reduce_mean(variable("w", 1.0) * doubled)
    with GradientPool(loss, [doubled], shards=2, **SERIAL) as pool:
        ((gradient, _),) = pool.compute_gradients(descent())
        with session() as sess:
            assert sess.run(gradient, {xs: [1, 3]}) == 4


def test_a_finalized_graph_runs_and_grows_no_ops(graph):
    xs = v1.placeholder(tf.float32, [None])
    optimizer = descent()
    loss = tf.reduce_mean(variable("w", 1.0) * xs)
    with GradientPool(loss, [xs], shards=2, **SERIAL) as pool, session() as sess:
        train_op = optimizer.apply_gradients(pool.compute_gradients(optimizer))
        graph.finalize()
        number = len(graph.get_operations())
        for _ in range(100):
            sess.run(train_op, {xs: [1, 2, 3]})
        pool.evaluate([1, 2, 3], session=sess)
        assert len(graph.get_operations()) == number


def test_a_pool_serves_several_optimizers():
    xs = v1.placeholder(tf.float32, [None])
    a, b = variable("a", 2.0), variable("b", 3.0)
    with GradientPool(tf.reduce_mean(a * b * xs), [xs], shards=2, **SERIAL) as pool:
        ((by_a, _),) = pool.compute_gradients(descent(), var_list=[a])
        ((by_b, _),) = pool.compute_gradients(descent(), var_list=[b])
        with session() as sess:
            for _ in range(2):
                assert sess.run([by_a, by_b], {xs: [1, 3]}) == [6, 4]


def test_loops_and_branches_ship():
    xs, deep = v1.placeholder(tf.float32, [None]), v1.placeholder(tf.bool, [])
    w = variable("w", 2.0)
    power = tf.while_loop(lambda k, p: k < 3, lambda k, p: (k + 1, p * w), [0, xs])[1]
    loss = tf.reduce_mean(tf.cond(deep, lambda: power, lambda: xs * w))
    with GradientPool(loss, [xs], shards=2, **SERIAL) as pool:
        ((gradient, _),) = pool.compute_gradients(descent())
        with session() as sess:
            assert sess.run(gradient, {xs: [1, 3], deep: True}) == 2 * 3 * 2**2
            assert sess.run(gradient, {xs: [1, 3], deep: False}) == 2


def noise_of(loss_of, steps=3, **options):
    """Pooled losses of a loss that draws random numbers, step by step."""
    with tf.Graph().as_default():
        xs = v1.placeholder(tf.float32, [None, 3])
        loss = loss_of(xs) * variable("w", 1.0)
        with GradientPool(loss, [xs], **options) as pool:
            pool.compute_gradients(descent())
            with session() as sess:
                ones = np.ones((8, 3))
                return [sess.run(pool.loss, {xs: ones}).item() for _ in range(steps)]


def in_a_loop(xs):
    def body(k, total):
        return k + 1, total + 10.0**k * tf.reduce_mean(tf.random.uniform(tf.shape(xs)))

    return tf.while_loop(lambda k, _: k < 3, body, [0.0, 0.0])[1]


def in_an_old_loop(xs):
    v1.disable_control_flow_v2()
    try:
        return in_a_loop(xs)
    finally:
        v1.enable_control_flow_v2()


def in_a_function(xs):
    @tf.function
    def draw(x):
        return tf.reduce_mean(tf.random.normal(tf.shape(x)) * x)

    return draw(xs) + 10 * draw(xs)


RANDOM = {
    "dropout": lambda xs: tf.reduce_mean(tf.nn.dropout(xs, 0.5)),
    "integers": lambda xs: tf.reduce_mean(
        tf.cast(tf.random.uniform(tf.shape(xs), 0, 1000, tf.int32), tf.float32)
    ),
    "truncated": lambda xs: tf.reduce_mean(xs * tf.random.truncated_normal([3])),
    "categorical": lambda xs: tf.reduce_mean(
        tf.cast(tf.random.categorical(xs, 20), tf.float32)
    ),
    "gamma": lambda xs: tf.reduce_mean(tf.random.gamma([5], xs)),
    "poisson": lambda xs: tf.reduce_mean(tf.random.poisson([5], 9 * xs)),
    "loop": in_a_loop,
    "old loop": in_an_old_loop,
    "function": in_a_function,
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_ops_depend_on_seed_step_and_shard_alone(name):
    first = noise_of(RANDOM[name], shards=2, **SERIAL)
    assert len(set(first)) == 3  # steps differ
    assert noise_of(RANDOM[name], shards=2, **SERIAL) == first
    assert noise_of(RANDOM[name], shards=2, seed=1, **SERIAL) != first


@pytest.mark.guard(120)
def test_random_ops_give_the_same_numbers_in_worker_processes():
    def everything(xs):
        return sum(loss_of(xs) for loss_of in RANDOM.values())

    expected = noise_of(everything, shards=3, **SERIAL)
    assert noise_of(everything, shards=3, workers=2) == expected


def test_a_random_op_in_a_loop_draws_anew_each_time():
    def first_minus_second(xs):
        def body(sign, total):
            return -sign, total + sign * tf.random.uniform([])

        loop = tf.while_loop(lambda *_: True, body, [1.0, 0.0], maximum_iterations=2)
        return loop[1] * tf.reduce_mean(xs)

    assert noise_of(first_minus_second, steps=1, shards=1, **SERIAL) != [0]


def test_random_numbers_are_spread_as_they_should_be():
    def moments(xs):
        x = tf.random.normal([100_000], 3.0, 2.0)
        return (tf.reduce_mean(x) + 100 * tf.math.reduce_std(x)) * tf.reduce_mean(xs)

    (value,) = noise_of(moments, steps=1, shards=1, **SERIAL)
    # 3 + 100 * 2, within five standard errors of the mean and of the deviation.
    assert abs(value - 203) < 5 * (2 + 100 * 2 / np.sqrt(2)) / np.sqrt(100_000)


def test_a_random_op_without_a_stateless_version_is_named():
    xs = v1.placeholder(tf.float32, [None])
    loss = tf.reduce_mean(tf.random.shuffle(xs) * variable("w", 1.0))
    with pytest.raises(instep.ShipError, match="RandomShuffle"):
        GradientPool(loss, [xs], **SERIAL)


@pytest.mark.parametrize("resource", [True, False])
def test_updates_on_a_control_edge_run_once_in_the_master(resource):
    xs = v1.placeholder(tf.float32, [None])
    mean = variable("m", 0.0, trainable=False, use_resource=resource)
    with tf.control_dependencies([mean.assign_add(tf.reduce_mean(xs))]):
        loss = tf.reduce_mean(variable("w", 1.0, use_resource=resource) * xs)
    with GradientPool(loss, [xs], shards=2, **SERIAL) as pool:
        ((gradient, _),) = pool.compute_gradients(descent())
        with session() as sess:
            assert sess.run(gradient, {xs: [1, 3]}) == 2
            assert sess.run(mean) == 2


def test_updates_the_script_runs_beside_the_train_op_are_the_masters():
    xs = v1.placeholder(tf.float32, [None])
    mean = variable("m", 0.0, trainable=False)
    update = mean.assign_add(tf.reduce_mean(xs))
    loss = tf.reduce_mean(variable("w", 1.0) * xs)
    with GradientPool(loss, [xs], shards=2, **SERIAL) as pool:
        with tf.control_dependencies([update]):
            ((gradient, _),) = pool.compute_gradients(descent())
        with session() as sess:
            sess.run(gradient, {xs: [1, 3]})
            assert sess.run(mean) == 2


def test_a_loss_computed_from_an_update_sees_it_or_is_refused():
    xs = v1.placeholder(tf.float32, [None])
    row = tf.reduce_mean(variable("w", 1.0) * xs)
    count = variable("c", 0.0, trainable=False)
    with GradientPool(row + count.assign_add(1.0), [xs], **SERIAL) as pool:
        pool.compute_gradients(descent())
        with session() as sess:
            assert [sess.run(pool.loss, {xs: [1, 3]}) for _ in range(2)] == [3, 4]
    reference = variable("r", 0.0, trainable=False, use_resource=False)
    with pytest.raises(instep.ShipError, match="AssignAdd"):
        GradientPool(row + reference.assign_add(1.0), [xs], **SERIAL)


def test_what_cannot_be_shipped_is_named():
    xs = v1.placeholder(tf.float32, [None])
    strange = tf.numpy_function(lambda x: x, [xs], tf.float32, name="mine")
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([0], [1.0]), 0.0
    )
    looked_up = table.lookup(tf.cast(xs, tf.int32))
    for value, what in ((strange, "PyFunc.*mine"), (looked_up, "LookupTableFind")):
        loss = tf.reduce_mean(variable(f"w_{what[:3]}", 1.0) * value)
        with pytest.raises(instep.ShipError, match=what):
            GradientPool(loss, [xs], **SERIAL)


def test_wrong_arguments_are_named():
    xs, other = v1.placeholder(tf.float32, [None]), v1.placeholder(tf.float32, [None])
    number = v1.placeholder(tf.float32, [])
    w = variable("w", 1.0)
    loss = tf.reduce_mean(w * xs) * number
    for wrong, error, text in (
        ((w * xs, [xs]), instep.LossError, r"shape \(None,\)"),
        ((1.0, [xs]), instep.LossError, "float"),
        ((loss, [xs, other]), instep.BatchError, r"batch\[1\].*does not enter"),
        ((loss, []), instep.BatchError, "expected a list"),
        ((loss, [xs, number]), instep.BatchError, "scalar"),
        ((tf.reduce_mean(xs), [xs]), instep.LossError, "any variable"),
    ):
        with pytest.raises(error, match=text):
            GradientPool(*wrong, **SERIAL)


def test_a_loss_without_gradient_is_refused():
    xs = v1.placeholder(tf.float32, [None])
    a, b = variable("a", 1.0), variable("b", 1.0)
    inside = GradientPool(tf.reduce_mean(a * xs), [xs], **SERIAL)
    with inside as pool, pytest.raises(instep.GradientError, match="none of"):
        pool.compute_gradients(descent(), var_list=[b])
    behind = a * xs
    outside = GradientPool(tf.reduce_mean(b * behind), [behind], **SERIAL)
    with outside as pool, pytest.raises(instep.GradientError, match="depend on"):
        pool.compute_gradients(descent())


def test_a_forgotten_batch_placeholder_is_named():
    xs, ys = v1.placeholder(tf.float32, [None]), v1.placeholder(tf.float32, [None])
    loss = tf.reduce_mean(variable("w", 1.0) * xs) + tf.reduce_mean(ys)
    with GradientPool(loss, [xs], shards=2, **SERIAL) as pool:
        ((gradient, _),) = pool.compute_gradients(descent())
        with session() as sess, pytest.raises(instep.BatchError, match=ys.name):
            sess.run(gradient, {xs: [1, 2], ys: [3, 4]})


@both_engines
@pytest.mark.guard(120)
def test_an_error_in_a_shard_keeps_its_type(engine):
    xs = v1.placeholder(tf.float32, [None])
    check = v1.Assert(tf.reduce_all(xs < 9), ["bad row"])
    with tf.control_dependencies([check]):
        loss = tf.reduce_mean(variable("w", 1.0) * xs)
    options = {"workers": 2, "shards": 2, "engine": engine}
    with GradientPool(loss, [xs], **options) as pool:
        ((gradient, _),) = pool.compute_gradients(descent())
        with session() as sess:
            with pytest.raises(tf.errors.InvalidArgumentError, match="bad row") as info:
                sess.run(gradient, {xs: [1, 2, 3, 9]})
            assert "shard 1 of 2" in str(info.value) + str(info.value.__notes__)
            assert sess.run(gradient, {xs: [1, 2, 3, 6]}) == 3


def test_rows_that_differ_are_named():
    xs, ys = v1.placeholder(tf.float32, [None]), v1.placeholder(tf.float32, [None])
    loss = tf.reduce_mean(variable("w", 1.0) * xs) + tf.reduce_mean(ys)
    with GradientPool(loss, [xs, ys], shards=2, **SERIAL) as pool:
        ((gradient, _),) = pool.compute_gradients(descent())
        with session() as sess, pytest.raises(instep.BatchError, match="3 rows"):
            sess.run(gradient, {xs: [1, 2], ys: [3, 4, 5]})


def test_a_closed_pool_says_so_when_the_train_op_runs():
    xs = v1.placeholder(tf.float32, [None])
    pool = GradientPool(tf.reduce_mean(variable("w", 1.0) * xs), [xs], **SERIAL)
    ((gradient, _),) = pool.compute_gradients(descent())
    pool.close()
    with session() as sess, pytest.raises(instep.PoolClosedError):
        sess.run(gradient, {xs: [1, 2]})


def interrupt_in_mid_step(pool):
    """Sends Ctrl-C to this process while a worker computes and the master waits."""
    engine = pool._engine
    wait_until(
        lambda: engine.busy() and engine._is_receiving, "the step does not begin"
    )
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.guard(120)
def test_ctrl_c_ends_a_step_at_once():
    xs = v1.placeholder(tf.float32, [None])
    # Goes round for ever once an x is positive.
    (looped,) = tf.while_loop(
        lambda x: tf.reduce_any(x > 0), lambda x: (tf.abs(x),), [xs], back_prop=False
    )
    loss = tf.reduce_mean(looped * variable("w", 1.0))
    with GradientPool(loss, [xs], workers=1) as pool:
        ((gradient, _),) = pool.compute_gradients(descent())
        with session() as sess:
            assert sess.run(gradient, {xs: [-1]}) == -1
            thread = threading.Thread(target=interrupt_in_mid_step, args=[pool])
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                sess.run(gradient, {xs: [1]})
            thread.join()
            assert sess.run(gradient, {xs: [-1]}) == -1


def test_a_session_in_another_thread_trains_too():
    xs = v1.placeholder(tf.float32, [None])
    with GradientPool(
        tf.reduce_mean(variable("w", 1.0) * xs), [xs], shards=2, **SERIAL
    ) as pool:
        ((gradient, _),) = pool.compute_gradients(descent())
        with session() as sess:
            got = []
            threads = [
                threading.Thread(
                    target=lambda k=k: got.append(sess.run(gradient, {xs: [k, k]}))
                )
                for k in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(got) == [0, 1, 2, 3]
            direct = sess.make_callable(gradient, feed_list=[xs])
            assert direct([1, 3]) == 2


def test_evaluate_needs_a_session():
    xs = v1.placeholder(tf.float32, [None])
    loss = tf.reduce_mean(variable("w", 1.0) * xs)
    with GradientPool(loss, [xs], **SERIAL) as pool:
        with pytest.raises(instep.ArgumentError, match="session"):
            pool.evaluate([1.0])
        with session(), pytest.raises(instep.BatchError, match="2 arrays"):
            pool.evaluate([1.0], [2.0])


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_float_dtypes_come_back_as_they_were(dtype):
    xs = v1.placeholder(dtype, [None])
    w = v1.get_variable("w", initializer=tf.constant(1.0, dtype))
    with GradientPool(tf.reduce_mean(w * xs), [xs], shards=2, **SERIAL) as pool:
        ((gradient, _),) = pool.compute_gradients(descent())
        with session() as sess:
            value = sess.run(gradient, {xs: [1, 2, 6]})
    assert (value, value.dtype) == (3, dtype.as_numpy_dtype)


def test_a_pool_goes_with_its_graph():
    def use():
        with tf.Graph().as_default(), v1.Session() as sess:
            xs = v1.placeholder(tf.float32, [None])
            loss = tf.reduce_mean(variable("w", 1.0) * xs)
            pool = GradientPool(loss, [xs], **SERIAL)
            ((gradient, w),) = pool.compute_gradients(descent())
            sess.run(w.initializer)
            sess.run(gradient, {xs: [1, 2]})
        return weakref.ref(pool)

    pool = use()
    gc.collect()
    assert pool() is None
