from tests.unit.small_training import *  # noqa: F403 (fixtures)
from tests.workflow.conftest import prepared, prepared_folder, trained, trained_folder, workflow  # noqa: F401
