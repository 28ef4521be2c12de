"""Training in TensorFlow, as a graph script (`tf.compat.v1`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import instep.tensorflow.v1
from instep._demo.parabola import LEARNING_RATE, Parameters, points
from instep._demo.trainer import PoolSize, wait_for_workers

v1 = tf.compat.v1


def make(parameters: Parameters, size: PoolSize | None) -> GraphTrainer:
    """A trainer that starts from `parameters`."""
    trainer = GraphTrainer(parameters, size)
    if trainer.pool is not None:
        wait_for_workers(trainer.pool, trainer.value_and_grad)
    return trainer


class GraphTrainer:
    """A graph, its session, and the pool that computes its gradients, if any."""

    def __init__(self, parameters: Parameters, size: PoolSize | None) -> None:
        self.pool: Any = None
        with tf.Graph().as_default() as graph:
            self._build(parameters, size)
            self._session = v1.Session(graph=graph)
            self._session.run(v1.global_variables_initializer())

    def step(self) -> float:
        return float(self._run([self._loss, self._train])[0])

    def value_and_grad(self) -> tuple[float, Parameters]:
        loss, gradient = self._run([self._loss, self._gradient])
        return float(loss), gradient

    def parameters(self) -> Parameters:
        return [np.copy(array) for array in self._session.run(self._variables)]

    def close(self) -> None:
        self._session.close()
        if self.pool is not None:
            self.pool.close()

    def _build(self, parameters: Parameters, size: PoolSize | None) -> None:
        self._xs = v1.placeholder(tf.float32, [None, 1])
        self._ys = v1.placeholder(tf.float32, [None, 1])
        self._variables = [v1.Variable(array) for array in parameters]
        weights, biases, out_weights, out_biases = self._variables
        hidden = add_layer(self._xs, weights, biases, activation=tf.tanh)
        prediction = add_layer(hidden, out_weights, out_biases)
        self._loss = tf.reduce_mean(
            tf.reduce_sum(tf.square(self._ys - prediction), axis=[1])
        )
        optimizer = v1.train.GradientDescentOptimizer(LEARNING_RATE)
        grads_and_vars = self._grads_and_vars(optimizer, size)
        self._gradient = [gradient for gradient, _ in grads_and_vars]
        self._train = optimizer.apply_gradients(grads_and_vars)

    def _grads_and_vars(self, optimizer: Any, size: PoolSize | None) -> Any:
        if size is None:
            return optimizer.compute_gradients(self._loss)
        self.pool = instep.tensorflow.v1.GradientPool(
            self._loss,
            batch=[self._xs, self._ys],
            workers=size.workers,
            shards=size.shards,
        )
        pairs = self.pool.compute_gradients(optimizer)
        self._loss = self.pool.loss  # comes with the gradients, from the workers
        return pairs

    def _run(self, fetches: Any) -> Any:
        x, y = points()
        return self._session.run(fetches, feed_dict={self._xs: x, self._ys: y})


def add_layer(inputs: Any, weights: Any, biases: Any, activation: Any = None) -> Any:
    """A dense layer."""
    outputs = tf.matmul(inputs, weights) + biases
    return outputs if activation is None else activation(outputs)
