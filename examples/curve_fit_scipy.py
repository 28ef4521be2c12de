"""Fits a decay with outliers by maximum likelihood: SciPy drives, workers compute.

The noise is Student's t with 3 degrees of freedom, so outliers pull little.
"""

import numpy as np
from scipy.optimize import minimize

import instep.numpy

ROWS, FREEDOM = 200_000, 3
TRUTH = np.array([2.0, 1.3, 0.5, np.log(0.1)])  # amplitude, rate, offset, log(scale)


def negative_log_likelihood(params, t, y):
    """Mean over the rows, and its gradient."""
    amplitude, rate, offset, log_scale = params
    decay, scale = np.exp(-rate * t), np.exp(log_scale)
    z = (amplitude * decay + offset - y) / scale
    value = np.mean((FREEDOM + 1) / 2 * np.log1p(z**2 / FREEDOM)) + log_scale
    slope = (FREEDOM + 1) * z / (FREEDOM + z**2)
    gradient = [
        np.mean(slope * decay) / scale,
        np.mean(slope * -amplitude * t * decay) / scale,
        np.mean(slope) / scale,
        1 - np.mean(slope * z),
    ]
    return value, np.array(gradient)


random = np.random.default_rng(0)
t = random.uniform(0, 4, ROWS)
noise = np.exp(TRUTH[3]) * random.standard_t(FREEDOM, ROWS)
y = TRUTH[0] * np.exp(-TRUTH[1] * t) + TRUTH[2] + noise

start = np.array([1.0, 1.0, 0.0, 0.0])
with instep.numpy.value_and_grad(negative_log_likelihood, workers=4) as pool:
    fit = minimize(pool, start, args=(t, y), jac=True, method="L-BFGS-B")

print(f"{fit.message} after {fit.nfev} evaluations of {ROWS:,} rows")
for name, true, found in zip(
    ("amplitude", "rate", "offset", "log scale"), TRUTH, fit.x, strict=True
):
    print(f"{name:<10} true {true:7.4f}  fitted {found:7.4f}")
