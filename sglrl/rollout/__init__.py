"""Sessions, trajectories and the runner of agent loops."""
