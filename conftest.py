"""Settings of every test process, made before torch is imported.

Tests run several at a time. A process with as many threads as there are cores would then wait for the others
at every parallel region, which is tens of times slower than one thread.
"""

import gc
import os
import shutil

import hypothesis
import pytest

from tests import forkserver
from tests.debian import left_out

os.environ["OMP_NUM_THREADS"] = "1"

# No test depends on the speed of the machine.
hypothesis.settings.register_profile("spider", deadline=None)
hypothesis.settings.load_profile("spider")


@pytest.fixture(autouse=True)
def environment_of_before():
    """Give each test the environment variables that the process started with.

    Commands that run inside the test process set some: ``spider train`` with several processes turns
    tracking off in all but the first.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def pytest_configure(config):
    """Start the fork server in the first process of the test session; xdist's workers inherit its address."""
    gc.disable()
    if not hasattr(config, "workerinput"):
        server = forkserver.start()
        if server:
            config.add_cleanup(lambda: forkserver.stop(server))


def pytest_runtest_setup(item):
    """Skip a test that needs a compiler which cannot work here."""
    if item.get_closest_marker("inductor"):
        import torch

        if not shutil.which("g++"):
            pytest.skip("NOT COMPILED: torch.compile needs a C++ compiler, there is no g++")
        if " " in torch.__file__:
            pytest.skip("NOT COMPILED: torch.compile cannot link where torch's own path has a space")


def pytest_collection_finish():
    """Leave what the collection made out of garbage collections, which take a quarter of it."""
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Run workflows and servers first. They mostly wait, so other tests can run beside them."""
    items.sort(key=lambda item: not item.nodeid.startswith(("tests/workflow", "tests/browser")))


def pytest_terminal_summary(terminalreporter):
    """Print registers and spills of the compiled kernels, and a line about missing packages."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    kernels = [value for report in reports for name, value in report.user_properties if name == "kernel"]
    if kernels:
        terminalreporter.section("kernels compiled")
        terminalreporter.write_line("\n".join(sorted(set(kernels))))
    skipped = [report.longrepr for report in terminalreporter.getreports("skipped")]
    if line := left_out([skip[2] for skip in skipped if isinstance(skip, tuple)]):
        terminalreporter.write_line(line)
