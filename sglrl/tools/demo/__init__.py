"""``sglrl demo``: a reinforcement-learning run that needs no download and no GPU.

A tiny model with random weights learns two tasks, one of them with a tool. SGLang samples from the
model during training.

Read the method ``learn`` in ``run`` first: a program that trains with sglrl looks like this method.

* ``tasks``: the tasks, the agent that runs them, and its tool;
* ``letters``: the format in which the model calls the tool;
* ``trainer``: GRPO, with the functions of ``sglrl.rl``;
* ``run``: runs rollouts, training and weight updates, and compares with synchronous steps;
* ``replay``: checks trajectories token by token with Hugging Face transformers;
* ``report``: the results as a struct, a table and a plot.

``sglrl.launching.tiny_model`` makes the model. ``sglrl.tools.display`` shows progress on a terminal
or as plain lines.
"""
