"""Start a pool of engine workers and make a client for it.

* ``launch``: the function ``launch``, which starts engine workers;
* ``engine_arguments``, ``engine_aliases``, ``model_folder``: the checks that ``launch`` makes of
  SGLang's arguments and of the model;
* ``local_models``, ``tiny_model``, ``smollm2``: make models without a hub;
* ``running``: runs the main coroutine of a program;
* ``blocking``: a client for programs without asyncio.
"""
