"""Fits y = x^2 with a small network, as a tf.compat.v1 graph script."""

import numpy as np
import tensorflow as tf

import instep.tensorflow.v1

tf1 = tf.compat.v1
tf1.disable_eager_execution()
tf1.set_random_seed(1)


def add_layer(inputs, in_size, out_size, activation=None):
    weights = tf1.Variable(tf1.random_normal([in_size, out_size]))
    biases = tf1.Variable(tf.zeros([1, out_size]) + 0.1)
    outputs = tf.matmul(inputs, weights) + biases
    return outputs if activation is None else activation(outputs)


x_data = np.linspace(-2, 2, 50, dtype=np.float32)[:, np.newaxis]
y_data = x_data**2

xs = tf1.placeholder(tf.float32, [None, 1])
ys = tf1.placeholder(tf.float32, [None, 1])
hidden = add_layer(xs, 1, 5, activation=tf.tanh)
prediction = add_layer(hidden, 5, 1)
loss = tf.reduce_mean(tf.reduce_sum(tf.square(ys - prediction), axis=[1]))

optimizer = tf1.train.GradientDescentOptimizer(1e-2)
pool = instep.tensorflow.v1.GradientPool(loss, batch=[xs, ys], workers=4)
grads_and_vars = pool.compute_gradients(optimizer)
train_op = optimizer.apply_gradients(grads_and_vars)

with tf1.Session() as sess:
    sess.run(tf1.global_variables_initializer())
    for step in range(1, 2001):
        sess.run(train_op, feed_dict={xs: x_data, ys: y_data})
        if step % 200 == 0:
            print(step, sess.run(loss, feed_dict={xs: x_data, ys: y_data}))
