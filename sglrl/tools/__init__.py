"""The ``sglrl`` command: ``cli`` has its subcommands, ``demo`` and ``check`` the two long ones.

``tiny_model`` makes a model without a network; ``logprob_check`` compares logprobs with
transformers; ``doctor`` examines this machine; ``display`` shows progress.
"""
