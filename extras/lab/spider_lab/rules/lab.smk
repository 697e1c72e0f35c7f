"""Rules of the extra `lab`."""
