"""The ``sglrl`` command.

* ``cli``: declares the subcommands;
* ``demo``, ``check``, ``eval``: the packages of the three longest subcommands;
* ``call``, ``doctor``, ``node``, ``rollouts``, ``serve``: the other subcommands that have a
  module;
* ``rollout_summary``: the summary that ``rollouts`` prints;
* ``options``, ``sampling_options``: options that several subcommands share;
* ``logprob_check``: compares logprobs with Hugging Face transformers;
* ``display``: shows progress and prints results.
"""
