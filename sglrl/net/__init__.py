"""Moving frames between one driver and its workers: ``base`` says what a transport is, ``zmq`` is
the real one, ``memory`` joins both sides in one process and ships for tests and benchmarks."""
