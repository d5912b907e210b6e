"""Run your own classes (actors) in worker processes.

* ``actor``: ``Actor`` and ``endpoint``, which declare an actor class;
* ``handles``: call the endpoints of workers;
* ``leases``: reserve a worker for an episode;
* ``replies``: receive results and streams;
* ``spawning``: ``spawn``, which starts the processes;
* ``class_pickling``: pickles classes that a worker cannot import.
"""
