"""Start a pool of engine workers and make a client for it.

* ``launch``: the function ``launch``, which starts engine workers;
* ``engine_arguments``, ``engine_aliases``, ``model_folder``: the checks that ``launch`` makes of
  SGLang's arguments and of the model;
* ``tiny_model``: makes a small random model without a network;
* ``running``: runs the main coroutine of a program;
* ``blocking``: a client for programs without asyncio.
"""
