"""`python -m atoll` is `atoll`."""

from atoll.cli import main

main()
