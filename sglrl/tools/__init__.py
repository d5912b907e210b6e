"""The ``sglrl`` command: ``cli`` has its subcommands, ``demo`` and ``check`` the two long ones.

``logprob_check`` compares logprobs with transformers; ``doctor`` examines this machine; ``display``
shows progress.
"""
