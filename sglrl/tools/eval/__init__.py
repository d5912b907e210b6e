"""``sglrl eval``: sample the items of a jsonl file and score the samples.

A run that was killed can continue.

* ``command``: the options of the command;
* ``items``: reads the input;
* ``run``: samples and scores the items;
* ``scoring``: calls the user's score function;
* ``results``: the output file;
* ``summary``: the summary with pass@k.
"""
