"""``sglrl check``: run hundreds of rollouts on a tiny model and check every logprob.

Read ``rollouts`` first: a program that uses sglrl looks like this. Then read ``run``, which calls
the other parts.

* ``tasks``: the questions;
* ``rollouts``: asks the questions, with many conversations in flight;
* ``report``: the measurements as a struct and as a table;
* ``run``: runs all of this in order.

``logprob_check`` in ``sglrl.tools`` compares every logprob with Hugging Face transformers.
"""
