"""Settings of every test process, made before torch is imported.

Tests run several at a time. A process with as many threads as there are cores would then wait for the others
at every parallel region, which is tens of times slower than one thread.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
