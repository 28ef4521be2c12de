"""Batch L-BFGS-B: SciPy coordinates, and workers compute the gradient in 32 portions.

A portion goes to whoever is free, as in Sandblaster L-BFGS (Dean et al., "Large Scale
Distributed Deep Networks", 2012). The model is softmax regression on scanned digits.
"""

import numpy as np
from scipy.optimize import minimize
from sklearn.datasets import load_digits

import instep.numpy

ITERATIONS, PORTIONS, PENALTY = 12, 32, 1e-4

images, labels = load_digits(return_X_y=True)
X = np.column_stack([images / 16, np.ones(len(images))])
y = np.eye(10)[labels]
x0 = np.zeros(X.shape[1] * 10)


def cross_entropy(weights, X, y):
    """Mean over the rows, with a penalty, and its gradient."""
    scores = X @ weights.reshape(-1, 10)
    scores = scores - scores.max(axis=1, keepdims=True)
    log_p = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    value = PENALTY / 2 * weights @ weights - np.mean(np.sum(y * log_p, axis=1))
    gradient = X.T @ (np.exp(log_p) - y) / len(X)
    return value, gradient.ravel() + PENALTY * weights


def descend(**options):
    """The loss after each iteration, and who has computed how many portions."""
    losses = []

    def record(intermediate_result):
        losses.append(intermediate_result.fun)

    with instep.numpy.value_and_grad(cross_entropy, shards=PORTIONS, **options) as pool:
        how = {"method": "L-BFGS-B", "options": {"maxiter": ITERATIONS}}
        minimize(pool, x0, args=(X, y), jac=True, callback=record, **how)
        return losses, pool.statistics().shards_computed


alone, _ = descend(engine="serial")
together, portions = descend(workers=4)
print("iteration  one process        four workers")
for number, pair in enumerate(zip(alone, together, strict=True), start=1):
    print("{:9}  {:.15f}  {:.15f}".format(number, *pair))
print("portions computed by each worker:", *portions)
print("the same bits:", alone == together)
