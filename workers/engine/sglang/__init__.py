"""Run SGLang in a worker. Only this folder imports sglang. ``compat`` hides version differences."""
