"""`instep demo`: one small training run, by one process and by a pool, compared.

parabola      the problem: points, network, where training starts
trainer       what one way of training it looks like, for any framework
*_trainer     ... in NumPy, in TensorFlow: one file per framework
measure       trains in one process and in a pool, and compares
display       shows it while it happens
report        says what came out
picture       draws it
"""
