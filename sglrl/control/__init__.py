"""The control of a pool of engines: pause, sleep, adapters, weights, statistics, workers.

* ``operations``: an operation is a method of ``Client`` that runs where the pool was launched;
* ``client_base``: the state that all parts of ``Client`` share;
* ``pausing``, ``sleeping``, ``adapters``, ``weights``, ``engines``, ``workers``: the operations,
  and the state of the pool that they change;
* ``engine_calls``, ``engine_endpoints``: call the control endpoints of the engines.
"""
