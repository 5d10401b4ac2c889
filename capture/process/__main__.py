"""``python -m headgate.capture.process``: started by workers, not by people; see `headgate.capture.process.program`."""

import logging
import os
import sys

from headgate.capture.process.program import main

status = 1
try:
    main(sys.argv[1:])
    status = 0
except BaseException:
    logging.getLogger("headgate").exception("the capture process failed")
finally:
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of consumers that are still in a call, and libraries that end slowly, must not keep it.
    os._exit(status)
