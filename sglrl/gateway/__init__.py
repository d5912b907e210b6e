"""``sglrl.serve``: an HTTP server in front of a pool, for agents that use OpenAI's API or others.

Every request of an agent becomes part of a token-exact trajectory.

* ``dialect``: the interface that all APIs implement, without I/O;
* ``chat``, ``completions``, ``responses``, ``anthropic``, ``sglang_generate``, ``vllm_generate``:
  the APIs;
* ``store``: the conversations that a request of OpenAI's Responses API may continue by id;
* ``conversations``: the requests of one agent as a tree of turns;
* ``registry``: opens sessions, finds them and ends them;
* ``app``: the routes of the HTTP server;
* ``settings``: the address, names, keys and limits of a gateway;
* ``server``: runs uvicorn on the event loop;
* ``process``: a process that has a server and is a client of the pool;
* ``serve``: starts the processes.
"""
