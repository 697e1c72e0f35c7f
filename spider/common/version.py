"""The version of Spider, in a module without imports."""

VERSION = "0.2.0"
