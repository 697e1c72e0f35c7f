"""Show a results folder in MLflow: jobs, trainings with their curves, models and their scores.

The results folder is the database, and the store is a view of it, which `sync` brings up to date. Jobs know
nothing of MLflow. The process that runs the workflow starts one that repeats `sync` (`follower`), and
``spider track sync`` is the same by hand. So there is one writer, no job waits for a store, and a new store
gets everything.
"""
