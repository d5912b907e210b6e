"""Your own classes in worker processes.

* ``actor``: ``Actor`` and ``endpoint``;
* ``handles``: call endpoints;
* ``replies``: receive results and streams;
* ``spawning``: ``spawn`` starts the processes;
* ``class_pickling``: classes that a worker cannot import travel by value.
"""
