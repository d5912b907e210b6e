"""``sglrl.serve``: an HTTP server in front of a pool, for agents that speak OpenAI's API.

Every call of an agent becomes part of a token-exact trajectory.

* ``chat``: OpenAI's chat completions: requests, answers and errors, without I/O;
* ``responses``, ``response_items``, ``response_answers``: the same for OpenAI's Responses API;
* ``store``: the conversations that a request of this API may continue by id;
* ``conversations``: the calls of one agent as a tree of turns;
* ``registry``: the open sessions, their keys and their ends;
* ``app``: routes, keys, limits;
* ``settings``, ``listening``: limits, and the address;
* ``server``: uvicorn on one event loop;
* ``process``: a process that has a server and is a client of the pool;
* ``serving``: ``serve`` starts it.
"""
