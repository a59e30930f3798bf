"""The stand-in server as its own process: `python -m tests.wandb_server FOLDER PORT OPTIONS-JSON`.

Prints its port, and ends with its standard input: it can't outlive whoever started it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.wandb_server.options import Options
from tests.wandb_server.server import serve


def main() -> None:
    folder, port, options = sys.argv[1:]
    server = serve(Path(folder), Options(**json.loads(options)), int(port))
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    # The journal is flushed line by line; handler threads may hang in a slow client.
    os._exit(0)


main()
