"""Make calls of engines from prompts and sampling parameters, and read their results.

* ``prompts``, ``tokens``: check prompts and encode text;
* ``sampling``, ``sampling_fields``: declare and check sampling parameters;
* ``options``, ``requests``: make a call from checked arguments;
* ``renderer``, ``message``, ``completion_parser``: parse reasoning and tool calls from the output;
* ``tool_choice``, ``turn_grammar``: grammars that make the model call tools;
* ``json_grammar``, ``engine_grammar``: grammars from JSON schemas, and checks of given grammars;
* ``replies``, ``completion``, ``stream``: the results.
"""
