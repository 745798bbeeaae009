"""`python -m distflow`."""

import os
import sys

if sys.path[0] == os.getcwd():  # put there by Python: a folder to look into may hold modules that look like others
    del sys.path[0]

from distflow.cli import main  # noqa: E402

sys.exit(main())
