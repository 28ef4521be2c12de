"""Trains a perceptron with optax on 1,797 scanned digits, on four workers."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import instep.jax

EPOCHS, BATCH_SIZE, HIDDEN = 40, 128, 512

images, labels = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(
    images.astype(np.float32) / 16,
    labels,
    test_size=0.2,
    random_state=0,
    stratify=labels,
)


def predict(params, x):
    hidden = jax.nn.relu(x @ params["hidden"] + params["bias"])
    return hidden @ params["out"]


def loss(params, x, y, key):
    x += 0.3 * jax.random.normal(key, x.shape)  # other noise in every shard
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, x), y).mean()


@jax.jit
def update(params, state, grads):
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


key, *keys = jax.random.split(jax.random.key(0), 3)
params = {
    "hidden": jax.random.normal(keys[0], (64, HIDDEN)) / 6,
    "bias": jnp.zeros(HIDDEN),
    "out": jax.random.normal(keys[1], (HIDDEN, 10)) / 16,
}
optimizer = optax.adamw(3e-3)
state, generator = optimizer.init(params), np.random.default_rng(0)
begin = time.perf_counter()
with instep.jax.value_and_grad(loss, workers=4) as value_and_grad:
    for _ in range(EPOCHS):
        order = generator.permutation(len(x_train))
        for rows in np.split(order, range(BATCH_SIZE, len(order), BATCH_SIZE)):
            key, new = jax.random.split(key)
            _, grads = value_and_grad(params, x_train[rows], y_train[rows], new)
            params, state = update(params, state, grads)
accuracy = np.mean(np.argmax(predict(params, x_test), axis=1) == y_test)
print(f"held-out accuracy {accuracy:.2%} in {time.perf_counter() - begin:.0f} s")
