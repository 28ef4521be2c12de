"""Trains a convolutional network on 1,797 scanned digits with four workers."""

import time

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import instep.tensorflow

EPOCHS, BATCH_SIZE = 20, 128

tf.keras.utils.set_random_seed(0)  # NumPy's generator too, which shuffles below
images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
x_train, x_test, y_train, y_test = train_test_split(
    images, labels, test_size=0.2, random_state=0, stratify=labels
)

model = tf.keras.Sequential(
    [
        tf.keras.Input([8, 8, 1]),
        tf.keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        tf.keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dropout(0.4),
        tf.keras.layers.Dense(10),
    ]
)
optimizer = tf.keras.optimizers.Adam(3e-3)
cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def loss(model, x, y):
    return cross_entropy(y, model(x, training=True))


def accuracy():
    return np.mean(np.argmax(model(x_test), axis=1) == y_test)


begin = time.perf_counter()
with instep.tensorflow.GradientPool(model, loss, workers=4) as pool:
    for epoch in range(1, EPOCHS + 1):
        order = np.random.permutation(len(x_train))
        for rows in np.split(order, range(BATCH_SIZE, len(order), BATCH_SIZE)):
            value, grads = pool.gradient(x_train[rows], y_train[rows])
            pairs = zip(grads, model.trainable_variables, strict=True)
            optimizer.apply_gradients(pairs)
        if epoch % 4 == 0:
            print(f"epoch {epoch:2}  loss {value:.4f}  accuracy {accuracy():.2%}")

seconds = time.perf_counter() - begin
print(f"held-out accuracy {accuracy():.2%} in {seconds:.0f} s, start-up included")
