"""Batch L-BFGS: the gradient of all rows in 32 portions, by whoever is free.

The closure of `torch.optim.LBFGS` calls the pool. The coordinator, the portions much
smaller than a worker's share and their handing out one by one are those of Sandblaster
L-BFGS (Dean et al., "Large Scale Distributed Deep Networks", 2012).
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import instep.torch

ITERATIONS, PORTIONS = 12, 32

torch.set_num_threads(1)  # the workers need the cores
images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
images = images.float() / 16


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def minimize(**options):
    """The loss at every point tried, the parameters, and who has computed how much."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    lbfgs = torch.optim.LBFGS(
        model.parameters(), max_iter=ITERATIONS, line_search_fn="strong_wolfe"
    )
    losses = []
    with instep.torch.GradientPool(model, loss, shards=PORTIONS, **options) as pool:

        def closure():
            lbfgs.zero_grad()
            value = pool.backward(images, labels)
            losses.append(value.item())
            return value

        lbfgs.step(closure)
        return losses, model.state_dict(), pool.statistics().shards_computed


alone, weights, _ = minimize(engine="serial")
together, found, portions = minimize(workers=4)
print("evaluation  one process  four workers")
for number, pair in enumerate(zip(alone, together, strict=True), start=1):
    print("{:10}  {:11.8f}  {:12.8f}".format(number, *pair))
print("portions computed by each worker:", *portions)
is_same = all(torch.equal(weights[name], found[name]) for name in weights)
print("the same bits:", alone == together and is_same)
