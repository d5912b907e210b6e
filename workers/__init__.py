"""The worker processes of sglrl, installed as ``sglrl_workers``. ``sglrl`` never imports it.

* ``fork_server``: a process that imports SGLang once and forks workers;
* ``preloads``, ``preload_dependencies``: the modules that the fork server imports;
* ``worker_process``: the steps of a forked process from the fork to the end of the worker;
* ``process_control``: process settings that are specific to Linux;
* ``mailbox``: receives calls inside an engine's scheduler loop;
* ``actor_worker``: runs a plain actor;
* ``liveness``: heartbeats, and the reaction to a broken connection;
* ``weights``: one rank's side of weight updates;
* ``engine``: the engines.
"""
