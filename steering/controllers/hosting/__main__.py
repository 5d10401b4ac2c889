"""``python -m headgate.steering.controllers.hosting``: started by engine cores, not by people; see `program`."""

import logging
import os
import sys

from headgate.steering.controllers.hosting.program import main

status = 1
try:
    main(sys.argv[1:])
    status = 0
except BaseException:
    logging.getLogger("headgate").exception("the process of the controllers failed")
finally:
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of controllers that do not return must not keep it.
    os._exit(status)
