"""Calls of engines: prompts, sampling parameters, requests and their results.

* ``prompts``, ``tokens``: check the arguments and encode text;
* ``sampling``, ``sampling_fields``: declare and check sampling parameters;
* ``options``, ``requests``: make a call of checked arguments;
* ``renderer``, ``message``, ``completion_parser``, ``tool_choice``: parse what the model says, and
  make it call tools;
* ``replies``, ``completion``, ``stream``: results.
"""
