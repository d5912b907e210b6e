"""The only folder that imports sglang. ``compat`` absorbs what differs between its versions."""
