"""Your own classes in worker processes.

* ``actor``: ``Actor``, ``endpoint`` and the handle that calls them;
* ``spawning``: ``spawn`` starts the processes;
* ``class_pickling``: classes that a worker cannot import travel by value.
"""
