"""Real worker processes, sockets and kills, with plain actors and the fake engine."""
