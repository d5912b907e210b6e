"""How a program starts.

* ``launch``: ``launch`` starts engine workers;
* ``engine_arguments``, ``engine_aliases``, ``model_folder``: its checks of SGLang's arguments and
  of the model;
* ``tiny_model``: makes a small random model without a network;
* ``running``: runs a main coroutine;
* ``blocking``: the same client without asyncio.
"""
