"""The asyncio shell around ``core``, and the worker processes.

* ``driver``: one receiver, one timer, and the effects of ``core.fabric``;
* ``links``: sends messages to the workers;
* ``raw_frames``: rows of logprobs that arrive beside a message;
* ``gathering``: submit several calls and gather their results;
* ``pool``: the workers of one ``launch`` or ``spawn``, from fork to end;
* ``worker_processes``, ``fork_server``: start and kill processes, and notice their exit;
* ``hang_monitor``: finds workers that hang.
"""
