"""``sglrl demo``: a reinforcement-learning run that needs no download and no GPU. A tiny model with
random weights learns two tasks, one of them with a tool, while it is sampled by SGLang.

Read ``run`` first, and in it ``learn``: that is what a program that trains with sglrl looks like.

* ``tiny``: makes the model;
* ``tasks``: what is asked, the agents that ask it, and their tool;
* ``trainer``: GRPO, with the functions of ``sglrl.rl``;
* ``run``: rollouts, training and new weights in turn; the same without running ahead, to compare;
* ``replay``: checks trajectories token by token with Hugging Face transformers;
* ``report``: what was found out, as a struct, a table and a plot;
* ``display``: progress on a terminal, or as plain lines.
"""
