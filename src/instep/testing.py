"""What every engine and every adapter has to do, as checks anyone can run.

    instep.testing.check_engine("processes")
    instep.testing.check_adapter(make_pool, call, reference)

Each fact is a function of its own, named after it; a check runs them all and an
AssertionError says which one does not hold, and how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from instep import numpy as instep_numpy
from instep._errors import PoolClosedError
from instep._pool import Pool
from instep._tree import flatten, leaf_names
from instep._values import Sum, Weighted

WORKERS = (1, 2, 3, 4, 7)

# An engine's name, or a function that makes a new one for every pool.
AnyEngine = str | Callable[[], Any]


def assert_same_bits(first: Any, *others: Any) -> None:
    """Asserts that trees of arrays are the same down to the last bit.

    Args:
        first: a tree of arrays, tensors or numbers.
        *others: trees to compare with it; dtypes and shapes must be equal too.

    Raises:
        AssertionError: names the leaf and how many of its values differ.

    Example:
        >>> import numpy as np
        >>> assert_same_bits({"w": np.zeros(2)}, {"w": np.zeros(2)})
        >>> assert_same_bits(np.float32(0.0), np.float32(-0.0))
        Traceback (most recent call last):
        ...
        AssertionError: result: 1 of 1 values have other bits, first 0.0 and -0.0
    """
    leaves, structure = flatten(first)
    names = leaf_names(structure, "result")
    for other in others:
        found, form = flatten(other)
        assert form == structure, f"other structure: {leaf_names(form, 'result')}"
        for name, a, b in zip(names, leaves, found, strict=True):
            _assert_same_leaf(name, np.asarray(a), np.asarray(b))


def check_engine(engine: AnyEngine, workers: Sequence[int] = WORKERS) -> None:
    """Runs all `ENGINE_FACTS` against an engine; the serial one is the measure.

    Args:
        engine: its name, or a function that makes one.
        workers: numbers of workers to try.

    Raises:
        AssertionError: a fact does not hold.
    """
    for fact in ENGINE_FACTS:
        fact(engine, workers)


def check_adapter(
    make_pool: Callable[..., Pool],
    call: Callable[[Pool], Any],
    reference: Callable[[], Any],
    *,
    engine: AnyEngine = "processes",
    workers: Sequence[int] = WORKERS,
    rtol: float = 1e-5,
) -> None:
    """Checks that a pool gives what one process gives.

    Args:
        make_pool: `make_pool(workers=, shards=, engine=)` -> a new pool, its model
            in the same state every time.
        call: what is done with it; returns a tree of arrays (loss, gradients).
        reference: the same without a pool, in this process.
        engine: the one to compare with the serial one.
        workers: numbers of workers to try at four shards.
        rtol: how far four shards may be from one, relative to the largest value of
            each array: rounding makes a difference.

    Raises:
        AssertionError: a fact does not hold.
    """
    expected = reference()
    serial = partial(make_pool, workers=1, engine="serial")
    assert_same_bits(expected, _result(serial(shards=1), call))
    sharded = _result(serial(shards=4), call)
    _assert_close(expected, sharded, rtol)
    for number in workers:
        pool = make_pool(workers=number, shards=4, engine=_made(engine))
        assert_same_bits(sharded, _result(pool, call))


# The facts about engines


def bits_do_not_depend_on_the_number_of_workers(
    engine: AnyEngine, workers: Sequence[int]
) -> None:
    expected = _least_squares("serial", 1, shards=5)
    for number in workers:
        assert_same_bits(expected, _least_squares(engine, number, shards=5))


def one_shard_gives_the_function_s_own_bits(
    engine: AnyEngine, workers: Sequence[int]
) -> None:
    assert_same_bits(_fun(_W, _X, _Y), _least_squares(engine, 1, shards=1))


def large_gradients_give_the_serial_bits(
    engine: AnyEngine, workers: Sequence[int]
) -> None:
    expected = _large("serial", 1)
    for number in workers:
        assert_same_bits(expected, _large(engine, number))


def shards_without_rows_are_not_computed(
    engine: AnyEngine, workers: Sequence[int]
) -> None:
    with _pool(_mean_of_rows, engine, max(workers), shards=4) as pool:
        assert_same_bits((np.float64(4.0), np.float64(2.0)), _numbers(pool, [1.0, 3.0]))


def weights_aux_and_missing_numbers_combine(
    engine: AnyEngine, workers: Sequence[int]
) -> None:
    with _pool(_with_aux, engine, max(workers), shards=2, has_aux=True) as pool:
        (loss, aux), grad = pool(np.float64(1.0), np.array([5.0, np.nan, 3.0, 1.0]))
    assert (float(loss), float(grad)) == (3.0, 3.0)
    assert (float(aux["count"]), aux["rows"].tolist()) == (3, [0, 1, 0, 0])


def an_error_keeps_its_type_and_the_pool_its_use(
    engine: AnyEngine, workers: Sequence[int]
) -> None:
    with _pool(_refuses_negative_rows, engine, max(workers), shards=3) as pool:
        error = _raised(lambda: _numbers(pool, [1.0, 2.0, -17.0]))
        assert isinstance(error, ValueError), f"{error!r} in place of the ValueError"
        assert "bad row -17.0" in str(error)
        assert "shard 2 of 3" in str(error.__cause__)
        assert_same_bits((np.float64(4.0), np.float64(2.0)), _numbers(pool, [1.0, 3.0]))


def random_numbers_follow_from_seed_step_and_shard(
    engine: AnyEngine, workers: Sequence[int]
) -> None:
    expected = _random_steps("serial", 1)
    assert len({float(loss) for loss in expected}) == len(expected)
    for number in workers:
        assert_same_bits(expected, _random_steps(engine, number))


def an_evaluation_is_no_step(engine: AnyEngine, workers: Sequence[int]) -> None:
    with _pool(_fun, engine, max(workers), shards=3) as pool:
        assert_same_bits(pool(_W, _X, _Y)[0], pool.evaluate(_W, _X, _Y))
        assert pool.statistics().steps == 1


def a_closed_pool_says_so(engine: AnyEngine, workers: Sequence[int]) -> None:
    pool = _pool(_fun, engine, max(workers), shards=2)
    pool.close()
    pool.close()
    error = _raised(lambda: pool(_W, _X, _Y))
    assert isinstance(error, PoolClosedError), f"{error!r} in place of PoolClosedError"


ENGINE_FACTS = (
    bits_do_not_depend_on_the_number_of_workers,
    one_shard_gives_the_function_s_own_bits,
    large_gradients_give_the_serial_bits,
    shards_without_rows_are_not_computed,
    weights_aux_and_missing_numbers_combine,
    an_error_keeps_its_type_and_the_pool_its_use,
    random_numbers_follow_from_seed_step_and_shard,
    an_evaluation_is_no_step,
    a_closed_pool_says_so,
)

# The losses they use. They live here, so that workers can import them.

_X = np.linspace(-1, 1, 23 * 3).reshape(23, 3).astype(np.float32)
_Y = np.linspace(2, -1, 23).astype(np.float32)
_W = np.array([0.5, -0.25, 3.0], np.float32)


def _fun(w: Any, x: Any, y: Any) -> Any:
    residual = x @ w - y
    return np.mean(residual**2), np.float32(2 / len(y)) * (x.T @ residual)


def _mean_of_rows(w: Any, x: Any) -> Any:
    assert len(x), "the loss was called on an empty shard"
    return 2 * w * np.mean(x), np.mean(x)


def _with_aux(w: Any, x: Any) -> Any:
    is_missing = np.isnan(x)
    mean = np.nanmean(x)
    aux = {"count": Sum((~is_missing).sum()), "rows": is_missing.astype(int)}
    return (Weighted(w * mean, (~is_missing).sum()), aux), mean


def _refuses_negative_rows(w: Any, x: Any) -> Any:
    if (x < 0).any():
        raise ValueError(f"bad row {x.min()}")
    return _mean_of_rows(w, x)


def _noise(w: Any, x: Any) -> Any:
    return np.random.rand(), w * np.random.rand(len(w)).astype(w.dtype)


def _outer(w: Any, x: Any) -> Any:
    return np.float32(0), w * np.mean(x)


def _least_squares(engine: AnyEngine, workers: int, shards: int) -> Any:
    with _pool(_fun, engine, workers, shards=shards) as pool:
        return pool(_W, _X, _Y)


def _large(engine: AnyEngine, workers: int) -> Any:
    w = np.linspace(-1, 1, 1_200_001).astype(np.float32)  # 4.8 MB, an odd number
    with _pool(_outer, engine, workers, shards=3) as pool:
        return [pool(w, np.arange(7.0, dtype=np.float32) * k)[1] for k in (1, 2)]


def _random_steps(engine: AnyEngine, workers: int) -> list[Any]:
    with _pool(_noise, engine, workers, shards=4) as pool:
        return [pool(_W, _X)[0] for _ in range(3)]


def _numbers(pool: Any, rows: list[float]) -> Any:
    return pool(np.float64(1.0), np.array(rows))


def _raised(action: Callable[[], Any]) -> BaseException | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def _pool(fun: Any, engine: AnyEngine, workers: int, **options: Any) -> Any:
    return instep_numpy.value_and_grad(
        fun, engine=_made(engine), workers=workers, **options
    )


def _made(engine: AnyEngine) -> Any:
    return engine if isinstance(engine, str) else engine()


def _result(pool: Pool, call: Callable[[Any], Any]) -> Any:
    with pool:
        return call(pool)


def _assert_same_leaf(name: str, a: Any, b: Any) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape), (
        f"{name}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
    )
    if a.tobytes() == b.tobytes():
        return
    one, two = (np.ascontiguousarray(x).reshape(-1) for x in (a, b))
    size = a.itemsize
    rows = (x.view(np.uint8).reshape(-1, size) for x in (one, two))
    places = np.flatnonzero((next(rows) != next(rows)).any(axis=1))
    raise AssertionError(
        f"{name}: {len(places)} of {a.size} values have other bits, first "
        f"{one[places[0]]} and {two[places[0]]}"
    )


def _assert_close(expected: Any, found: Any, rtol: float) -> None:
    leaves, structure = flatten(expected)
    names = leaf_names(structure, "result")
    for name, a, b in zip(names, leaves, flatten(found)[0], strict=True):
        a, b = np.asarray(a), np.asarray(b)
        limit = rtol * max(float(np.max(np.abs(a), initial=0)), 1e-30)
        worst = float(np.max(np.abs(a - b), initial=0))
        assert worst <= limit, f"{name}: differs by {worst}; expected at most {limit}"
