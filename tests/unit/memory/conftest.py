from tests.unit.memory.small_memory import *  # noqa: F403 (fixtures)
