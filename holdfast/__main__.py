"""`python -m holdfast`: the `holdfast` command of this interpreter, wherever the scripts are."""

import sys

from holdfast.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
