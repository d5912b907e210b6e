"""The worker processes of sglrl, installed as ``sglrl_workers``. ``sglrl`` never imports it.

* ``fork_server``: imports SGLang once and forks workers;
* ``preloads``, ``preload_dependencies``: the modules that it imports;
* ``worker_process``: what a fork does until it serves calls;
* ``process_control``: settings of processes that only Linux has;
* ``mailbox``: receives calls inside an engine's scheduler loop;
* ``actor_worker``: runs a plain actor;
* ``liveness``: how the driver and its workers notice each other's end;
* ``weights``: one rank's side of weight updates;
* ``engine``: the engines.
"""
