"""One rank's side of weight updates.

* ``rank_channel``: what the rank does at each message of the driver;
* ``rank_socket``: the rank's socket and its thread;
* ``late_channel``: a channel that imports torch when it is first used;
* ``holds``: the engine makes no steps during an update;
* ``current_update``: the update in progress, which an abort ends;
* ``preparation``, ``staging_memory``, ``staging``: the checks and the memory of an update;
* ``stage_full``, ``stage_bucketed``, ``stage_files``: the ways to receive it;
* ``announcements``: tell the engine that an update is about to arrive;
* ``double_buffer``: memory that can be exchanged as a whole;
* ``peer_copy``: live weights from one rank to the same rank of a new worker;
* ``kept_weights``: live weights in the memory of the host, for a replacement;
* ``weight_engine``: what these need from an engine.
"""
