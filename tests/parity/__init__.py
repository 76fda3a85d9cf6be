"""Expected numbers of other implementations, reached through the public functions of erpo: `python -m tests.parity DIR`."""
