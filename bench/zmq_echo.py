"""The echo process of the row "transport alone" in ``bench.fabric``. It returns every message."""

from __future__ import annotations

import sys

from sglrl.transport.zmq import ZmqPolledDealer

IDENTITY = b"echo"
HELLO, END = b"hello", b"end"


def main() -> None:
    dealer = ZmqPolledDealer(sys.argv[1], IDENTITY, max_message_bytes=1 << 20)
    dealer.send([HELLO])
    while True:
        while (frames := dealer.receive()) is not None:
            if frames[0] == END:
                dealer.close()
                return
            dealer.send(frames)
        dealer.wait(10.0)


if __name__ == "__main__":
    main()
