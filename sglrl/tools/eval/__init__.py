"""``sglrl eval``: sample the items of a jsonl file, score the samples, resume after a kill."""
