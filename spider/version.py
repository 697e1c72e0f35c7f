"""The version of Spider, apart from `spider` itself so that what writes it down need not import that."""

VERSION = "0.1.0"
