"""One contract for both transports."""
