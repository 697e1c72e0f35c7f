"""Publish a model: export it as a folder for other programs, and push that folder to a hub."""
