"""The asyncio shell around ``core``, and the worker processes.

* ``driver``: one receiver, one timer, and the effects of ``core.fabric``;
* ``workers``: the states of the workers;
* ``links``: the connections to the workers, and the memory that they share with the driver;
* ``pool``: the workers of one ``launch`` or ``spawn``, as its client sees them;
* ``port``: the parts of a pool that a client uses, with worker processes or in another process;
* ``lifetime``: the states of a pool, entered once and closed once;
* ``supervisor``: starts the workers of a pool and replaces lost ones;
* ``worker_info``: what a pool reports about its workers;
* ``worker_processes``: the processes of each worker;
* ``launcher``, ``fork_server``: start and kill processes, and notice their exit;
* ``hang_monitor``: finds workers that hang.
"""
