"""One rank's side of weight updates.

* ``rank_channel``: the reaction of the rank to each message of the driver;
* ``rank_socket``: the rank's socket and its thread;
* ``late_channel``: a channel that imports torch when it is first used;
* ``holds``: keep the engine from making steps during an update;
* ``current_update``: the update in progress, which an abort ends;
* ``preparation``, ``staging_memory``, ``staging``: the checks and the memory of an update;
* ``stage_full``, ``stage_bucketed``, ``stage_files``: the ways to receive an update;
* ``announcements``: announce to the engine that an update will arrive soon;
* ``double_buffer``: live memory and spare memory that can be exchanged;
* ``peer_copy``: copy live weights from one rank to the same rank of a new worker;
* ``kept_weights``: keep live weights in the memory of the host, for a replacement;
* ``weight_engine``: the interface that an engine implements for these modules.
"""
