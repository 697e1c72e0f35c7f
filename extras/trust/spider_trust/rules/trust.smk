"""Rules of the extra `trust`."""
