from tests.unit.ngram.small_index import *  # noqa: F403 (fixtures)
