"""`python -m holdfast_trainer ARGUMENTS`: the same as `holdfast train ARGUMENTS`."""

import sys

from holdfast_trainer.command import main

sys.exit(main())
