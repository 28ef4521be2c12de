"""A job's training: one loop for every framework and mode, used by the commands.

batches    which rows come when; a training may begin in the middle
loop       pool.stream, the optimizer's step, and where the time of a step goes
learner    what learns: parameters, optimizer and their state; one per framework
choice     a mode as it was asked for
training   a pool, a learner and how far they are; saved by checkpoint
"""
