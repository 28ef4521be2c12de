"""Trains a convolutional network on 1,797 scanned digits with `fit` and four workers.

KERAS_BACKEND=jax, torch or tensorflow chooses who computes.
"""

import time

import keras
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import instep.keras

EPOCHS, BATCH_SIZE, RATE = 15, 128, 1e-2

keras.utils.set_random_seed(2)
images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
x_train, x_test, y_train, y_test = train_test_split(
    images, labels, test_size=0.2, random_state=0, stratify=labels
)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.Conv2D(64, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(10),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(RATE),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
instep.keras.parallel(model, workers=4)  # the one line

begin = time.perf_counter()
model.fit(
    x_train,
    y_train,
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
    validation_data=(x_test, y_test),
    callbacks=[
        keras.callbacks.LearningRateScheduler(lambda k: RATE * (1 - k / EPOCHS)),
        keras.callbacks.TerminateOnNaN(),
    ],
    verbose=2,
)
_, accuracy = model.evaluate(x_test, y_test, verbose=0)
seconds = time.perf_counter() - begin
print(f"held-out accuracy {accuracy:.2%} in {seconds:.0f} s, start-up included")
