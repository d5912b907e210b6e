"""The asyncio shell around ``core``, and the worker processes.

* ``driver``: receives messages, sets the timer, and executes the effects of ``core.fabric``;
* ``workers``: changes the states of the workers;
* ``links``: the connections to the workers, and the memory that they share with the driver;
* ``pool``: the workers of one ``launch`` or ``spawn``, and the operations on them;
* ``port``: the interface of a pool for its client, for local and remote pools;
* ``lifetime``: the states of a pool, which is entered once and closed once;
* ``supervisor``: starts the workers of a pool and replaces lost workers;
* ``worker_info``: the report of a pool about its workers and its queue;
* ``worker_processes``: the processes of each worker;
* ``worker_logs``: the logs of the workers;
* ``launcher``, ``fork_server``: start and kill processes, and report their exit;
* ``hang_monitor``: finds and kills workers that hang;
* ``environment``: the versions of this Python and its packages;
* ``temporary_folders``, ``threads``: folders and threads that leave nothing behind at exit.
"""
