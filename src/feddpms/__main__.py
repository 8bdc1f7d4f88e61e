"""`python -m feddpms`."""

from feddpms.cli import main

main()
