"""One rank's side of weight updates.

* ``rank_channel``: the rank's socket and thread, and the buckets that it receives;
* ``staging``: where an update is kept until it is live;
* ``double_buffer``: memory that can be exchanged as a whole;
* ``peer_copy``: live weights from one rank to the same rank of a new worker;
* ``weight_engine``: what these need from an engine.
"""
