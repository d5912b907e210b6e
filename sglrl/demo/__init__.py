"""A demo that needs no download: hundreds of rollouts against a tiny model, checked and measured.

Read ``rollouts`` first, it is what a program that uses sglrl looks like; then ``run``, which puts
the parts in order.

* ``tiny``: makes the model;
* ``tasks``: what is asked;
* ``rollouts``: asks it, with many conversations in flight;
* ``check``: compares every logprob with Hugging Face transformers;
* ``report``: what was measured, as a struct and as a table;
* ``display``: progress on a terminal, or as plain lines;
* ``run``: all of the above in order.
"""
