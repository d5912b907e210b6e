"""One conversation, token in and token out.

* ``session``: ``Session`` samples turns;
* ``history``: the turns that it has sampled, as a tree;
* ``observations``: the tokens of observed text and messages;
* ``options``, ``session_spec``: the arguments of a session, and its prompt;
* ``continuation``: the text that a chat template adds after the model's own tokens;
* ``rewards``: what the turns have earned;
* ``tools``: runs the tools that the model calls;
* ``trajectory``, ``turn``: the result, as arrays;
* ``tensors``, ``trajectory_files``: the result as tensors, and on disk;
* ``gate``: pauses turns.
"""
