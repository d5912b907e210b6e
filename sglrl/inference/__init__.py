"""The client of an engine pool: tokens in, tokens and logprobs out.

* ``client``: ``Client``, which users see; ``client_base``, ``weight_methods``, ``control_methods``
  and ``score_methods`` are its base classes;
* ``prompts``, ``tokens``, ``sampling``: check the arguments and encode text;
* ``requests``: makes a call of checked arguments;
* ``renderer``, ``message``, ``completion_parser``, ``tool_choice``: parse what the model says, and
  make it call tools;
* ``replies``, ``completion``, ``stream``: results;
* ``engine_controls``: pause, abort and statistics.
"""
