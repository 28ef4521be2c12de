"""y = x^2 with noise, fitted by 20 hidden units in NumPy, as a job file.

instep train parabola_job.py
instep compare parabola_job.py
"""

import numpy as np

import instep

rng = np.random.default_rng(0)
x = rng.uniform(-1, 1, size=(5000, 1))
y = x**2 + 0.05 * rng.normal(size=x.shape)


def loss(params, x, y):
    hidden = np.tanh(x @ params["a"] + params["b"])
    error = hidden @ params["c"] + params["d"] - y
    slope = 2 * error / len(x)
    inner = slope @ params["c"].T * (1 - hidden**2)
    gradient = {
        "a": x.T @ inner,
        "b": inner.sum(0),
        "c": hidden.T @ slope,
        "d": slope.sum(0),
    }
    return np.mean(error**2), gradient


def job():
    start = {
        "a": rng.normal(size=(1, 20)),
        "b": rng.normal(size=20),
        "c": rng.normal(size=(20, 1)) / 4,
        "d": np.zeros(1),
    }
    return instep.Job(start, loss, (x, y), batch_size=500, optimizer=0.1, steps=400)
