"""The worker-process side of sglrl, installed as ``sglrl_workers``. Never imported by ``sglrl``,
which starts it as processes and talks to it in messages."""
