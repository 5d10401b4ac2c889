"""``python -m headgate.capture.links``: started by other processes, not by people; see `child_process.start_child`."""

import logging
import os
import sys

from headgate.capture.links.child_process import serve

status = 1
try:
    serve(sys.argv[1], *map(int, sys.argv[2:]))
    status = 0
except BaseException:
    logging.getLogger("headgate").exception("a child process failed: %s", sys.argv[1])
finally:
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of third parties' code that are still in a call, and libraries that end slowly, must not keep it.
    os._exit(status)
