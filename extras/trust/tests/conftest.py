from tests.unit.small_training import *  # noqa: F403 (fixtures)
