"""Print the results folder of the configuration file in the first argument.

`make` calls this before Snakemake, whose own errors name neither a missing file nor the line of a broken one.
"""

import sys
from pathlib import Path

from spider.config.schema import ConfigError, read_yaml


def results_folder(path: Path) -> str:
    """Return the folder that ``results:`` names. The workflow validates the rest of the file."""
    written = read_yaml(path)
    return str(written.get("results", "results")) if isinstance(written, dict) else "results"


if __name__ == "__main__":
    try:
        print(results_folder(Path(sys.argv[1])))
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")
