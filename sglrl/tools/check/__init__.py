"""``sglrl check``: hundreds of rollouts against a tiny model, every logprob checked.

Read ``rollouts`` first, it is what a program that uses sglrl looks like; then ``run``, which puts
the parts in order.

* ``tasks``: what is asked;
* ``rollouts``: asks it, with many conversations in flight;
* ``logprobs``: compares every one with Hugging Face transformers;
* ``report``: what was measured, as a struct and as a table;
* ``run``: all of the above in order.
"""
