"""One conversation of several turns, kept as the exact tokens that the engine sampled.

* ``session``: ``Session`` samples turns;
* ``history``: the turns that it has sampled, as a tree;
* ``observations``: the tokens of observed text and messages;
* ``options``, ``session_spec``: the options and the prompt of a session;
* ``continuation``: the text that a chat template adds after the model's own tokens;
* ``rewards``: the rewards of the turns;
* ``tools``: runs the tools that the model calls;
* ``trajectory``, ``turn``: the trajectory, as arrays;
* ``tensors``, ``trajectory_files``, ``parquet_file``: trajectories as tensors, and in files;
* ``gate``: makes turns wait while a run is paused.
"""
