"""Send every datagram back: ``python echo_program.py ADDRESS``. Prints the port."""

import json
import socket
import sys

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
    here.bind((sys.argv[1], 0))
    print(json.dumps({"port": here.getsockname()[1]}), flush=True)
    while True:
        body, sender = here.recvfrom(2_000)
        here.sendto(body, sender)
